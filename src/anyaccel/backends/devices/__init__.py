"""Built-in backends: one module per accelerator, each with a sheet, a driver and a `BACKEND`."""
