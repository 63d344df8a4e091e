"""Step batching: several requests share one denoiser call."""
