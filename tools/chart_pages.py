"""mkdocs hook that generates the chart pages from the recorded chart."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from anyaccel.backends.evidence_files import load_verifications
from anyaccel.checking.chart.badge import make_badge
from anyaccel.checking.chart.chart_json import as_document, read_chart
from anyaccel.checking.chart.markdown import write_markdown
from anyaccel.checking.chart.page import write_page

CHART = Path(__file__).parents[1] / "benchmarks" / "results" / "chart.json"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the Markdown table, the interactive page and the badges."""
    chart, verifications = read_chart(CHART), tuple(load_verifications().values())
    # Hides the table of contents, because the tables need its width.
    head = "---\nhide: [toc]\n---\n\n"
    files.append(
        File.generated(config, "chart.md", content=head + write_markdown(chart, verifications, "chart-page.html"))
    )
    files.append(File.generated(config, "chart-page.html", content=write_page(as_document(chart, verifications))))
    # The tables show a badge only in cells that work, so one badge per device is enough.
    for device in chart.devices:
        files.append(
            File.generated(config, f"badges/{device}.svg", content=make_badge(device, "works (virtual)", "works"))
        )
    return files
