"""The built-in accelerators: one module each, with its sheet, its driver and `BACKEND`."""
