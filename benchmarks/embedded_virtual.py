"""The embedded model on every virtual device against the CPU: the same answers of the judge, and the same pixels.

    python -m benchmarks.embedded_virtual [--things 40] [--devices mps,hpu]

Writes benchmarks/results/embedded_virtual.json. Virtual devices enforce documented limits; they are no hardware.
"""

import argparse
import json
import multiprocessing
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from anyaccel.embedded.judge import load_judge
from anyaccel.embedded.model import CALL_DEFAULTS
from anyaccel.emulator.activation import virtual
from benchmarks.provenance import describe_run, read_commit
from training.evaluate import judge_scenes
from training.figures import open_model
from training.prepare import load_things

RESULT = Path(__file__).parent / "results" / "embedded_virtual.json"
DEVICES = ("mps", "hpu", "neuron", "xpu", "npu", "mlu")
ALLOWED = 2  # of 255, a pixel
Pixels = list[np.ndarray[Any, np.dtype[np.uint8]]]


def generate_images(device: str, prompts: list[str]) -> tuple[Pixels, bool]:
    """One picture a prompt, in float32, one at a time; and whether no line met a limit that is an error there."""
    if device == "cpu":
        return _draw(device, prompts), True
    with virtual(device, strict=True) as accelerator:
        return _draw(device, prompts), not accelerator.ledger.rows("error")


def _draw(device: str, prompts: list[str]) -> Pixels:
    pipe = open_model(None, device, "float32")
    return [np.asarray(pipe(prompt, seed=0, **CALL_DEFAULTS).images[0]) for prompt in prompts]


def in_process(device: str, prompts: list[str]) -> tuple[Pixels, bool]:
    """The same in a process of its own: there is one virtual device a process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(generate_images, (device, prompts))


def name_all(pictures: Pixels) -> list[str]:
    """What the judge sees on each."""
    from PIL import Image

    judge = load_judge()
    return [(judge.classify(Image.fromarray(pixels)).names or ("nothing",))[0] for pixels in pictures]


def compare(device: str, prompts: list[str], wanted: Pixels) -> dict[str, Any]:
    """How the pictures of a virtual device differ from the CPU's."""
    begun = time.monotonic()
    made, clean = in_process(device, prompts)
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
    prompts = [scene.caption for scene in judge_scenes(load_things(), 300)["single"][: asked.things]]
    wanted, _ = in_process("cpu", prompts)
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
