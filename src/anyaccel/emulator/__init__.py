"""Virtual accelerators: any CPU, enforcing what a device's sheet says it cannot do."""
