"""What `speed="fast"` and `speed="draft"` cost: the embedded model's pictures beside exact ones, and what a judge sees.

    python -m benchmarks.quality [--device cpu] [--things 40]

Writes benchmarks/results/quality_DEVICE.json: for each level and number of steps the peak signal-to-noise ratio against
exact, how often the judge sees what was asked for, and how many times as fast a picture was in the same run.
"""

import argparse
import json
import statistics
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
from PIL import Image

from anyaccel.embedded.judge import load_judge
from anyaccel.embedded.model import CALL_DEFAULTS, find_embedded_model
from anyaccel.generation.image_difference import measure_psnr
from anyaccel.planning.options import SPEEDS
from anyaccel.runtime.pipeline import place
from benchmarks.provenance import describe_run, read_commit
from training.evaluate import judge_scenes
from training.prepare import load_things

RESULTS = Path(__file__).parent / "results"
STEPS = {8: 1.0, 20: 0.25, 4: 1.0}
"""The numbers of steps, and the share of the prompts that each is tried with."""
MOST_DB = 100.0
"""What pictures that are the same count as."""


def open_pipeline(device: str, speed: str) -> Any:
    """The embedded model at one level."""
    library: Any = diffusers
    pipe = place(library.DiffusionPipeline.from_pretrained(find_embedded_model()), device, speed=speed, dtype="float32")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate_image(pipe: Any, prompt: str, steps: int) -> tuple[Any, float]:
    """One picture as numbers from 0 to 1, and what it took."""
    call = {**CALL_DEFAULTS, "num_inference_steps": steps}
    begun = time.perf_counter()
    made = pipe(prompt, seed=0, output_type="np", **call).images[0]
    return made, time.perf_counter() - begun


def measure(pipes: dict[str, Any], scenes: list[Any], steps: int) -> list[dict[str, Any]]:
    """All levels with one number of steps, in turns."""
    judge = load_judge()
    found: dict[str, dict[str, list[float]]] = {name: {"psnr": [], "right": [], "seconds": []} for name in pipes}
    for pipe in pipes.values():
        generate_image(pipe, scenes[0].caption, steps)
    for scene in scenes:
        exact: Any = None
        for name, pipe in pipes.items():
            made, seconds = generate_image(pipe, scene.caption, steps)
            exact = made if exact is None else exact
            seen = judge.classify(Image.fromarray((made * 255).round().astype(np.uint8)))
            found[name]["right"].append(float(seen.groups[:1] == (judge.groups[scene.objects[0].thing],)))
            likeness = measure_psnr(made, exact)
            found[name]["psnr"].append(MOST_DB if likeness is None else min(MOST_DB, likeness))
            found[name]["seconds"].append(seconds)
    usual = statistics.median(found["exact"]["seconds"])
    return [
        {
            "speed": name, "steps": steps, "steps_run": _count_run(pipes[name], steps), "pictures": len(scenes),
            "right": int(sum(one["right"])), "psnr_db": round(statistics.mean(one["psnr"]), 1),
            "least_psnr_db": round(min(one["psnr"]), 1),
            "times_as_fast": round(usual / statistics.median(one["seconds"]), 3),
        }
        for name, one in found.items()
    ]  # fmt: skip


def _count_run(pipe: Any, steps: int) -> int:
    rule = pipe.plan.step_skipping.value
    return steps if rule is None else int(rule.count(steps))


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--things", type=int, default=40)
    asked = parser.parse_args()
    scenes = judge_scenes(load_things(), 300)["single"][: asked.things]
    pipes = {speed: open_pipeline(asked.device, speed) for speed in SPEEDS}
    rows = []
    for steps, share in STEPS.items():
        rows += measure(pipes, scenes[: max(4, round(share * len(scenes)))], steps)
        print(*rows[-len(pipes) :], sep="\n", flush=True)
    result = {
        "what": "the embedded model at each level of speed, in turns, beside exact",
        "date": datetime.now(timezone.utc).date().isoformat(), **describe_run(read_commit()),
        "device": str(pipes["exact"].plan.device), "rows": rows,
    }  # fmt: skip
    (RESULTS / f"quality_{asked.device.split(':')[0]}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
