"""`anyaccel batch`: a resumable run on all devices that generates one image per row of a JSONL file."""
