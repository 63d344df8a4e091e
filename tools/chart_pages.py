"""A hook of mkdocs: the chart's pages, written from the chart that is kept, so that they cannot disagree with it."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from anyaccel.backends.evidence import load_verifications
from anyaccel.checking.chart.badge import make_badge
from anyaccel.checking.chart.chart_file import as_document, read_chart
from anyaccel.checking.chart.markdown import write_markdown
from anyaccel.checking.chart.page import write_page

CHART = Path(__file__).parents[1] / "benchmarks" / "results" / "chart.json"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Write the table, the page to click through, and the badges."""
    chart, seen = read_chart(CHART), tuple(load_verifications().values())
    head = "---\nhide: [toc]\n---\n\n"
    files.append(File.generated(config, "chart.md", content=head + write_markdown(chart, seen, "chart-page.html")))
    files.append(File.generated(config, "chart-page.html", content=write_page(as_document(chart, seen))))
    for device in chart.devices:
        files.append(
            File.generated(config, f"badges/{device}.svg", content=make_badge(device, "works (virtual)", "works"))
        )
    return files
