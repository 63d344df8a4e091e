"""The small text-to-image model that ships with anyaccel; it draws about a thousand objects."""
