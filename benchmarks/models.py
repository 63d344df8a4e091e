"""Speed and memory of full-size models of every kind, with random weights and no text encoders.

    python -m benchmarks.models cuda --cases sana sd35              some cases; all by default
    python -m benchmarks.models cuda --cases "ltx2:anyaccel,anyaccel offloaded"
    python -m benchmarks.models cuda --list                         the cases and the batches they run in
    python -m benchmarks.models cuda --table                        print the table of docs/speed.md

Writes benchmarks/results/models_DEVICE.json after every batch, and keeps what the file has of other cases and variants.
The variants run in batches that fit into the device's memory: those of one batch warm up concurrently and are measured
one at a time. The configs are in benchmarks/models; `--commit` and `--out` are for a copy without .git.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import diffusers

import anyaccel
from anyaccel.bench.bench import measure_file_psnr, run_together
from anyaccel.bench.case import FAST, OFFLOADED, OURS, STOCK, VARIANTS, BenchCase
from anyaccel.errors import NotMeasurableError, UsageError, nearest
from benchmarks.model_cases import CASES, GIB, MODELS
from benchmarks.provenance import describe_run, read_commit
from benchmarks.speed import print_progress

RESULTS = Path(__file__).parent / "results"
EAGER, COMPILED = STOCK
GROUPS = ((COMPILED, OURS, FAST), (EAGER, OFFLOADED))
"""Variants that share a batch: those that compile, which are compared with each other, and those that do not."""
RESIDENT = {"check_finite": False, "compile": True, "expected_images": 10_000, "memory": "resident",
            "vae_tiling": False}  # fmt: skip
"""Placement options. Other processes use the same device, so the plan must not depend on its free memory."""


@dataclass(frozen=True, order=True)
class Part:
    """Variants of a case that run in the same batch."""

    name: str
    variants: tuple[str, ...]

    @property
    def gib(self) -> int:
        """The device memory that all its processes require together."""
        return GIB[self.name] * len(self.variants)


def list_parts(selection: list[str], limit_gib: int) -> Iterator[Part]:
    """Yield the variants of each case in groups that fit into memory; `sana:anyaccel,anyaccel fast` selects them."""
    for text in selection:
        name, _, listed = text.partition(":")
        if name not in CASES:
            raise UsageError(f"unknown case {name!r}", hint=nearest(name, list(CASES)))
        selected = listed.split(",") if listed else VARIANTS
        for group in GROUPS:
            variants = tuple(variant for variant in group if variant in selected)
            most = max(1, limit_gib // GIB[name])
            for start in range(0, len(variants), most):
                yield Part(name, variants[start : start + most])


def make_batches(parts: list[Part], limit_gib: int, max_processes: int) -> list[list[Part]]:
    """Return the parts in batches that fit into the memory: a case in as few batches as possible.

    Variants that do not compile get their own batches, because they would wait for those that do. These batches are
    half as large: offloaded weights are also in host memory, of which machines have less.
    """

    def compiles(part: Part) -> bool:
        return not set(part.variants) & set(GROUPS[1])

    batches: list[list[Part]] = []
    for part in sorted(parts, key=compiles, reverse=True):
        limit = limit_gib if compiles(part) else limit_gib // 2
        for batch in batches:
            together = [*batch, part]
            fits = sum(other.gib for other in together) <= limit
            fits &= sum(len(other.variants) for other in together) <= max_processes
            if fits and all(compiles(other) == compiles(part) for other in batch):
                batch.append(part)
                break
        else:
            batches.append([part])
    return batches


def make_case(name: str, device: str, variants: tuple[str, ...]) -> BenchCase:
    """Return a case with its device, dtype and placement options."""
    # Compiling whole models of this size takes minutes; without a number of images, anyaccel compiles the blocks too.
    options = {**RESIDENT, "expected_images": None} if "blocks" in CASES[name].stock_compile else RESIDENT
    return replace(
        CASES[name], device=device, dtype="bfloat16", random=True, profile=False, options=options, variants=variants
    )


def run_batch(batch: list[Part], options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the parts of a batch; yield the name of each case with its variants, and the paths of their images."""
    merged: dict[str, tuple[str, ...]] = {}
    for part in batch:
        merged[part.name] = (*merged.get(part.name, ()), *part.variants)
    folder.mkdir()
    cases = [make_case(name, options.device, variants) for name, variants in merged.items()]
    rows = run_together(
        cases, rounds=options.rounds, timeout_s=options.timeout, enough_s=options.enough, output_dir=folder,
        on_progress=print_progress,
    )  # fmt: skip
    for number, (name, row) in enumerate(zip(merged, rows, strict=True)):
        variants = row.get("variants") or row["failed"]
        for variant, result in variants.items():
            result["file"] = str(folder / str(number) / f"{variant}.npy")
        yield name, variants


def summarize(name: str, variants: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a case: its variants, their times against stock compiled, PSNR and memory errors."""
    case = CASES[name]
    row: dict[str, Any] = {"case": name, "title": case.title, "model": case.model.removeprefix(f"{MODELS}/"),
                           "call": case.call, "stock_compile": case.stock_compile, "offload": case.offload,
                           "variants": {}}  # fmt: skip
    compiled = variants.get(COMPILED, {}).get("median_s")
    for variant in VARIANTS:
        if variant not in variants:
            continue
        result = {key: value for key, value in variants[variant].items() if key not in ("file", "psnr_db")}
        if compiled and "median_s" in result:
            result["against stock compiled"] = round(compiled / result["median_s"], 3)
        if "forecast" in result and result.get("peak_bytes"):
            # Captured graphs keep their memory, which the allocator counts as reserved.
            result["forecast_error_percent"] = compare_forecast(result)
        row["variants"][variant] = result
    references = [(FAST, OURS), (OURS, EAGER), (OURS, COMPILED), (COMPILED, EAGER), (OFFLOADED, EAGER)]
    for variant, reference in references:
        # Results from an earlier run have no image.
        if all({"median_s", "file"} <= variants.get(key, {}).keys() for key in (variant, reference)):
            result = row["variants"][variant]
            try:
                files = [Path(variants[key]["file"]) for key in (variant, reference)]
                result[f"psnr_db against {reference}"] = measure_file_psnr(*files)
            except (NotMeasurableError, OSError) as error:
                result["not_compared"] = str(error).splitlines()[0]
    return row


def compare_forecast(result: dict[str, Any]) -> dict[str, float]:
    """Return how far the predicted memory is from the measured one, in percent; positive if too high."""
    pairs = {"peak": ("peak_bytes", "peak_bytes"), "with captured graphs": ("recorded_peak_bytes", "held_bytes")}
    return {
        label: round(100 * (result["forecast"][predicted] / result[measured] - 1), 1)
        for label, (predicted, measured) in pairs.items()
        if result.get(measured)
    }


def compare_with_eager(variants: dict[str, dict[str, Any]]) -> float | None:
    """Return how far the predicted memory is from that of models that are not compiled, for which it is made."""
    forecast, measured = variants.get(OURS, {}).get("forecast"), variants.get(EAGER, {}).get("peak_bytes")
    return 100 * (forecast["peak_bytes"] / measured - 1) if forecast and measured else None


def read_variants(path: Path) -> dict[str, dict[str, Any]]:
    """Return the variants of each case in an existing file."""
    rows = json.loads(path.read_text())["rows"] if path.is_file() else []
    return {row["case"]: row["variants"] for row in rows}


def write_report(path: Path, report: dict[str, Any], rows: dict[str, dict[str, Any]]) -> None:
    """Write the report; rows of other cases in an existing file are kept."""
    earlier = json.loads(path.read_text())["rows"] if path.is_file() else []
    kept = [row for row in earlier if row["case"] not in rows]
    ordered = sorted([*kept, *rows.values()], key=lambda row: list(CASES).index(row["case"]))
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps({**report, "rows": ordered}, indent=1, ensure_ascii=False) + "\n")


def make_table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table with one line per case."""
    lines = [
        "| model | stock diffusers | with `torch.compile` | anyaccel | speedup over `torch.compile` | PSNR | `fast` | "
        "offloaded | memory error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        variants = row["variants"]
        ours, psnr = variants.get(OURS, {}), variants.get(OURS, {}).get(f"psnr_db against {COMPILED}")
        seconds = {name: variants.get(name, {}).get("median_s") for name in VARIANTS}
        times = {name: f"{value:.3f} s" if value else "-" for name, value in seconds.items()}
        ratio = f"{ours['against stock compiled']:.2f}\u00d7" if "against stock compiled" in ours else "-"
        offloaded = variants.get(OFFLOADED, {}).get("forecast_error_percent", {}).get("peak")
        errors = [compare_with_eager(variants), offloaded]
        error = " / ".join(f"{value:+.0f}%" if value is not None else "-" for value in errors)
        lines.append(
            f"| {row['title']} | {times[EAGER]} | {times[COMPILED]} | {times[OURS]} | {ratio} | "
            f"{f'{psnr:.0f} dB' if psnr else '-'} | {times[FAST]} | {times[OFFLOADED]} | {error} |"
        )
    return "\n".join(lines)


def print_row(row: dict[str, Any]) -> None:
    """Print one line per variant of a row."""
    print(row["title"])
    for variant, result in row["variants"].items():
        keys = ("error", "median_s", "first_picture_s", "against stock compiled", "peak_bytes", "held_bytes",
                "forecast_error_percent", "not_forecast", "not_compared", "report")  # fmt: skip
        shown = {key: value for key, value in result.items() if key in keys or key.startswith("psnr_db")}
        print(f"  {variant}: {shown}", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Return the command line arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for the first images of a variant")
    parser.add_argument("--enough", type=float, default=25.0, help="seconds of timed calls after which a case is done")
    parser.add_argument("--memory-gib", type=int, default=132)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 8)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true", help="print the results as a Markdown table")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    """Run the cases and write the file."""
    options = parse_arguments()
    if options.table:
        print(make_table(json.loads((options.out / f"models_{options.device}.json").read_text())["rows"]))
        return
    batches = make_batches(list(list_parts(options.cases, options.memory_gib)), options.memory_gib, options.processes)
    for number, batch in enumerate(batches, start=1):
        listed = "; ".join(f"{part.name}: {', '.join(part.variants)}" for part in batch)
        print_progress(f"batch {number}: {sum(part.gib for part in batch)} GiB: {listed}")
    if options.list:
        return
    opened = anyaccel.open_device(options.device)
    report: dict[str, Any] = {
        "what": "stock diffusers and anyaccel, full size, random weights, without text encoders",
        "device": opened.driver.device_name(opened.index), "evidence": "hardware", "options": RESIDENT,
        "date": datetime.now(timezone.utc).date().isoformat(), **describe_run(options.commit or read_commit()),
    }  # fmt: skip
    report["versions"] |= {"diffusers": diffusers.__version__}
    path = options.out / f"models_{opened.sheet.name}.json"
    variants = read_variants(path)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="anyaccel-models-") as folder:
        for number, batch in enumerate(batches):
            # Each process would start as many compiler processes as there are cores.
            processes = sum(len(part.variants) for part in batch)
            os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(2, 2 * options.processes // processes))
            for name, results in run_batch(batch, options, Path(folder) / str(number)):
                for result in results.values():
                    result["commit"] = report["commit"]
                variants.setdefault(name, {}).update(results)
                rows[name] = summarize(name, variants[name])
                write_report(path, report, rows)
                print_row(rows[name])


if __name__ == "__main__":
    main()
