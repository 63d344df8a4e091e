"""The first picture of a new process, with nothing kept and with what an earlier process compiled.

    python -m benchmarks.warm_start cuda [--cases klein sd15] [--together]

Writes benchmarks/results/warm_start_DEVICE.json, each case as it is done. A case runs twice, in a process of its own
each time, with a cache folder that is empty at first; `--together` starts all cases at once, the first time and the
second.
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
from benchmarks.speed import CASES, list_works, on_progress

RESULTS = Path(__file__).parent / "results"


def measure(works: list[BenchCase]) -> dict[str, Any]:
    """The first picture's seconds of each work and of the compiler in it, or why there is none."""
    rows = run_together(works, rounds=1, on_progress=on_progress)
    return {row["title"]: row["variants"][OURS] if "variants" in row else row["error"] for row in rows}


def compare(groups: list[list[BenchCase]]) -> Iterator[dict[str, Any]]:
    """Each work with an empty folder and with a filled one, one after the other."""
    with tempfile.TemporaryDirectory(prefix="anyaccel-warm-") as folder:
        os.environ[CACHE_VARIABLE] = folder
        for group in groups:
            empty, filled = measure(group), measure(group)
            for title in empty:
                yield describe(title, empty[title], filled[title])


def describe(title: str, empty: dict[str, Any] | str, filled: dict[str, Any] | str) -> dict[str, Any]:
    """Both first pictures, their ratio, and where the time goes."""
    if isinstance(empty, str) or isinstance(filled, str):
        return {"title": title, "error": next(said for said in (empty, filled) if isinstance(said, str))}
    before, after = empty["first_picture_s"], filled["first_picture_s"]
    return {
        "title": title, "empty_s": before, "filled_s": after, "share": round(after / before, 3),
        "empty_compiling_s": empty.get("compiling_s"), "filled_compiling_s": filled.get("compiling_s"),
    }  # fmt: skip


def main() -> None:
    """Measure and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    works = [replace(work, variants=(OURS,)) for work in list_works(asked.cases, asked.device, {})]
    opened, machine = anyaccel.open_device(asked.device), this_machine()
    how = {
        "date": datetime.now(timezone.utc).date().isoformat(), "commit": asked.commit or read_commit(),
        "together": asked.together,
    }  # fmt: skip
    report = {
        "what": "the first picture of a new process, compiled as a whole: with nothing kept, and with all kept",
        "device": opened.driver.device_name(opened.index), "versions": dict(machine.versions),
    }  # fmt: skip
    asked.out.mkdir(exist_ok=True)
    for row in compare([works] if asked.together else [[one] for one in works]):
        print(row, flush=True)
        keep(asked.out / f"warm_start_{opened.sheet.name}.json", report, {**row, "measured": how})


def keep(path: Path, report: dict[str, Any], row: dict[str, Any]) -> None:
    """Write one row at once, in the place of its last measurement and beside those of other works."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [one for one in rows if one["title"] != row["title"]]
    path.write_text(json.dumps({**report, "rows": [*rows, row]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
