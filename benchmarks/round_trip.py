"""Time to read one value from a device, compared to the CPU.

    python -m benchmarks.round_trip cuda [COMMIT]

Writes benchmarks/results/round_trip_DEVICE.json: medians in microseconds, with the machine, the versions and the
commit. A round trip to the CPU in a denoising loop costs at least this time per step, and drains the device's queue.
"""

import json
import statistics
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import anyaccel
from anyaccel.backends.device import this_machine
from benchmarks.provenance import read_commit

RESULTS = Path(__file__).parent / "results"
PAIRS = 30
READS = 200


def time_reads_us(value: torch.Tensor) -> float:
    """Return the mean microseconds of one `.item()` on an idle device."""
    start = time.perf_counter()
    for _ in range(READS):
        value.item()
    return (time.perf_counter() - start) / READS * 1e6


def measure(device: str) -> dict[str, Any]:
    """Time device and CPU alternately; return the ratio of their medians."""
    opened = anyaccel.open_device(device)
    on_device, on_cpu = torch.zeros(1, device=opened.torch_device), torch.zeros(1)
    time_reads_us(on_device), time_reads_us(on_cpu)
    pairs = [(time_reads_us(on_device), time_reads_us(on_cpu)) for _ in range(PAIRS)]
    device_us, cpu_us = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "device": opened.driver.device_name(opened.index),
        "round_trip_us": round(device_us, 2),
        "host_us": round(cpu_us, 3),
        "ratio": round(device_us / cpu_us, 1),
        "pairs": PAIRS,
        "reads_a_pair": READS,
        "total_bytes": anyaccel.memory(device).total_bytes,
    }


def main() -> None:
    """Measure the device of the command line and write the file."""
    device = sys.argv[1] if len(sys.argv) > 1 else "auto"
    commit = sys.argv[2] if len(sys.argv) > 2 else read_commit()  # passed for a copy without .git
    machine = this_machine()
    result = measure(device) | {
        "evidence": "hardware",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit,
        "system": f"{machine.system} {machine.architecture}",
        "versions": dict(machine.versions),
    }
    name = anyaccel.open_device(device).sheet.name
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"round_trip_{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
