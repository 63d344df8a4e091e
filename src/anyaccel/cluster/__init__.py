"""Many devices and many machines: rows of prompts over workers, here or on Ray."""
