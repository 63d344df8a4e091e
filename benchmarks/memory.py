"""Memory predicted by `anyaccel explain` compared to a measurement, for full-size models with random weights.

    python -m benchmarks.memory cuda h200

Writes benchmarks/results/memory_DEVICE.json: a row for each model, size, batch and rule, with the predicted peak, the
device's own `max_memory_allocated` and the relative error. Then the available memory is reduced, so calls run out
of memory and recover. `--commit` and `--out` are for a copy without .git; `--models` selects models.
"""

import argparse
import gc
import json
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import diffusers
import torch

import anyaccel
from anyaccel.backends.device import this_machine
from anyaccel.explanation.known_models import find_bundled_configs
from anyaccel.runtime.pipeline import place
from anyaccel.tracing.meta_pipeline import build_pipeline
from anyaccel.tracing.model_folder import read_model_folder
from benchmarks.provenance import read_commit

RESULTS = Path(__file__).parent / "results"
SIZES = {
    "stable-diffusion-v1-5/stable-diffusion-v1-5": 512,
    "stabilityai/sdxl-turbo": 1024,
    "PixArt-alpha/PixArt-XL-2-1024-MS": 1024,
    "black-forest-labs/FLUX.2-klein-4B": 1024,
    "black-forest-labs/FLUX.1-schnell": 1024,
}
"""The five models and their image sizes; sdxl-turbo has SDXL's shapes."""
RULES: dict[str, dict[str, Any]] = {
    "resident": {"memory": "resident", "vae_tiling": False},
    "VAE tiled": {"memory": "resident", "vae_tiling": True},
    "component offload": {"memory": "component", "vae_tiling": False},
}
EXTRA_ROWS: list[tuple[str, int, int, str, dict[str, Any]]] = [
    ("stabilityai/sdxl-turbo", 2048, 1, "bfloat16", RULES["resident"]),
    ("stabilityai/sdxl-turbo", 2048, 1, "bfloat16", RULES["VAE tiled"]),
    ("stabilityai/sdxl-turbo", 1024, 1, "float16", RULES["resident"]),
    ("stable-diffusion-v1-5/stable-diffusion-v1-5", 512, 1, "float32", RULES["resident"]),
    ("stable-diffusion-v1-5/stable-diffusion-v1-5", 768, 2, "bfloat16", {"memory": "layer", "vae_tiling": False}),
    ("stable-diffusion-v1-5/stable-diffusion-v1-5", 768, 1, "bfloat16",
     {"memory": "resident", "vae_tiling": False, "attention_slicing": "max"}),
]  # fmt: skip
"""Additional rows: tiles smaller than the image, other dtypes, layer offload, attention slicing."""
FRACTIONS = (0.085, 0.06, 0.045)
"""Fractions of the device's memory that the process may use, to test recovery."""


def list_rows(models: list[str]) -> Iterator[tuple[str, int, int, str, str, dict[str, Any]]]:
    """Yield model, size, batch, dtype, rule name and placement options, grouped by model."""
    for model in models:
        for name, placement_options in RULES.items():
            for batch in (1, 4):
                yield model, SIZES[model], batch, "bfloat16", name, placement_options
        for other, size, batch, dtype, placement_options in EXTRA_ROWS:
            if other == model:
                yield (
                    model,
                    size,
                    batch,
                    dtype,
                    ", ".join(f"{key} {value}" for key, value in placement_options.items()),
                    placement_options,
                )


def build(model: str, device: str) -> Any:
    """Return the full-size pipeline with random bfloat16 weights, created on the device."""
    folder = read_model_folder(find_bundled_configs(model) or Path(model))
    return build_pipeline(folder, device, torch.bfloat16).pipe


def measure(
    pipe: Any, device: str, size: int, batch: int, dtype: str, placement_options: dict[str, Any]
) -> dict[str, Any]:
    """Place the pipeline with these options, call it twice and return the peak of the second call."""
    placed = place(pipe, device, dtype=dtype, check_finite=False, **placement_options)  # random weights may give NaN
    call = {"prompt": "a fox", "num_inference_steps": 2, "height": size, "width": size, "seed": 7}
    placed.set_progress_bar_config(disable=True)
    start = 0.0
    for _ in range(
        1 if placement_options.get("memory") == "component" else 2
    ):  # the first call of a process initializes libraries
        gc.collect()
        anyaccel.empty_cache(device)
        anyaccel.synchronize(device)
        anyaccel.reset_peak_memory(device)
        start = time.perf_counter()
        placed(**call, num_images_per_prompt=batch)
        anyaccel.synchronize(device)
    return {"measured_bytes": anyaccel.max_memory(device), "seconds": round(time.perf_counter() - start, 2)}


def run_rows(device: str, product: str, models: list[str]) -> Iterator[dict[str, Any]]:
    """Yield every row with the predicted and measured peak."""
    pipe, built = None, ""
    for model, size, batch, dtype, rule, placement_options in list_rows(models):
        plan = anyaccel.explain(model, product, height=size, width=size, batch=batch, dtype=dtype, **placement_options)
        assert plan.forecast is not None
        if model != built:
            pipe = None
            gc.collect()
            anyaccel.empty_cache(device)
            pipe, built = build(model, device), model
        row: dict[str, Any] = {"model": model, "size": size, "batch": batch, "dtype": dtype, "rule": rule,
                               "asked_for": rule in RULES}  # fmt: skip
        row["predicted_bytes"] = plan.forecast.peak_bytes
        row |= measure(pipe, device, size, batch, dtype, placement_options)
        row["off"] = round(row["predicted_bytes"] / row["measured_bytes"] - 1, 4)
        yield row


def recover(device: str, model: str) -> Iterator[dict[str, Any]]:
    """Yield the results of a four-image call with decreasing memory limits that the plan is not aware of."""
    pipe = build(model, device)
    for fraction in (1.0, *FRACTIONS):
        torch.cuda.set_per_process_memory_fraction(fraction)
        placed = place(pipe, device, dtype="bfloat16", check_finite=False)
        placed.set_progress_bar_config(disable=True)
        row: dict[str, Any] = {"model": model, "fraction": fraction}
        try:
            result = placed("a fox", num_inference_steps=2, height=1024, width=1024, seed=7, num_images_per_prompt=4,
                          output_type="np")  # fmt: skip
            row |= {
                "rule": str(result.plan.memory_in_use),
                "reason": result.plan.memory_in_use.reason,
                "mean": float(result.images.mean()),
            }
        except anyaccel.AnyaccelError as error:
            row["error"] = str(error)
        place(pipe, "cpu", dtype="bfloat16")
        gc.collect()
        anyaccel.empty_cache(device)
        yield row | {"left_bytes": anyaccel.memory(device).used_bytes}


def main() -> None:
    """Run all rows and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device")
    parser.add_argument("product")
    parser.add_argument("--models", nargs="*", default=list(SIZES))
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--no-recovery", action="store_true")
    options = parser.parse_args()
    machine = this_machine()
    report: dict[str, Any] = {
        "what": "predicted from config files compared to the device's max_memory_allocated, full size, random weights",
        "device": anyaccel.open_device(options.device).driver.device_name(0),
        "evidence": "hardware",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": options.commit or read_commit(),
        "system": f"{machine.system} {machine.architecture}",
        "versions": dict(machine.versions) | {"diffusers": diffusers.__version__, "torch": torch.__version__},
        "rows": [],
        "recovery": [],
    }
    path = options.out / f"memory_{options.device}.json"
    for row in run_rows(options.device, options.product, options.models):
        report["rows"].append(row)
        path.write_text(json.dumps(report, indent=2) + "\n")
        print({name: row[name] for name in ("model", "size", "batch", "dtype", "rule", "off", "seconds")}, flush=True)
    for row in () if options.no_recovery else recover(options.device, "stabilityai/sdxl-turbo"):
        report["recovery"].append(row)
        path.write_text(json.dumps(report, indent=2) + "\n")
        print(row, flush=True)
    worst = max((abs(row["off"]) for row in report["rows"]), default=0.0)
    lowest = min((row["off"] for row in report["rows"]), default=0.0)
    print(f"{len(report['rows'])} rows, largest error {worst:.1%}, largest underestimate {-min(0.0, lowest):.1%}")


if __name__ == "__main__":
    main()
