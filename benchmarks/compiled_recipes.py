"""Tiny pipelines compiled on a real device: compares each image with the eager one.

    python -m benchmarks.compiled_recipes cuda                  pipelines with 3-D convolutions
    python -m benchmarks.compiled_recipes cuda --all            every pipeline
    python -m benchmarks.compiled_recipes cuda --names wan ltx

Writes benchmarks/results/compiled_recipes_DEVICE.json: for each pipeline the largest difference of the compiled image
from the eager one, both placed and in float32, and which models ran eagerly because compiling failed. Each pipeline has
its own process with a time limit; `--processes` of them run concurrently. `--commit` and `--out` are for a copy
without .git.
"""

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.provenance import read_commit

RESULTS = Path(__file__).parent / "results"
MARK = "compiled-recipe "


def has_3d_convolutions(name: str) -> bool:
    """Return whether a recipe's models have 3-D convolutions."""
    import torch

    from anyaccel.recipes import recipes

    pipe: Any = recipes()[name].make()
    models = [component for component in pipe.components.values() if isinstance(component, torch.nn.Module)]
    return any(isinstance(layer, torch.nn.Conv3d) for model in models for layer in model.modules())


def run_recipe(name: str, device: str, only_3d: bool) -> dict[str, Any]:
    """Run a recipe eagerly and compiled, and compare."""
    import numpy

    import anyaccel
    from anyaccel.recipes import recipes, run

    if only_3d and not has_3d_convolutions(name):
        return {"skipped": "no 3-D convolutions"}
    recipe = recipes()[name]
    eager = run(recipe, anyaccel.place(recipe.make(), device, dtype="float32", compile=False))
    start = time.perf_counter()
    pipe = anyaccel.place(recipe.make(), device, dtype="float32", compile=True)
    images = [run(recipe, pipe) for _ in range(3)]  # graphs are captured at the third run of a shape
    report = pipe.plan.report
    return {
        "difference": max(float(numpy.abs(image - eager).max()) for image in images),
        "range": float(numpy.ptp(eager)),
        "compiled": list(report.compiled_models.value) if report.compiled_models else [],
        "not_compiled": report.not_compiled.reason if report.not_compiled else "",
        "captured": f"{report.capture}: {report.capture.reason}" if report.capture else "",
        "seconds": round(time.perf_counter() - start, 1),
    }


def run_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a recipe in its own process."""
    command = [sys.executable, "-m", "benchmarks.compiled_recipes", options.device, "--one", name]
    try:
        done = subprocess.run(
            command + (["--all"] if options.all or options.names else []),
            capture_output=True, text=True, check=False, timeout=options.limit_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"not finished within {options.limit_s} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}
    result: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    return result


def main() -> None:
    """Run the recipes and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--names", nargs="*")
    parser.add_argument("--one")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--limit-s", type=float, default=240)
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.one:
        print(MARK + json.dumps(run_recipe(options.one, options.device, not options.all)), flush=True)
        return
    import torch

    import anyaccel
    from anyaccel.recipes import recipes

    opened = anyaccel.open_device(options.device)
    names = options.names or list(recipes())
    report: dict[str, Any] = {
        "what": "tiny placed pipelines, compiled compared to eager, float32",
        "device": opened.driver.device_name(opened.index), "evidence": "hardware",
        "date": datetime.now(timezone.utc).date().isoformat(), "commit": options.commit or read_commit(),
        "versions": {"torch": torch.__version__}, "rows": {},
    }  # fmt: skip
    with ThreadPoolExecutor(options.processes) as pool:
        for name, row in zip(names, pool.map(lambda name: run_process(name, options), names), strict=True):
            if "skipped" in row:
                continue
            report["rows"][name] = row
            print(name, row, flush=True)
            options.out.mkdir(exist_ok=True)
            path = options.out / f"compiled_recipes_{opened.sheet.name}.json"
            path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
