"""Compare the speed of two anyaccel checkouts on a real device, with alternating runs.

    python -m benchmarks.commits cuda OLD NEW --cases sd15 sdxl klein

OLD and NEW are checkouts with `src` and `benchmarks`. Each checkout has one process per case; all of them warm up, then
images are generated alternately. Writes benchmarks/results/commits_DEVICE.json. The cases come from benchmarks.speed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
WARM = 4


def serve(case: str, device: str, image: str) -> None:
    """Generate an image for every line on stdin and print its time in seconds."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # library output goes to stderr, so stdout has only the times
    import numpy
    import torch

    from anyaccel.backends.device import open_device
    from anyaccel.bench.pipelines import make_call, make_pipeline
    from benchmarks.speed import CASES

    options = {"check_finite": False, "compile": True, "expected_images": 10_000}
    bench_case = replace(CASES[case], device=device, dtype="bfloat16", random=True, options=options)
    opened, pipe = open_device(device), make_pipeline(bench_case, "anyaccel")
    call = make_call(bench_case, pipe)

    def generate() -> tuple[Any, float]:
        generator = torch.Generator("cpu").manual_seed(0)
        with torch.no_grad():
            opened.driver.synchronize(opened.index)
            start = time.perf_counter()
            result = pipe(**call, generator=generator)
            opened.driver.synchronize(opened.index)
        return result, time.perf_counter() - start

    for _ in range(WARM):
        result, seconds = generate()
    numpy.save(image, result.images.float().cpu().numpy())
    print(json.dumps(seconds), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(generate()[1]), file=answers, flush=True)


def start(case: str, checkout: Path, image: Path, device: str) -> Any:
    """Start the process of one case with one checkout."""
    command = [sys.executable, "-m", "benchmarks.commits", device, "-", "-", "--serve", case, "--image", str(image)]
    root = checkout.resolve()
    # Each checkout brings its own benchmarks: options and module paths differ between versions.
    path = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen(
        command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def compare(processes: dict[str, Any], images: dict[str, Path], rounds: int) -> dict[str, Any]:
    """Generate images with both checkouts alternately."""
    import numpy

    times: dict[str, list[float]] = {name: [] for name in processes}
    for turn in range(rounds):
        for name in sorted(processes, reverse=bool(turn % 2)):
            process = processes[name]
            process.stdin.write("\n")
            process.stdin.flush()
            times[name].append(json.loads(process.stdout.readline()))
    old, new = (numpy.load(images[name]) for name in ("old", "new"))
    medians = {name: round(statistics.median(seconds), 4) for name, seconds in times.items()}
    return {
        "median_s": medians,
        "new_over_old": round(medians["new"] / medians["old"], 4),
        "largest_difference": float(numpy.abs(old - new).max()),
        "seconds": times,
    }


def main() -> None:
    """Compare the cases and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--cases", nargs="*", default=["sd15", "sdxl", "klein"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--commits", nargs=2, default=["", ""])
    parser.add_argument("--serve")
    parser.add_argument("--image")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.device, options.image)
        return
    import torch

    import anyaccel

    opened = anyaccel.open_device(options.device)
    report: dict[str, Any] = {
        "what": "two commits, alternating, full size, random weights, compiled and captured",
        "device": opened.driver.device_name(opened.index), "evidence": "hardware",
        "date": datetime.now(timezone.utc).date().isoformat(), "commits": options.commits,
        "versions": {"torch": torch.__version__}, "rows": {},
    }  # fmt: skip
    options.out.mkdir(exist_ok=True)
    trees = {"old": options.old, "new": options.new}
    with tempfile.TemporaryDirectory() as folder:
        images = {case: {name: Path(folder) / f"{case}-{name}.npy" for name in trees} for case in options.cases}
        # All processes warm up concurrently, because compilation dominates; they are measured one at a time.
        processes = {
            case: {name: start(case, checkout, images[case][name], options.device) for name, checkout in trees.items()}
            for case in options.cases
        }
        for each in processes.values():
            for process in each.values():
                json.loads(process.stdout.readline())
        for case in options.cases:
            row = report["rows"][case] = compare(processes[case], images[case], options.rounds)
            print(case, row["median_s"], row["new_over_old"], row["largest_difference"], flush=True)
            path = options.out / f"commits_{opened.sheet.name}.json"
            path.write_text(json.dumps(report, indent=1) + "\n")
        for process in [process for each in processes.values() for process in each.values()]:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
