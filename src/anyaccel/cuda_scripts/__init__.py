"""Support for running unmodified CUDA scripts on any device."""
