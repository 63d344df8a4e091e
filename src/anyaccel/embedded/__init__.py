"""Small text-to-image model included in anyaccel; it can draw about a thousand objects."""
