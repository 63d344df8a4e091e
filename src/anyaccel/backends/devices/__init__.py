"""Built-in backends: one module per accelerator, with a sheet, a driver and `BACKEND`."""
