"""Streaming weights to a device: accelerate's sequential offload compared to diffusers' group offloading.

    python -m benchmarks.streaming cuda                        full size, random weights, without text encoders
    python -m benchmarks.streaming hpu --tiny --virtual        tiny pipelines on a virtual device, to test this script
    python -m benchmarks.streaming cuda --ways "sequential" "leaf, stream" --models sdxl

Writes benchmarks/results/streaming_DEVICE.json: for each model and method the seconds per step, the peak memory,
what `memory="layer"` predicts, and how far the latents are from those of the first method. Rows that would start after
`--limit` seconds are left out. `--commit` and `--out` are for a copy without .git.
"""

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.hooks.hooks import HookRegistry

import anyaccel
from anyaccel.bench.case import BenchCase
from anyaccel.bench.pipelines import make_call, make_pipeline
from anyaccel.recipes import recipes
from anyaccel.runtime.pipeline import place
from benchmarks.provenance import describe_run, read_commit

RESULTS = Path(__file__).parent / "results"
STEPS = 4
"""Steps per call; the first records the execution order of the layers and is not counted."""
SIDE = {"height": 1024, "width": 1024}
CASES = {
    "schnell": BenchCase(
        model="black-forest-labs/FLUX.1-schnell", title="FLUX.1-schnell, 1024², bfloat16", dtype="bfloat16",
        embeds={"prompt_embeds": (1, 256, 4096), "pooled_prompt_embeds": (1, 768)}, random=True,
        call={"guidance_scale": 0.0, **SIDE}),
    "sdxl": BenchCase(
        model="stabilityai/sdxl-turbo", title="SDXL, 1024², float16, guidance", dtype="float16", random=True,
        scheduler="EulerDiscreteScheduler",
        embeds={"prompt_embeds": (1, 77, 2048), "negative_prompt_embeds": (1, 77, 2048),
                "pooled_prompt_embeds": (1, 1280), "negative_pooled_prompt_embeds": (1, 1280)},
        call={"guidance_scale": 5.0, **SIDE}),
}  # fmt: skip
TINY = {"schnell": "flux", "sdxl": "stable-diffusion-xl"}
METHODS: dict[str, dict[str, Any] | None] = {
    "sequential": None,
    "block": {"offload_type": "block_level", "num_blocks_per_group": 1},
    "leaf": {"offload_type": "leaf_level"},
    "block, stream": {"offload_type": "block_level", "num_blocks_per_group": 1, "use_stream": True},
    "leaf, stream": {"offload_type": "leaf_level", "use_stream": True},
    "leaf, stream, recorded": {"offload_type": "leaf_level", "use_stream": True, "record_stream": True},
    "leaf, stream, pinned late": {"offload_type": "leaf_level", "use_stream": True, "low_cpu_mem_usage": True},
}
"""Options of `enable_group_offload`; None for `enable_sequential_cpu_offload`. Those that pin weights come last."""
PLACED = "memory='layer'"
HOOKS = ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")


def build(name: str, device: str, tiny: bool) -> tuple[Any, dict[str, Any]]:
    """Return a pipeline in host memory and the arguments of its call."""
    if tiny:
        recipe = recipes()[TINY[name]]
        return recipe.make(), {**recipe.call(), "output_type": "latent", "num_inference_steps": STEPS}
    case = BenchCase.from_dict({**CASES[name].to_dict(), "device": device})
    pipe = make_pipeline(case, "stock eager")
    call = make_call(case, pipe)
    pipe.to("cpu", silence_dtype_warnings=True)
    anyaccel.empty_cache(device)
    return pipe, {**call, "output_type": "latent", "num_inference_steps": STEPS}


def offload(pipe: Any, device: torch.device, options: dict[str, Any] | None) -> None:
    """Enable weight streaming on a stock pipeline."""
    if options is None:
        pipe.enable_sequential_cpu_offload(device=device)
    else:
        pipe.enable_group_offload(device, **options)


def remove_offloading(pipe: Any) -> None:
    """Remove all offloading hooks and move the weights to host memory."""
    pipe.remove_all_hooks()
    for model in [component for component in pipe.components.values() if isinstance(component, torch.nn.Module)]:
        registry = HookRegistry.check_if_exists_or_initialize(model)
        for hook in HOOKS:
            registry.remove_hook(hook, recurse=True)
        for module in model.modules():
            vars(module).pop("_diffusers_hook", None)
            if not hasattr(type(module), "_hf_hook"):
                vars(module).pop("forward", None)
    pipe.to("cpu", silence_dtype_warnings=True)
    gc.collect()


def measure(pipe: Any, device: str, call: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the measurements of one call, and its latents."""
    ends: list[float] = []

    def record_step(*args: Any) -> dict[str, Any]:
        anyaccel.synchronize(device)
        ends.append(time.perf_counter())
        return {}

    gc.collect()
    anyaccel.empty_cache(device)
    anyaccel.synchronize(device)
    anyaccel.reset_peak_memory(device)
    used = anyaccel.memory(device).used_bytes
    generator = torch.Generator().manual_seed(7)
    start = time.perf_counter()
    latents = pipe(**{**call, "generator": generator}, callback_on_step_end=record_step).images
    steps = [after - before for before, after in itertools.pairwise(ends)]
    figures = {
        "first_step_s": round(ends[0] - start, 3),
        "step_s": round(statistics.median(steps), 4),
        "steps_s": [round(step, 4) for step in steps],
        "peak_bytes": anyaccel.max_memory(device),
        "held_before_bytes": used,
        "held_after_bytes": anyaccel.memory(device).used_bytes,
    }
    return figures, latents.detach().to("cpu", torch.float32)


def run_method(pipe: Any, device: str, call: dict[str, Any], method: str, dtype: str) -> tuple[dict[str, Any], Any]:
    """Return the row of one method and its latents."""
    start = time.perf_counter()
    if method == PLACED:
        placed = place(pipe, device, dtype=dtype, memory="layer", vae_tiling=False, check_finite=False)
        row: dict[str, Any] = {"setup_s": round(time.perf_counter() - start, 1)}
        figures, latents = measure(placed, device, call)
        forecast = placed.plan.report.forecast
        row["rule"] = str(placed.plan.memory_in_use)
        row["predicted_bytes"] = dict(forecast.phases).get("denoise") if forecast else None
        place(pipe, "cpu")
        return row | figures, latents
    offload(pipe, anyaccel.open_device(device).torch_device, METHODS[method])
    row = {"setup_s": round(time.perf_counter() - start, 1)}
    figures, latents = measure(pipe, device, call)
    return row | figures, latents


def run_model(name: str, options: argparse.Namespace, ends_at: float) -> Iterator[dict[str, Any]]:
    """Yield the rows of one model; an error is a row too."""
    pipe, call = build(name, options.device, options.tiny)
    dtype = "float32" if options.tiny else str(CASES[name].dtype)
    pipe.set_progress_bar_config(disable=True)
    reference = None
    for method in options.ways:
        row: dict[str, Any] = {"model": TINY[name] if options.tiny else CASES[name].title, "way": method}
        if time.perf_counter() > ends_at:
            yield row | {"error": f"skipped: the limit of {options.limit} s is reached"}
            continue
        try:
            figures, latents = run_method(pipe, options.device, call, method, dtype)
            reference = latents if reference is None else reference
            row |= figures | {
                "finite": bool(latents.isfinite().all()),
                "same": torch.equal(latents.nan_to_num(), reference.nan_to_num()),
                "off": float((latents - reference).nan_to_num().abs().max()),
            }
        except Exception as error:  # noqa: BLE001 - a method that fails is a result
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        if method != PLACED:
            remove_offloading(pipe)
        yield row


def main() -> None:
    """Run the models and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device")
    parser.add_argument("--models", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--ways", nargs="*", choices=[*METHODS, PLACED], default=[*METHODS, PLACED])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--virtual", action="store_true")
    parser.add_argument("--limit", type=float, default=210.0)
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.virtual:
        anyaccel.virtual(options.device).__enter__()
    opened = anyaccel.open_device(options.device)
    report: dict[str, Any] = {
        "what": "seconds per step and peak memory while weights are streamed to the device, random weights",
        "device": opened.driver.device_name(opened.index),
        "evidence": "virtual" if options.virtual else "hardware",
        "tiny": options.tiny,
        "date": datetime.now(timezone.utc).date().isoformat(),
        **describe_run(options.commit or read_commit()),
        "diffusers": diffusers.__version__,
        "rows": [],
    }
    ends_at = time.perf_counter() + options.limit
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"streaming_{opened.sheet.name}{'_tiny' if options.tiny else ''}.json"
    for name in options.models:
        for row in run_model(name, options, ends_at):
            report["rows"].append(row)
            path.write_text(json.dumps(report, indent=1) + "\n")
            print(row, flush=True)


if __name__ == "__main__":
    main()
