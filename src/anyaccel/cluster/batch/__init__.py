"""`anyaccel batch`: one image per row of a JSONL file, on all devices, resumable."""
