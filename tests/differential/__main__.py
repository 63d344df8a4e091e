"""Compare placed pipelines with stock diffusers, for every usage.

    python -m tests.differential                                  all usages, all variants without real accelerators
    python -m tests.differential --variant cuda --processes 14 --out benchmarks/results/differential_cuda.json
    python -m tests.differential --variant cuda-captured --usages default_call lora
    python -m tests.differential --write-docs                     write docs/compatibility.md from the stored results

Each usage runs in processes of its own, `--processes` of them at the same time. Each result is appended to a file of
JSON lines beside `--out` as soon as it is known; a later run with the same `--out` continues there.
"""

from __future__ import annotations

import os

# Usages run in forked processes: torch must not start threads before, and counting devices must not initialize CUDA.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.provenance import read_commit
from tests.differential import page
from tests.differential.execution import MARK, can_fork, import_libraries, prepare_forks, run_usages
from tests.differential.results import STATUSES, Result, run_usage
from tests.differential.session import USAGES, VARIANTS

DEFAULT_VARIANTS = [variant.name for variant in VARIANTS.values() if variant.device == "cpu" or variant.virtual]


def main() -> int:
    """Run the command; return 1 if a usage differs."""
    options = _parse_options()
    if options.write_docs:
        page.PATH.write_text(page.make_page())
        return 0
    warnings.simplefilter("ignore")
    import_libraries()
    names = _select(options.usages)
    if options.worker:
        for name in names:
            for result in run_usage(name, options.variant, here=True):
                print(MARK + json.dumps(result.to_json()), flush=True)
        return 0
    lines = options.out.with_suffix(".jsonl")
    known = _read_lines(lines)
    if options.retry:
        known = [row for row in known if row["status"] != "different"]
        lines.write_text("".join(json.dumps(row) + "\n" for row in known))
    done = {(row["usage"], row["variant"]) for row in known}
    todo = {name: [variant for variant in options.variant if (name, variant) not in done] for name in names}
    todo = {name: variants for name, variants in todo.items() if variants}
    total, start = sum(map(len, todo.values())), time.monotonic()
    spawn = options.spawn or not can_fork(options.variant)
    print(
        f"{total} to run, {len(done)} known, {'spawned' if spawn else 'forked'} processes", file=sys.stderr, flush=True
    )
    if not spawn and all(VARIANTS[name].stock_device == "cpu" for name in options.variant):
        prepare_forks()
    lines.parent.mkdir(parents=True, exist_ok=True)
    with lines.open("a") as file:
        for index, result in enumerate(run_usages(todo, options.processes, spawn=spawn), 1):
            file.write(json.dumps(result.to_json()) + "\n")
            file.flush()
            elapsed = time.monotonic() - start
            print(f"[{index}/{total} {elapsed:.0f} s] {_format(result)}", file=sys.stderr, flush=True)
    return _finish(options, _read_lines(lines))


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", nargs="+", choices=list(VARIANTS), default=DEFAULT_VARIANTS)
    parser.add_argument("--usages", nargs="*", help="names or parts of names; @FILE reads them from a file")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/differential.json"))
    parser.add_argument("--commit", help="commit of the code, for a copy without .git")
    parser.add_argument("--retry", action="store_true", help="run usages that differed before again")
    parser.add_argument("--spawn", action="store_true", help="start a new interpreter for every few usages, no forks")
    parser.add_argument("--write-docs", action="store_true", help="write docs/compatibility.md and exit")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _select(patterns: list[str] | None) -> list[str]:
    if not patterns:
        return list(USAGES)
    words = []
    for pattern in patterns:
        words += Path(pattern[1:]).read_text().split() if pattern.startswith("@") else [pattern]
    # An exact name selects only this usage, although it may be a part of other names.
    return [name for name in USAGES if any(word == name or (word not in USAGES and word in name) for word in words)]


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _format(result: Result) -> str:
    text = f"{result.status:9} {result.variant:14} {result.usage}"
    return f"{text} ({result.difference:.0e}, {result.seconds} s) {result.text}".rstrip()[:400]


def _finish(options: argparse.Namespace, rows: list[dict[str, Any]]) -> int:
    """Write the JSON file and print the counts."""
    from benchmarks.provenance import describe_run

    rows.sort(key=lambda row: (list(VARIANTS).index(row["variant"]), row["usage"]))
    variants = sorted({row["variant"] for row in rows}, key=list(VARIANTS).index)
    report = {
        "what": "usages of placed pipelines compared with stock diffusers, float32",
        "date": time.strftime("%Y-%m-%d", time.gmtime()), **describe_run(options.commit or read_commit()),
        "devices": _describe_devices(variants), "rows": rows,
    }  # fmt: skip
    text = json.dumps({**report, "rows": []}, indent=1).removesuffix("[]\n}")
    body = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in rows)
    options.out.write_text(f"{text}[\n  {body}\n ]\n}}\n")
    for variant in variants:
        counts = {
            status: sum(row["status"] == status for row in rows if row["variant"] == variant) for status in STATUSES
        }
        print(f"{variant:14}", "  ".join(f"{status} {count}" for status, count in counts.items() if count))
    different = [row for row in rows if row["status"] == "different"]
    for row in different:
        print(f"different: {row['variant']} {row['usage']}: {row['text'][:300]}")
    return 1 if different else 0


def _describe_devices(variants: list[str]) -> dict[str, str]:
    import anyaccel

    found = {}
    for variant in (VARIANTS[name] for name in variants):
        if variant.virtual:
            found[variant.name] = f"virtual {variant.device}"
        else:
            opened = anyaccel.open_device(variant.device)
            found[variant.name] = str(opened.driver.device_name(opened.index))
    return found


if __name__ == "__main__":
    sys.exit(main())
