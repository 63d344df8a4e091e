"""Virtual accelerators: the limits on a device's sheet, enforced on a CPU."""
