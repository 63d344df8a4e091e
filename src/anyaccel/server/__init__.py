"""HTTP service that batches the denoising steps of concurrent requests."""
