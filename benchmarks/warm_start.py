"""Time of the first image in a new process, with an empty and a filled compile cache.

    python -m benchmarks.warm_start cuda [--cases klein sd15] [--together]

Writes benchmarks/results/warm_start_DEVICE.json after each case. A case runs twice, each time in its own
process, with a cache folder that is empty the first time. `--together` starts all cases concurrently in both runs.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import anyaccel
from anyaccel.backends.device import this_machine
from anyaccel.bench.bench import run_together
from anyaccel.bench.case import OURS, BenchCase
from anyaccel.storage.cache_dir import CACHE_VARIABLE
from benchmarks.provenance import read_commit
from benchmarks.speed import CASES, list_cases, print_progress

RESULTS = Path(__file__).parent / "results"


def measure(cases: list[BenchCase]) -> dict[str, Any]:
    """Return the results of each case, or its error."""
    rows = run_together(cases, rounds=1, on_progress=print_progress)
    return {row["title"]: row["variants"][OURS] if "variants" in row else row["error"] for row in rows}


def compare(groups: list[list[BenchCase]]) -> Iterator[dict[str, Any]]:
    """Yield a row per case, measured with an empty and then with a filled cache."""
    with tempfile.TemporaryDirectory(prefix="anyaccel-warm-") as folder:
        os.environ[CACHE_VARIABLE] = folder
        for group in groups:
            empty, filled = measure(group), measure(group)
            for title in empty:
                yield make_row(title, empty[title], filled[title])


def make_row(title: str, empty: dict[str, Any] | str, filled: dict[str, Any] | str) -> dict[str, Any]:
    """Return the times of both first images, their ratio and the compile times."""
    if isinstance(empty, str) or isinstance(filled, str):
        return {"title": title, "error": next(result for result in (empty, filled) if isinstance(result, str))}
    before, after = empty["first_picture_s"], filled["first_picture_s"]
    return {
        "title": title, "empty_s": before, "filled_s": after, "share": round(after / before, 3),
        "empty_compiling_s": empty.get("compiling_s"), "filled_compiling_s": filled.get("compiling_s"),
    }  # fmt: skip


def main() -> None:
    """Measure the cases and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    cases = [replace(case, variants=(OURS,)) for case in list_cases(options.cases, options.device, {})]
    opened, machine = anyaccel.open_device(options.device), this_machine()
    provenance = {
        "date": datetime.now(timezone.utc).date().isoformat(), "commit": options.commit or read_commit(),
        "together": options.together,
    }  # fmt: skip
    report = {
        "what": "first image of a new process, fully compiled, with an empty and a filled compile cache",
        "device": opened.driver.device_name(opened.index), "versions": dict(machine.versions),
    }  # fmt: skip
    options.out.mkdir(exist_ok=True)
    for row in compare([cases] if options.together else [[case] for case in cases]):
        print(row, flush=True)
        write_row(options.out / f"warm_start_{opened.sheet.name}.json", report, {**row, "measured": provenance})


def write_row(path: Path, report: dict[str, Any], row: dict[str, Any]) -> None:
    """Write one row; it replaces the earlier row of the same case."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [other for other in rows if other["title"] != row["title"]]
    path.write_text(json.dumps({**report, "rows": [*rows, row]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
