"""Virtual accelerators: devices that run on the CPU and enforce the limits on a real device's sheet."""
