"""Tables of consumer GPUs: memory size, memory bandwidth and half-precision throughput, with their sources."""
