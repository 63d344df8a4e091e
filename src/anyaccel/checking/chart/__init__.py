"""Chart of all tiny pipelines on all virtual devices, as JSON, Markdown and an interactive page."""
