"""Right images with quantized weights: each format on each virtual device, for tiny FLUX, SDXL and Wan pipelines.

    make build/quantization/.ready
    PYTHONPATH=build/quantization python -m benchmarks.quantized_matrix [--models NAME ...] [--formats NAME ...]

Writes benchmarks/results/quantized_weights.json, and keeps the rows of other models and formats that are in it. Each
row is one cell: how the device runs the weights (native or dequantized), and the largest difference between the image
and that of the same weights, dequantized on the CPU in float32.
"""

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

import anyaccel
from anyaccel.emulator.run_forked import run_forked
from anyaccel.processes.forked_call import call_in_fork
from anyaccel.quantized_weights.replace_layers import list_formats, replace_quantized_layers
from anyaccel.recipes import recipes, run
from anyaccel.storage.atomic_write import atomic_write
from benchmarks.provenance import describe_run, read_commit
from tests.emulator.forked import DEVICES
from tests.quantized_weights.quantizers import FORMATS, MODELS, Model, find_denoiser, make_pipeline
from tests.quantized_weights.scaled_files import LAYOUTS, write_scaled_file

RESULT = Path(__file__).parent / "results" / "quantized_weights.json"
ALLOWED = 1e-5
"""The largest difference of a right image, whose values are from 0 to 1."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FILE_DTYPES = {"fp8-e4m3": torch.float8_e4m3fn, "fp8-e5m2": torch.float8_e5m2, "int8": torch.int8}
FILES = {
    f"file-{form}-{layout}": (dtype, layout)
    for form, dtype in FILE_DTYPES.items()
    for layout in LAYOUTS
    if form != "int8" or layout in ("comfyui-2025", "rows", "blocks")
}
# Makes the pipeline for the device, and the same one for the reference on the CPU.
Maker = Callable[[], Any]


def make_makers(model: Model, name: str, saved: Path, temporary: Path) -> tuple[Maker, Maker]:
    """Return a function that makes the pipeline with quantized weights, and one that makes the dequantized one."""
    if name in DTYPES:
        return (lambda: _load(saved)), (lambda: _load(saved))
    if name in FILES:
        subfolder = find_denoiser(model.make())
        source, file = next((saved / subfolder).glob("*.safetensors")), temporary / "model.safetensors"
        values = write_scaled_file(source, file, *FILES[name])

        def make_reference() -> Any:
            pipe = model.make()
            getattr(pipe, subfolder).load_state_dict(values)
            return pipe

        return (lambda: _load(saved, **{subfolder: file})), make_reference

    def make() -> Any:
        return make_pipeline(FORMATS[name], saved, temporary, model)

    def make_dequantized() -> Any:
        pipe = make()
        replace_quantized_layers(getattr(pipe, find_denoiser(pipe)), lambda library: False)
        return pipe

    return make, make_dequantized


def _load(saved: Path, **components: Any) -> Any:
    return anyaccel.DiffusionPipeline.from_pretrained(saved, dtype="float32", **components)


def measure(model: Model, name: str, saved: Path, temporary: Path) -> Iterator[dict[str, Any]]:
    """Yield the result of one format on each device."""
    recipe = recipes()[model.recipe]
    make, make_reference = make_makers(model, name, saved, temporary)

    def compute_reference() -> tuple[Any, dict[str, int]]:
        pipe = make_reference()
        return run(recipe, pipe), list_formats(getattr(pipe, find_denoiser(pipe)))

    expected, _ = call_in_fork(compute_reference, name="the reference", timeout_s=600.0)
    for device in DEVICES:

        def use(accelerator: Any) -> tuple[Any, str, int]:
            placed = anyaccel.place(make(), f"virtual:{accelerator.name}", dtype="float32")
            image = run(recipe, placed)
            formats = list_formats(getattr(placed, find_denoiser(placed)))
            return image, str(placed.plan.dequantized), sum(formats.values())

        row: dict[str, Any] = {"device": device}
        try:
            image, decision, layers = run_forked(device, use)
            difference = float(np.abs(image - expected).max())
            row |= {
                "runs": "native" if decision == "-" else "dequantized",
                "dequantized_layers": layers,
                "difference": float(f"{difference:.2e}"),
                "right": difference <= ALLOWED,
            }
        except Exception as error:  # noqa: BLE001 - the matrix shows it
            row |= {"runs": "error", "right": False, "error": f"{type(error).__name__}: {error}"[:300]}
        yield row


def main() -> None:
    """Measure, print and write the file after each format."""
    warnings.filterwarnings("ignore", message="`Quanto", category=FutureWarning)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    names = [*DTYPES, *FORMATS, *FILES]
    parser.add_argument("--formats", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        for model_name in options.models:
            model = MODELS[model_name]
            for name in options.formats:
                temporary = Path(folder, model_name, name)
                saved = temporary / "saved"
                pipe = model.make()
                pipe.to(DTYPES.get(name, torch.float32)).save_pretrained(saved)
                new = [{"model": model_name, "format": name, **row} for row in measure(model, name, saved, temporary)]
                rows = [row for row in rows if (row["model"], row["format"]) != (model_name, name)] + new
                print(*new, sep="\n", flush=True)
                result = {
                    "what": "quantized weights on virtual devices, compared to the same weights on the CPU in float32",
                    "evidence": "virtual",
                    "date": datetime.now(timezone.utc).date().isoformat(), **describe_run(read_commit()),
                    "allowed_difference": ALLOWED, "right": sum(row["right"] for row in rows), "cells": len(rows),
                    "rows": rows,
                }  # fmt: skip
                atomic_write(RESULT, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
