"""The job queue: its SQLite store, the dispatcher, events, metrics and traces."""
