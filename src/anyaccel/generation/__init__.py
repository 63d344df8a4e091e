"""Image generation from prompts; each file stores the metadata to reproduce its image."""
