"""Scripts that were written for CUDA, run unedited on the device that is here."""
