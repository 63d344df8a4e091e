"""Job queue: SQLite store, dispatcher, events, metrics and traces."""
