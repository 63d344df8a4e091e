"""The small text-to-image model included in anyaccel; it draws about a thousand objects."""
