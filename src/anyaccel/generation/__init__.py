"""Image generation from prompts; each file stores the metadata needed to reproduce its image."""
