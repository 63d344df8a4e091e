"""Quality of `speed="fast"` and `speed="draft"` with the embedded model, compared to exact images and by a judge.

    python -m benchmarks.quality [--device cpu] [--things 40]

Writes benchmarks/results/quality_DEVICE.json: for each level and number of steps the peak signal-to-noise ratio against
exact, how often the judge recognizes the prompt, and the speedup in the same run.
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
"""Numbers of steps, each with the fraction of the prompts it is measured with."""
MAX_DB = 100.0
"""PSNR of identical images."""


def open_pipeline(device: str, speed: str) -> Any:
    """Return the embedded model at one speed level."""
    library: Any = diffusers
    pipe = place(library.DiffusionPipeline.from_pretrained(find_embedded_model()), device, speed=speed, dtype="float32")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate_image(pipe: Any, prompt: str, steps: int) -> tuple[Any, float]:
    """Return an image with values from 0 to 1 and its time in seconds."""
    call = {**CALL_DEFAULTS, "num_inference_steps": steps}
    start = time.perf_counter()
    image = pipe(prompt, seed=0, output_type="np", **call).images[0]
    return image, time.perf_counter() - start


def measure(pipes: dict[str, Any], scenes: list[Any], steps: int) -> list[dict[str, Any]]:
    """Measure all speed levels alternately, with one number of steps."""
    judge = load_judge()
    results: dict[str, dict[str, list[float]]] = {name: {"psnr": [], "right": [], "seconds": []} for name in pipes}
    for pipe in pipes.values():
        generate_image(pipe, scenes[0].caption, steps)
    for scene in scenes:
        exact: Any = None
        for name, pipe in pipes.items():
            image, seconds = generate_image(pipe, scene.caption, steps)
            exact = image if exact is None else exact
            answer = judge.classify(Image.fromarray((image * 255).round().astype(np.uint8)))
            results[name]["right"].append(float(answer.groups[:1] == (judge.groups[scene.objects[0].thing],)))
            psnr = measure_psnr(image, exact)
            results[name]["psnr"].append(MAX_DB if psnr is None else min(MAX_DB, psnr))
            results[name]["seconds"].append(seconds)
    exact_s = statistics.median(results["exact"]["seconds"])
    return [
        {
            "speed": name, "steps": steps, "steps_run": _count_steps_run(pipes[name], steps), "pictures": len(scenes),
            "right": int(sum(values["right"])), "psnr_db": round(statistics.mean(values["psnr"]), 1),
            "least_psnr_db": round(min(values["psnr"]), 1),
            "times_as_fast": round(exact_s / statistics.median(values["seconds"]), 3),
        }
        for name, values in results.items()
    ]  # fmt: skip


def _count_steps_run(pipe: Any, steps: int) -> int:
    rule = pipe.plan.step_skipping.value
    return steps if rule is None else int(rule.count(steps))


def main() -> None:
    """Measure, print and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--things", type=int, default=40)
    options = parser.parse_args()
    scenes = judge_scenes(load_things(), 300)["single"][: options.things]
    pipes = {speed: open_pipeline(options.device, speed) for speed in SPEEDS}
    rows = []
    for steps, share in STEPS.items():
        rows += measure(pipes, scenes[: max(4, round(share * len(scenes)))], steps)
        print(*rows[-len(pipes) :], sep="\n", flush=True)
    result = {
        "what": "the embedded model at each speed level compared to exact, alternating",
        "date": datetime.now(timezone.utc).date().isoformat(), **describe_run(read_commit()),
        "device": str(pipes["exact"].plan.device), "rows": rows,
    }  # fmt: skip
    (RESULTS / f"quality_{options.device.split(':')[0]}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
