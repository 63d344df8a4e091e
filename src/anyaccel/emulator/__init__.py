"""Virtual accelerators, which enforce the limits on a device's sheet on a CPU."""
