"""The `anyaccel` command line, with one module per command."""
