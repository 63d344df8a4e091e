"""Image generation from prompts, with metadata that is stored in the files and reproduces them."""
