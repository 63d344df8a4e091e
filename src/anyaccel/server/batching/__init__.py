"""Step batching: denoising steps of concurrent requests run as one batched model call."""
