"""Child processes, signals and the garbage collector."""
