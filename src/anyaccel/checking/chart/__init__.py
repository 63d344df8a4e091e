"""The chart: every tiny pipeline on every virtual device, as data, as Markdown and as a page to click through."""
