"""`anyaccel batch`: generates one image per row of a JSONL file on all devices, and can be resumed."""
