"""The embedded model on every virtual device compared to the CPU: the judge's answers, and pixels.

    python -m benchmarks.embedded_virtual [--things 40] [--devices mps,hpu]

Writes benchmarks/results/embedded_virtual.json. Virtual devices enforce documented limits; they are not hardware.
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
TOLERANCE = 2  # maximum difference of a color value from 0 to 255
Pixels = list[np.ndarray[Any, np.dtype[np.uint8]]]


def generate_images(device: str, prompts: list[str]) -> tuple[Pixels, bool]:
    """Return one float32 image per prompt, and whether no operation violated a limit of the device."""
    if device == "cpu":
        return _generate(device, prompts), True
    with virtual(device, strict=True) as accelerator:
        return _generate(device, prompts), not accelerator.ledger.rows("error")


def _generate(device: str, prompts: list[str]) -> Pixels:
    pipe = open_model(None, device, "float32")
    return [np.asarray(pipe(prompt, seed=0, **CALL_DEFAULTS).images[0]) for prompt in prompts]


def generate_in_process(device: str, prompts: list[str]) -> tuple[Pixels, bool]:
    """Run `generate_images` in its own process, since a process has one virtual device."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(generate_images, (device, prompts))


def classify(images: Pixels) -> list[str]:
    """Return the judge's first answer for each image."""
    from PIL import Image

    judge = load_judge()
    return [(judge.classify(Image.fromarray(pixels)).names or ("nothing",))[0] for pixels in images]


def compare(device: str, prompts: list[str], reference: Pixels) -> dict[str, Any]:
    """Compare the images of a virtual device with those of the CPU."""
    start = time.monotonic()
    images, clean = generate_in_process(device, prompts)
    differences = [int(np.abs(a.astype(int) - b).max()) for a, b in zip(images, reference, strict=True)]
    same = [a == b for a, b in zip(classify(images), classify(reference), strict=True)]
    return {
        "pictures": len(images),
        "same_answers": sum(same),
        "largest_difference_of_255": max(differences),
        "within": max(differences) <= TOLERANCE,
        "no_errors_in_ledger": clean,
        "seconds": round(time.monotonic() - start, 1),
    }


def main() -> None:
    """Run every device and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--things", type=int, default=40)
    parser.add_argument("--devices", default=",".join(DEVICES))
    options = parser.parse_args()
    prompts = [scene.caption for scene in judge_scenes(load_things(), 300)["single"][: options.things]]
    reference, _ = generate_in_process("cpu", prompts)
    outcomes = {}
    for device in options.devices.split(","):
        outcomes[device] = compare(device, prompts, reference)
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
