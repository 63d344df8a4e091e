"""The small text-to-image model that ships with anyaccel: it draws a thousand objects offline."""
