"""Speed and memory of full-size models with quantized weights, against bfloat16.

    python -m benchmarks.quantized cuda --product h200 --cases flux wan

Writes benchmarks/results/quantized_DEVICE.json after every row. The weights are random. A row is one format: layers of
bitsandbytes and of diffusers' quantizers as they are after loading, with the time of stock diffusers beside that of
anyaccel, and the formats of `place(weights=...)`. `--commit` and `--out` are for a copy without .git.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch

import anyaccel
from anyaccel.errors import summarize_error
from anyaccel.explanation.model_configs import find_model
from anyaccel.runtime.call_request import read_call_request
from anyaccel.runtime.introspection import plain_class
from anyaccel.runtime.pipeline import place
from anyaccel.runtime.placement.memory_plan import forecast_call
from anyaccel.runtime.placement_state import find_placement
from anyaccel.tracing.meta_pipeline import build_pipeline
from benchmarks.model_cases import MODELS
from benchmarks.provenance import describe_run, read_commit

RESULTS = Path(__file__).parent / "results"
OPTIONS: dict[str, Any] = {"check_finite": False, "memory": "resident", "vae_tiling": False}
"""Random weights may give NaN, and the comparison needs the same memory mode in every row."""


@dataclass(frozen=True)
class Case:
    """A model and the arguments of its calls."""

    model: str
    title: str
    call: dict[str, Any]
    size: dict[str, Any]
    steps: int


CASES = {
    "flux": Case("black-forest-labs/FLUX.1-schnell", "FLUX.1, 1024²", {"prompt": "a fox", "guidance_scale": 0.0},
                 {"height": 1024, "width": 1024}, 8),
    "wan": Case(str(MODELS / "wan2.1-t2v-14b"), "Wan 2.1 T2V 14B, 480x832, 33 frames, guidance",
                {"prompt": "a fox", "guidance_scale": 5.0, "num_frames": 33}, {"height": 480, "width": 832}, 4),
    "tiny": Case("stable-diffusion-v1-5/stable-diffusion-v1-5", "Stable Diffusion 1.5, to try the script",
                 {"prompt": "a fox"}, {"height": 64, "width": 64}, 3),
}  # fmt: skip


def quantize_bitsandbytes(layer: torch.nn.Linear) -> torch.nn.Module:
    """Return an NF4 layer of bitsandbytes, as diffusers' quantizer creates it."""
    import bitsandbytes

    new = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, layer.bias is not None,
                                     compute_dtype=layer.weight.dtype, quant_type="nf4", device="meta")  # fmt: skip
    weight = bitsandbytes.nn.Params4bit(layer.weight.detach(), requires_grad=False, quant_type="nf4")
    new.weight, new.bias = weight._quantize(layer.weight.device), layer.bias
    return new  # type: ignore[no-any-return]


def quantize_gguf(layer: torch.nn.Linear) -> torch.nn.Module:
    """Return a Q4_0 layer of diffusers with random codes, whose values are distributed as those of the layer."""
    import gguf
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    rows, columns = layer.weight.shape
    device = layer.weight.device
    # A block of Q4_0: a float16 scale and 32 codes of four bits, which stand for -8 to 7.
    codes = torch.randint(0, 256, (rows, columns // 32, 16), dtype=torch.uint8, device=device)
    scale = (layer.weight.detach().float().std() / 4.6).to(torch.float16)
    scales = scale.expand(rows, columns // 32, 1).contiguous().view(torch.uint8)
    data = torch.cat([scales, codes], -1).reshape(rows, -1)
    new: Any = GGUFLinear(columns, rows, layer.bias is not None, compute_dtype=layer.weight.dtype, device="meta")
    make_parameter: Any = GGUFParameter
    new.weight = make_parameter(data, quant_type=gguf.GGMLQuantizationType.Q4_0)
    new.bias = layer.bias
    return new  # type: ignore[no-any-return]


def replace_linear_layers(model: torch.nn.Module, quantize: Callable[[torch.nn.Linear], torch.nn.Module]) -> None:
    """Replace the linear layers of the transformer blocks."""
    for name, parent in list(model.named_modules()):
        for child, layer in list(parent.named_children()):
            if "blocks." in f"{name}." and type(layer) is torch.nn.Linear and layer.in_features % 64 == 0:
                setattr(parent, child, quantize(layer))


def cast_layerwise(model: Any) -> None:
    """Store the weights in float8 with diffusers' layerwise casting."""
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)


LIBRARY_FORMATS: dict[str, Callable[[Any], None]] = {
    "fp8 (layerwise casting)": cast_layerwise,
    "NF4 (bitsandbytes)": lambda model: replace_linear_layers(model, quantize_bitsandbytes),
    "Q4_0 (GGUF in diffusers)": lambda model: replace_linear_layers(model, quantize_gguf),
}
OWN_FORMATS = ("int8", "fp8", "nf4", "gguf:Q8_0", "gguf:Q4_0")


def build(case: Case, device: str) -> Any:
    """Return the full-size pipeline with random bfloat16 weights on the device."""
    gc.collect()
    anyaccel.empty_cache(device)
    torch.manual_seed(0)
    return build_pipeline(find_model(case.model), device, torch.bfloat16).pipe


def find_denoiser(pipe: Any) -> Any:
    """Return the model that runs in every step."""
    return getattr(pipe, "transformer", None) or pipe.unet


def measure(pipe: Any, case: Case, device: str) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the seconds per step and the peak memory of a pipeline, and its image."""
    pipe.set_progress_bar_config(disable=True)
    call = {**case.call, **case.size, "output_type": "pt"}

    def run(steps: int) -> tuple[float, torch.Tensor]:
        generator = torch.Generator("cpu").manual_seed(0)
        anyaccel.synchronize(device)
        start = time.perf_counter()
        output = pipe(**call, num_inference_steps=steps, generator=generator)
        anyaccel.synchronize(device)
        return time.perf_counter() - start, torch.as_tensor(next(iter(output.values()))).float().cpu()

    run(2)  # the first call of a process initializes libraries
    gc.collect()
    anyaccel.empty_cache(device)
    anyaccel.reset_peak_memory(device)
    # Encoding and decoding take the same time in both calls.
    few, many = run(1)[0], run(1 + case.steps)
    row = {"s_per_step": round((many[0] - few) / case.steps, 4), "peak_bytes": anyaccel.max_memory(device)}
    return row, many[1]


def predict(pipe: Any, case: Case) -> int:
    """Return the peak memory that the plan predicts for a call of a placed pipeline."""
    placement = find_placement(pipe)
    assert placement is not None
    call = {**case.call, **case.size, "num_inference_steps": 2, "output_type": "pt"}
    request = read_call_request(pipe, plain_class(pipe).__call__, (), call)
    return forecast_call(pipe, placement, request).peak_bytes


def measure_ours(pipe: Any, case: Case, device: str, **options: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """Place a pipeline, and measure it with the prediction of its memory."""
    start = time.perf_counter()
    placed = place(pipe, device, dtype=None if "weights" in options else "bfloat16", **OPTIONS, **options)
    seconds = time.perf_counter() - start
    predicted = predict(placed, case)
    row, image = measure(placed, case, device)
    row |= {
        "predicted_bytes": predicted,
        "off": round(predicted / row["peak_bytes"] - 1, 4),
        "placing_s": round(seconds, 1),
    }
    row["plan"] = {name: f"{decision}: {decision.reason}" for name, decision in placed.plan.decisions()
                   if name in ("weights", "dequantized", "compile")}  # fmt: skip
    return row, image


def run_library_format(case: Case, device: str, quantize: Callable[[Any], None] | None) -> dict[str, Any]:
    """Measure stock diffusers, then anyaccel with the same weights."""
    pipe = build(case, device)
    if quantize is not None:
        quantize(find_denoiser(pipe))
    stock, expected = measure(pipe, case, device)
    ours, image = measure_ours(pipe, case, device)
    return {"stock": stock, "anyaccel": ours, "largest_difference": float((image - expected).abs().max())}


def run_own_format(case: Case, device: str, product: str, name: str) -> dict[str, Any]:
    """Measure `place(weights=...)`, with the prediction of `anyaccel.explain`."""
    pipe = build(case, device)
    explained = anyaccel.explain(case.model, product, dtype="bfloat16", weights=name, **case.size, **OPTIONS,
                                 frames=case.call.get("num_frames"))  # fmt: skip
    row = {"anyaccel": measure_ours(pipe, case, device, weights=name)[0]}
    if explained.forecast is not None:
        row["anyaccel"]["explained_bytes"] = explained.forecast.peak_bytes
        row["anyaccel"]["explained_off"] = round(explained.forecast.peak_bytes / row["anyaccel"]["peak_bytes"] - 1, 4)
    return row


def list_runs(case: Case, device: str, product: str) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return a function for each format, which returns its row."""
    runs = {"bfloat16": partial(run_library_format, case, device, None)}
    runs |= {label: partial(run_library_format, case, device, quantize) for label, quantize in LIBRARY_FORMATS.items()}
    return runs | {f"weights={label!r}": partial(run_own_format, case, device, product, label) for label in OWN_FORMATS}


def run_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each case and format."""
    for name in options.cases:
        case, base = CASES[name], None
        for label, run in list_runs(case, options.device, options.product).items():
            if options.formats and label not in options.formats:
                continue
            row: dict[str, Any] = {"case": name, "title": case.title, "format": label}
            try:
                row |= run()
            except Exception as error:  # noqa: BLE001 - the other rows must be measured
                row["error"] = summarize_error(error)
            seconds = row.get("anyaccel", {}).get("s_per_step")
            base = seconds if label == "bfloat16" else base
            if base and seconds:
                row["time_of_bfloat16"] = round(seconds / base, 3)
            yield row


def main() -> None:
    """Run the rows and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device")
    parser.add_argument("--product", default="h200")
    parser.add_argument("--cases", nargs="*", default=["flux", "wan"], choices=list(CASES))
    parser.add_argument("--formats", nargs="*", help="rows to measure; all by default")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    opened = anyaccel.open_device(options.device)
    report: dict[str, Any] = {
        "what": "seconds per step and peak memory with quantized weights, full size, random weights",
        "device": opened.driver.device_name(opened.index), "evidence": "hardware",
        "date": datetime.now(timezone.utc).date().isoformat(), **describe_run(options.commit or read_commit()),
        "rows": [],
    }  # fmt: skip
    report["versions"] |= {"diffusers": diffusers.__version__, "torch": torch.__version__}
    path = options.out / f"quantized_{opened.sheet.name}.json"
    for row in run_rows(options):
        report["rows"].append(row)
        path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        print(json.dumps(row, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
