"""Files of weights: checks before they are loaded, and weights of 8 bits and of GGUF files."""
