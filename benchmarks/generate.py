"""How long `anyaccel generate "a red apple"` takes: a new process, and a picture within one.

    python -m benchmarks.generate

Writes benchmarks/results/generate_cpu.json. Seconds of a shared machine mean little, so that both are also given as a
ratio to a fixed product of two float32 matrices, timed in turns with the pictures in the same run.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import anyaccel
from anyaccel.embedded.model import CALL_DEFAULTS
from benchmarks.provenance import describe_run, read_commit

RESULT = Path(__file__).parent / "results" / "generate_cpu.json"
PROMPT = "a red apple"
PROCESSES, PICTURES, SIDE, PRODUCTS = 5, 11, 1024, 20


def time_product(matrix: torch.Tensor) -> float:
    """Seconds for one product of two square matrices."""
    begun = time.perf_counter()
    for _ in range(PRODUCTS):
        torch.mm(matrix, matrix)
    return (time.perf_counter() - begun) / PRODUCTS


def time_process() -> float:
    """Seconds from the command to its end, in a process of its own, with the picture written."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "apple.png"
        program = str(Path(sys.executable).parent / "anyaccel")
        command = [program, "generate", PROMPT, "--seed", "7", "-o", str(path), "--device", "cpu"]
        begun = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds = time.perf_counter() - begun
        assert path.is_file()
    return seconds


def time_picture(seed: int) -> float:
    """Seconds for a picture where the model is loaded already."""
    begun = time.perf_counter()
    result = anyaccel.generate(PROMPT, device="cpu", seed=seed)
    seconds = time.perf_counter() - begun
    assert result.timings.load_s < 0.1, "the model was loaded again"
    return seconds


def main() -> None:
    """Measure, print and keep the figures."""
    anyaccel.generate(PROMPT, device="cpu", seed=0)
    matrix = torch.randn(SIDE, SIDE)
    products, pictures, processes = [], [], []
    for turn in range(PICTURES):
        products.append(time_product(matrix))
        pictures.append(time_picture(turn))
    for _ in range(PROCESSES):
        products.append(time_product(matrix))
        processes.append(time_process())
    product, picture, process = (statistics.median(times) for times in (products, pictures, processes))
    result: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **describe_run(read_commit()),
        "threads": torch.get_num_threads(),
        "prompt": PROMPT,
        **CALL_DEFAULTS,
        "picture_s": {"median": picture, "least": min(pictures), "most": max(pictures), "count": len(pictures)},
        "process_s": {"median": process, "least": min(processes), "most": max(processes), "count": len(processes)},
        "product": f"{SIDE} x {SIDE} float32",
        "product_s": product,
        "picture_over_product": picture / product,
        "process_over_product": process / product,
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"a picture    {picture:6.2f} s = {picture / product:6.0f} products")
    print(f"a process    {process:6.2f} s = {process / product:6.0f} products")
    print(f"a product    {product * 1000:6.2f} ms, {result['product']}; kept in {RESULT.name}")


if __name__ == "__main__":
    main()
