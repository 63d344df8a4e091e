"""The HTTP service. It batches the denoising steps of concurrent requests on one pipeline."""
