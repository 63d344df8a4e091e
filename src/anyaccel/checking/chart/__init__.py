"""Chart of all tiny pipelines on all virtual devices, as data, Markdown and an interactive page."""
