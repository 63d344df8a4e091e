"""Start-up time of `anyaccel generate` and `anyaccel explain` in a new process.

    python -m benchmarks.startup [EARLIER_SOURCE]

`generate` is compared with a ten-line diffusers script that loads the same model, and `explain` with the package in the
folder EARLIER_SOURCE, such as `src` of an earlier commit. The programs run in turns, after one run of each that is not
counted and that writes the bytecode of the modules. The ratios are those of the medians and of the minima, of the wall
time and of the CPU time, which depends less on other programs. Takes about six minutes on two cores. The result is in
benchmarks/results/startup_cpu.json; it is not written if the load of the machine exceeds 2.5.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from anyaccel.embedded.model import CALL_DEFAULTS, find_embedded_model
from benchmarks.provenance import describe_run, read_commit

ROOT = Path(__file__).parent.parent
RESULT = Path(__file__).parent / "results" / "startup_cpu.json"
ROUNDS = 7
# The benchmark itself causes a load of up to two.
MOST_LOAD = 2.5
MODEL = "stable-diffusion-v1-5/stable-diffusion-v1-5"
STOCK = f"""
import sys
import torch
from diffusers import DiffusionPipeline

model, output = sys.argv[1:]
pipe = DiffusionPipeline.from_pretrained(model)
generator = torch.Generator().manual_seed(7)
image = pipe("a red apple", generator=generator, **{dict(CALL_DEFAULTS)}).images[0]
image.save(output)
"""


def time_process(arguments: list[str], source: Path) -> tuple[float, float]:
    """Return the wall seconds and the CPU seconds of a Python process that uses the package in a folder."""
    path = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=environment)
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(earlier: str | None = None) -> None:
    """Measure, print, and write the file after each round."""
    about = {**describe_run(read_commit()), "threads": torch.get_num_threads(), "earlier": describe_folder(earlier)}
    with tempfile.TemporaryDirectory() as folder:
        image = str(Path(folder) / "apple.png")
        generate = ["-m", "anyaccel", "generate", "a red apple", "--seed", "7", "--device", "cpu", "-f", "-o", image]
        explain = ["-m", "anyaccel", "explain", MODEL, "--device", "h200"]
        programs = {
            "diffusers script": (["-c", STOCK, str(find_embedded_model()), image], ROOT / "src"),
            "generate": (generate, ROOT / "src"),
            "explain": (explain, ROOT / "src"),
        }
        if earlier is not None:
            programs["explain, earlier"] = (explain, Path(earlier))
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
        for program in programs.values():
            time_process(*program)
        loads = []
        for finished in range(1, ROUNDS + 1):
            loads.append(round(os.getloadavg()[0], 2))
            for name, program in programs.items():
                times[name].append(time_process(*program))
            result = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), **about, "rounds": finished}
            result |= {"load": loads, **summarize_programs(times)}
            stored = max(loads) <= MOST_LOAD
            if stored:
                RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
            print(json.dumps({"rounds": finished, "load": loads[-1], "stored": stored, **result["ratios"]}), flush=True)


def summarize_programs(times: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Return the times of each program, and the ratios of the pairs that are compared."""
    programs = {name: summarize(rows) for name, rows in times.items()}
    pairs = {"generate": ("generate", "diffusers script"), "explain": ("explain", "explain, earlier")}
    ratios = {
        name: {
            kind: {figure: round(programs[left][kind][figure] / programs[right][kind][figure], 3)
                   for figure in ("median", "least")}
            for kind in ("wall_s", "cpu_s")
        }
        for name, (left, right) in pairs.items()
        if right in times
    }  # fmt: skip
    return {"programs": programs, "ratios": ratios}


def summarize(rows: list[tuple[float, float]]) -> dict[str, dict[str, float]]:
    """Return the median and the range of wall and CPU seconds."""
    kinds = zip(("wall_s", "cpu_s"), zip(*rows, strict=True), strict=True)
    return {
        kind: {
            "median": round(statistics.median(values), 3),
            "least": round(min(values), 3),
            "most": round(max(values), 3),
        }
        for kind, values in kinds
    }


def describe_folder(folder: str | None) -> str | None:
    """Return the commit of the repository that contains a folder."""
    if folder is None:
        return None
    command = ["git", "-C", folder, "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main(*sys.argv[1:2])
