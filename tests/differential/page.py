"""docs/compatibility.md, generated from the stored results."""

from __future__ import annotations

import json
from typing import Any

import tests.differential.usages  # noqa: F401 - registers the usages
from tests.conftest import ROOT
from tests.differential.faults import FAULTS
from tests.differential.session import USAGES, VARIANTS

__all__ = ["PATH", "make_page", "read_results"]

PATH = ROOT / "docs" / "compatibility.md"
RESULTS = ROOT / "benchmarks" / "results"

CELLS = {"same": "same", "close": "close", "rejected": "error", "skipped": "n/a", "open": "**differs**"}
"""Text for each status of a result."""

INTRODUCTION = """\
# Compatibility with diffusers

A placed pipeline must give the result of stock diffusers, whatever a program does with it. The tests in
`tests/differential` check this for {usages} usages. Each usage is a short program, such as "call a pipeline, edit a
weight, call it again". It runs once with stock diffusers and once with a placed pipeline. The tests compare the images,
the states of the generators, the warnings, the errors and the objects that the program passed in. All runs use tiny
pipelines in float32.

This page is generated from `benchmarks/results/differential_*.json` by `python -m tests.differential --write-docs`.

| column | placed on | compared with stock diffusers on | allowed difference |
|---|---|---|---|
{variants}

The allowed difference is relative to the range of the result.

| cell | meaning |
|---|---|
| same | the same bits |
| close | the same within the allowed difference |
| error | the usage is not supported and raises an error that says so |
| n/a | does not apply; the reason is below the table |
| **differs** | a known difference; the reason is below the table |
| – | not run |

{counts}

CI runs a fixed eighth of the usages on the CPU. To run all of them:

```console
$ python -m tests.differential --variant cpu split served mps neuron --out build/differential.json
$ python -m tests.differential --variant cuda cuda-captured --processes 12 --out build/cuda.json
```

An interrupted run continues where it stopped if you run the same command again.
"""

FAULTS_INTRODUCTION = """\
## Faults found by a review

A review in November 2026 found the following faults. The right column names the usages and test functions that fail
if a fault comes back, and says what is not tested.

| | fault | tests |
|---|---|---|
"""


def read_results() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the stored results by usage and variant."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted(RESULTS.glob("differential_*.json")):
        for row in json.loads(path.read_text())["rows"]:
            rows[row["usage"], row["variant"]] = row
    return rows


def make_page() -> str:
    """Return the text of the page."""
    results = read_results()
    variants = [name for name in VARIANTS if any(variant == name for _, variant in results)]
    header = INTRODUCTION.format(
        usages=len(USAGES),
        variants="\n".join(_describe_variant(name) for name in variants),
        counts=_make_counts(results, variants),
    )
    groups = dict.fromkeys(usage.group for usage in USAGES.values())
    tables = [_make_table(group, variants, results) for group in groups]
    return "\n".join([header, *tables, _make_faults()])


def _describe_variant(name: str) -> str:
    variant = VARIANTS[name]
    where = f"virtual {variant.device}" if variant.virtual else variant.device
    details = [f"`{option}={value}`" for option, value in variant.options.items()]
    if variant.served:
        details.append("step batching of `anyaccel serve` with a concurrent request")
    if variant.earlier_calls:
        details.append(f"after {variant.earlier_calls} other calls")
    text = ", ".join([where, *details])
    return f"| {name} | {text} | {variant.stock_device} | {variant.tolerance or 'none'} |"


def _make_counts(results: dict[tuple[str, str], dict[str, Any]], variants: list[str]) -> str:
    names = ["same", "close", "error", "n/a", "differs", "not run"]
    lines = ["| number of usages | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for variant in variants:
        cells = [_read_cell(results, name, variant).strip("*") for name in USAGES]
        counts = [cells.count(name.replace("not run", "–")) for name in names]
        lines.append(f"| {variant} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines)


def _read_cell(results: dict[tuple[str, str], dict[str, Any]], usage: str, variant: str) -> str:
    # The code says which variants do not apply, also before they are run.
    if variant in USAGES[usage].skip:
        return CELLS["skipped"]
    row = results.get((usage, variant))
    return "–" if row is None else CELLS.get(row["status"], CELLS["open"])


def _make_table(group: str, variants: list[str], results: dict[tuple[str, str], dict[str, Any]]) -> str:
    lines = [f"## {group[0].upper()}{group[1:]}", "", "| usage | " + " | ".join(variants) + " |"]
    lines.append("|---|" + "---|" * len(variants))
    reasons: dict[str, list[str]] = {}
    for usage in (usage for usage in USAGES.values() if usage.group == group):
        cells = [_read_cell(results, usage.name, variant) for variant in variants]
        summary = usage.summary.rstrip(".").replace("|", "\\|")
        lines.append(f'| <span id="{usage.name}">{summary}</span> | ' + " | ".join(cells) + " |")
        for variant, cell in zip(variants, cells, strict=True):
            if cell not in ("same", "close", "–"):
                reason = usage.skip.get(variant) or _read_reason(results[usage.name, variant])
                reasons.setdefault(reason, []).append(f"{usage.name} ({variant})")
    lines += [""] + [f"- {', '.join(names)}: {reason}." for reason, names in reasons.items()]
    return "\n".join(lines).rstrip() + "\n"


def _read_reason(row: dict[str, Any]) -> str:
    text: str = row["text"]
    # The reason of a known difference comes before the differences.
    return text.split(": ")[0] if row["status"] == "open" else text.split("\n")[0].rstrip(".")


def _make_faults() -> str:
    lines = []
    for number, fault in enumerate(FAULTS, 1):
        names = [f"[{usage}](#{usage})" for usage in fault.usages]
        names += [f"`{test}`" for test in fault.tests]
        names += [f"Not tested: {fault.untested}"] if fault.untested else []
        lines.append(f"| {number} | {fault.summary} | {'<br>'.join(names)} |")
    return FAULTS_INTRODUCTION + "\n".join(lines) + "\n"
