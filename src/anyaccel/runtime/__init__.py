"""Places a pipeline on a device according to its plan, and runs its calls."""
