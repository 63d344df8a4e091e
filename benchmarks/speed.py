"""Speed of anyaccel compared to stock diffusers, for full-size models with random weights and no text encoders.

    python -m benchmarks.speed cuda                        every case, one after another
    python -m benchmarks.speed cuda --together             all warm up concurrently, and are measured one at a time
    python -m benchmarks.speed cuda --cases sdxl "schnell:anyaccel,anyaccel fast"
    python -m benchmarks.speed cuda --explain h200         add the memory predicted by `explain` to an existing file

Writes benchmarks/results/speed_DEVICE.json: stock eager, stock compiled and anyaccel, each in its own process, in
turn, with the same noise. `--commit` and `--out` are for a copy without .git, `--options` for other placement options.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import diffusers

import anyaccel
from anyaccel.backends.device import this_machine
from anyaccel.bench.bench import run_together
from anyaccel.bench.case import FAST, OURS, BenchCase
from anyaccel.bench.pipelines import is_left_out
from benchmarks.provenance import read_commit

RESULTS = Path(__file__).parent / "results"
SIDE = {"height": 1024, "width": 1024}
CASES = {
    "schnell": BenchCase(
        model="black-forest-labs/FLUX.1-schnell", title="FLUX.1-schnell, 1024², 4 steps", floor_s=0.365,
        embeds={"prompt_embeds": (1, 256, 4096), "pooled_prompt_embeds": (1, 768)},
        call={"num_inference_steps": 4, "guidance_scale": 0.0, **SIDE}),
    "sdxl": BenchCase(
        model="stabilityai/sdxl-turbo", title="SDXL, 1024², 30 steps, guidance", floor_s=0.527,
        scheduler="EulerDiscreteScheduler",
        embeds={"prompt_embeds": (1, 77, 2048), "negative_prompt_embeds": (1, 77, 2048),
                "pooled_prompt_embeds": (1, 1280), "negative_pooled_prompt_embeds": (1, 1280)},
        call={"num_inference_steps": 30, "guidance_scale": 5.0, **SIDE}),
    "klein": BenchCase(
        model="black-forest-labs/FLUX.2-klein-4B", title="FLUX.2-klein-4B, 1024², 4 steps", floor_s=0.190,
        embeds={"prompt_embeds": (1, 512, 7680)}, call={"num_inference_steps": 4, "guidance_scale": 1.0, **SIDE}),
    "sd15": BenchCase(
        model="stable-diffusion-v1-5/stable-diffusion-v1-5", title="SD 1.5, 512², 50 steps, guidance", floor_s=0.105,
        embeds={"prompt_embeds": (1, 77, 768), "negative_prompt_embeds": (1, 77, 768)},
        call={"num_inference_steps": 50, "guidance_scale": 7.5, "height": 512, "width": 512}),
    "pixart": BenchCase(
        model="PixArt-alpha/PixArt-XL-2-1024-MS", title="PixArt-alpha, 1024², 20 steps, guidance", floor_s=0.343,
        embeds={"prompt_embeds": (1, 120, 4096), "negative_prompt_embeds": (1, 120, 4096),
                "prompt_attention_mask": (1, 120), "negative_prompt_attention_mask": (1, 120)},
        call={"num_inference_steps": 20, "guidance_scale": 4.5, "use_resolution_binning": False,
              "negative_prompt": None, **SIDE}),
    "throughput": BenchCase(
        model="stabilityai/sdxl-turbo", title="SDXL, 1024², 20 steps, guidance, batch of 8", variants=(FAST,),
        scheduler="EulerDiscreteScheduler",
        embeds={"prompt_embeds": (1, 77, 2048), "negative_prompt_embeds": (1, 77, 2048),
                "pooled_prompt_embeds": (1, 1280), "negative_pooled_prompt_embeds": (1, 1280)},
        call={"num_inference_steps": 20, "guidance_scale": 8.0, "num_images_per_prompt": 8, **SIDE}),
    "dev": BenchCase(
        model="black-forest-labs/FLUX.1-schnell", title="FLUX.1-dev, 1024², 28 steps", floor_s=2.65,
        config={"transformer": {"guidance_embeds": True}},
        embeds={"prompt_embeds": (1, 512, 4096), "pooled_prompt_embeds": (1, 768)},
        call={"num_inference_steps": 28, "guidance_scale": 3.5, **SIDE}),
}  # fmt: skip
"""Benchmark cases; the floors are the FLOPs of a call at 790 TFLOP/s."""


def list_cases(names: list[str], device: str, placement_options: dict[str, Any]) -> Iterator[BenchCase]:
    """Yield cases with device and placement options; `sdxl:anyaccel,anyaccel fast` selects variants."""
    options = {"check_finite": False, "compile": True, "expected_images": 10_000, **placement_options}
    for text in names:
        name, _, variants = text.partition(":")
        case = CASES[name] if not variants else replace(CASES[name], variants=tuple(variants.split(",")))
        yield replace(case, device=device, dtype="bfloat16", random=True, options=options)


def explain_rows(path: Path, device: str) -> None:
    """Add the memory predicted by `explain` to each row of a result file, without the text encoders."""
    report = json.loads(path.read_text())
    for row in report["rows"]:
        sides, images = {side: row["call"][side] for side in SIDE}, row["call"].get("num_images_per_prompt", 1)
        plan = anyaccel.explain(row["model"], device, batch=images, dtype=row["dtype"], compile=True, **sides)
        assert plan.forecast is not None
        text_encoders = sum(size for name, size in plan.forecast.components if is_left_out(name))
        row["explained_bytes"] = {
            "peak": max(size for phase, size in plan.forecast.phases if phase != "encode") - text_encoders,
            "once recorded": plan.forecast.recorded_peak_bytes - text_encoders,
        }
        held = {name: variant["held_bytes"] for name, variant in row["variants"].items() if OURS in name}
        print(row["title"], row["explained_bytes"], "held", held, flush=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def print_progress(text: str) -> None:
    """Print progress with the time of day, because some first images take minutes."""
    print(f"{datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Run the cases and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--explain", metavar="PRODUCT")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.explain:
        explain_rows(options.out / f"speed_{options.device}.json", options.explain)
        return
    opened, machine = anyaccel.open_device(options.device), this_machine()
    report: dict[str, Any] = {
        "what": "stock diffusers and anyaccel, alternating, full size, random weights, without text encoders",
        "device": opened.driver.device_name(opened.index), "evidence": "hardware", "options": options.options,
        "date": datetime.now(timezone.utc).date().isoformat(), "commit": options.commit or read_commit(),
        "system": f"{machine.system} {machine.architecture}", "warmed_up_together": options.together,
        "versions": dict(machine.versions) | {"diffusers": diffusers.__version__}, "rows": [],
    }  # fmt: skip
    cases = list(list_cases(options.cases, options.device, options.options))
    for group in [cases] if options.together else [[case] for case in cases]:
        for row in run_together(
            group, rounds=options.rounds, concurrent_warmup=options.together, on_progress=print_progress
        ):
            report["rows"].append(row)
            shown = ("title", "error", "hint", "against stock compiled", "fast against exact", "fast_psnr_db")
            print({key: row.get(key) for key in shown}, flush=True)
            ratios = [item["against stock compiled"] for item in report["rows"] if "against stock compiled" in item]
            report["geometric_mean"] = round(statistics.geometric_mean(ratios), 3) if ratios else None
            options.out.mkdir(exist_ok=True)
            (options.out / f"speed_{opened.sheet.name}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
