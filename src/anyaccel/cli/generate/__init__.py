"""The `anyaccel generate` command."""
