"""mkdocs hook that generates one page per device from its sheet."""

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from anyaccel.backends.registry import build_registry
from anyaccel.backends.sheet import Sheet
from anyaccel.backends.sheet_text import SheetRow, describe_sheet

# Value of the `Devices` entry in mkdocs.yml, which the generated pages replace.
PLACEHOLDER = "devices"
# Hides the table of contents, because the tables need its width.
_WIDE = ["---", "hide: [toc]", "---", ""]


def sheets() -> list[Sheet]:
    """Return the built-in sheets in order of preference."""
    # Without plugins: packages installed on the build machine must not change the pages.
    return [sheet for backend in build_registry([]).backends.values() for sheet in backend.sheets]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace the `devices` entry of the navigation with the generated pages."""
    pages: list[dict[str, str] | str] = [{"All devices": "devices/index.md"}]
    pages += [{sheet.title: f"devices/{sheet.name}.md"} for sheet in sheets()]
    config.nav = [{"Devices": pages} if item == {"Devices": PLACEHOLDER} else item for item in config.nav or []]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for sheet in sheets():
        files.append(File.generated(config, f"devices/{sheet.name}.md", content=write_page(sheet)))
    files.append(File.generated(config, "devices/index.md", content=write_index(sheets())))
    return files


def write_index(all_sheets: list[Sheet]) -> str:
    """Return the overview page: all devices and dtypes in one table."""
    dtypes = ["float64", "int64", "float32", "float16", "bfloat16", "complex64", "float8_e4m3fn"]
    lines = [
        *_WIDE,
        "# Devices",
        "",
        "Support for each dtype by device, or the *effect* of using it: `error` raises, `wrong` is silently wrong,",
        "`narrowed` silently uses a smaller dtype, `slow` costs time. The page of each device has the sources.",
        "",
        f"| device | {' | '.join(dtypes)} | random numbers | batches |",
        f"|---|{'---|' * (len(dtypes) + 2)}",
    ]
    for sheet in all_sheets:
        verdicts = {row.subject: row.verdict for section in describe_sheet(sheet) for row in section.rows}
        cells = [verdicts[name] for name in [*dtypes, "random numbers", "batches"]]
        lines.append(f"| [{sheet.title}]({sheet.name}.md) | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_page(sheet: Sheet) -> str:
    """Return the page of a device: everything on its sheet, with sources."""
    lines = [
        *_WIDE,
        f"# {sheet.title}",
        "",
        f'`torch.device("{sheet.torch_name}")`, by {sheet.vendor}. [Documentation]({sheet.documentation}).',
        "",
        "Generated from the device sheet. *hardware* means measured on a device, *documented* means stated by a",
        "document, and *inferred* means concluded from other facts. Open questions are marked as not known.",
    ]
    for section in describe_sheet(sheet):
        lines += ["", f"## {section.title}", "", "| item | answer | details |", "|---|---|---|"]
        lines += [_write_row(row) for row in section.rows]
    return "\n".join(lines) + "\n"


def _write_row(row: SheetRow) -> str:
    linked = row.source.startswith("http")
    source = f" [{row.evidence}]({row.source})" if linked else f" {row.evidence}: {row.source}" if row.source else ""
    against = f" **[contradicted]({row.contradicted_by})**" if row.contradicted_by.startswith("http") else ""
    cells = (f"`{row.subject}`", row.verdict, f"{row.says}{source}{against}")
    # A pipe in a text would start a new column.
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
