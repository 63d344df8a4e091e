"""Time of `anyaccel generate "a red apple"` in a new process, and of one image in a running process.

    python -m benchmarks.generate

Writes benchmarks/results/generate_cpu.json. Absolute times on a shared machine mean little, so both are also given
relative to a float32 matrix product, which is timed alternately with the images.
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
PROCESSES, IMAGES, SIDE, PRODUCTS = 5, 11, 1024, 20


def time_product(matrix: torch.Tensor) -> float:
    """Return the seconds of one product of two square matrices."""
    start = time.perf_counter()
    for _ in range(PRODUCTS):
        torch.mm(matrix, matrix)
    return (time.perf_counter() - start) / PRODUCTS


def time_process() -> float:
    """Return the seconds of one command, which loads the model and writes an image."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "apple.png"
        program = str(Path(sys.executable).parent / "anyaccel")
        command = [program, "generate", PROMPT, "--seed", "7", "-o", str(path), "--device", "cpu"]
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds = time.perf_counter() - start
        assert path.is_file()
    return seconds


def time_image(seed: int) -> float:
    """Return the seconds of one image with a loaded model."""
    start = time.perf_counter()
    result = anyaccel.generate(PROMPT, device="cpu", seed=seed)
    seconds = time.perf_counter() - start
    assert result.timings.load_s < 0.1, "the model was loaded again"
    return seconds


def main() -> None:
    """Measure, print and write the file."""
    anyaccel.generate(PROMPT, device="cpu", seed=0)
    matrix = torch.randn(SIDE, SIDE)
    products, images, processes = [], [], []
    for seed in range(IMAGES):
        products.append(time_product(matrix))
        images.append(time_image(seed))
    for _ in range(PROCESSES):
        products.append(time_product(matrix))
        processes.append(time_process())
    product, image, process = (statistics.median(times) for times in (products, images, processes))
    result: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **describe_run(read_commit()),
        "threads": torch.get_num_threads(),
        "prompt": PROMPT,
        **CALL_DEFAULTS,
        "picture_s": {"median": image, "least": min(images), "most": max(images), "count": len(images)},
        "process_s": {"median": process, "least": min(processes), "most": max(processes), "count": len(processes)},
        "product": f"{SIDE} x {SIDE} float32",
        "product_s": product,
        "picture_over_product": image / product,
        "process_over_product": process / product,
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"one image    {image:6.2f} s = {image / product:6.0f} products")
    print(f"one process  {process:6.2f} s = {process / product:6.0f} products")
    print(f"one product  {product * 1000:6.2f} ms, {result['product']}; written to {RESULT.name}")


if __name__ == "__main__":
    main()
