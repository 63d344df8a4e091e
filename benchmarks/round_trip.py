"""What reading one value back from a device costs, beside the same on the host.

    python -m benchmarks.round_trip cuda [COMMIT]

Writes benchmarks/results/round_trip_DEVICE.json: medians in microseconds, with the machine, the versions and the
commit. A host round trip in a denoising loop costs at least this much a step, and empties the device's queue.
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
    """Microseconds for one `.item()` on an idle device, over many."""
    start = time.perf_counter()
    for _ in range(READS):
        value.item()
    return (time.perf_counter() - start) / READS * 1e6


def measure(device: str) -> dict[str, Any]:
    """Interleaved pairs of device and host, and the ratio of their medians."""
    opened = anyaccel.open_device(device)
    there, here = torch.zeros(1, device=opened.torch_device), torch.zeros(1)
    time_reads_us(there), time_reads_us(here)
    pairs = [(time_reads_us(there), time_reads_us(here)) for _ in range(PAIRS)]
    device_us, host_us = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "device": opened.driver.device_name(opened.index),
        "round_trip_us": round(device_us, 2),
        "host_us": round(host_us, 3),
        "ratio": round(device_us / host_us, 1),
        "pairs": PAIRS,
        "reads_a_pair": READS,
        "total_bytes": anyaccel.memory(device).total_bytes,
    }


def main() -> None:
    """Measure the device that the command line names, and keep the result."""
    device = sys.argv[1] if len(sys.argv) > 1 else "auto"
    commit = sys.argv[2] if len(sys.argv) > 2 else read_commit()  # a copy without .git is told its commit
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
