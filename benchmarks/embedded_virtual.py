"""The embedded model on every virtual device against the CPU: the same answers of the judge, and the same pixels.

    python -m benchmarks.embedded_virtual [--things 40] [--devices mps,hpu]

Writes benchmarks/results/embedded_virtual.json. Virtual devices enforce documented limits; they are no hardware.
"""

import argparse
import json
import os
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anyaccel.embedded.judge import open_judge
from anyaccel.embedded.model import CALL_DEFAULTS
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.process import run_forked
from benchmarks.provenance import describe_run, read_commit
from training.evaluate import judge_scenes
from training.figures import open_model
from training.prepare import load_things

RESULT = Path(__file__).parent / "results" / "embedded_virtual.json"
DEVICES = ("mps", "hpu", "neuron", "xpu", "npu", "mlu")
ALLOWED = 2  # of 255, a pixel
Pixels = list[np.ndarray[Any, np.dtype[np.uint8]]]


def make_pictures(device: str, prompts: list[str]) -> Pixels:
    """One picture a prompt, in float32, one at a time."""
    pipe = open_model(None, device, "float32")
    return [np.asarray(pipe(prompt, seed=0, **CALL_DEFAULTS).images[0]) for prompt in prompts]


def name_all(pictures: Pixels) -> list[str]:
    """What the judge sees on each."""
    from PIL import Image

    judge = open_judge()
    return [(judge.look(Image.fromarray(pixels)).names or ("nothing",))[0] for pixels in pictures]


def compare(device: str, prompts: list[str], wanted: Pixels) -> dict[str, Any]:
    """How the pictures of a virtual device differ from the CPU's."""

    def run(accelerator: VirtualAccelerator) -> tuple[Pixels, bool]:
        torch.set_num_threads(os.cpu_count() or 1)
        return make_pictures(device, prompts), not accelerator.ledger.rows("error")

    begun = time.monotonic()
    made, clean = run_forked(device, run, strict=True, timeout_s=7200)
    differences = [int(np.abs(a.astype(int) - b).max()) for a, b in zip(made, wanted, strict=True)]
    same = [a == b for a, b in zip(name_all(made), name_all(wanted), strict=True)]
    return {
        "pictures": len(made),
        "same_answers": sum(same),
        "largest_difference_of_255": max(differences),
        "within": max(differences) <= ALLOWED,
        "no_errors_in_ledger": clean,
        "seconds": round(time.monotonic() - begun, 1),
    }


def main() -> None:
    """Run every device and keep the outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--things", type=int, default=40)
    parser.add_argument("--devices", default=",".join(DEVICES))
    asked = parser.parse_args()
    torch.set_num_threads(1)  # threads that were started before a fork are missing after it, and are waited for
    prompts = [scene.caption for scene in judge_scenes(load_things(), 300)["single"][: asked.things]]
    wanted = make_pictures("cpu", prompts)
    outcomes = {}
    for device in asked.devices.split(","):
        outcomes[device] = compare(device, prompts, wanted)
        print(device, "(virtual)", outcomes[device], flush=True)
    result = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **describe_run(read_commit()),
        **CALL_DEFAULTS,
        "kind": "virtual",
        "dtype": "float32",
        "devices": outcomes,
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
