"""The small text-to-image model that ships with the package: a thousand things, drawn from a prompt, offline."""
