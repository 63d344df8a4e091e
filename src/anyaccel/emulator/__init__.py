"""Virtual accelerators: the limits of a device's sheet, enforced on a CPU."""
