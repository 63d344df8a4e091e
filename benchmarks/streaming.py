"""Streaming weights to a device: accelerate's sequential offload and diffusers' group offloading, side by side.

    python -m benchmarks.streaming cuda                        full size, random weights, without text encoders
    python -m benchmarks.streaming hpu --tiny --virtual        tiny pipelines on a virtual device, to test this script
    python -m benchmarks.streaming cuda --ways "sequential" "leaf, stream" --models sdxl

Writes benchmarks/results/streaming_DEVICE.json: for each model and way the seconds per step, the device's peak memory,
what `memory="layer"` predicts, and how far the latents are from those of the first way. Rows that would start after
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
"""The first one finds the order of the layers; the others count."""
SIDE = {"height": 1024, "width": 1024}
WORKS = {
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
WAYS: dict[str, dict[str, Any] | None] = {
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
    work = BenchCase.from_dict({**WORKS[name].to_dict(), "device": device})
    pipe = make_pipeline(work, "stock eager")
    call = make_call(work, pipe)
    pipe.to("cpu", silence_dtype_warnings=True)
    anyaccel.empty_cache(device)
    return pipe, {**call, "output_type": "latent", "num_inference_steps": STEPS}


def offload(pipe: Any, device: torch.device, options: dict[str, Any] | None) -> None:
    """Let a stock pipeline stream its weights in one way."""
    if options is None:
        pipe.enable_sequential_cpu_offload(device=device)
    else:
        pipe.enable_group_offload(device, **options)


def bring_back(pipe: Any) -> None:
    """Remove the hooks of any way; the weights are in host memory again."""
    pipe.remove_all_hooks()
    for model in [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]:
        registry = HookRegistry.check_if_exists_or_initialize(model)
        for hook in HOOKS:
            registry.remove_hook(hook, recurse=True)
        for part in model.modules():
            vars(part).pop("_diffusers_hook", None)
            if not hasattr(type(part), "_hf_hook"):
                vars(part).pop("forward", None)
    pipe.to("cpu", silence_dtype_warnings=True)
    gc.collect()


def measure(pipe: Any, device: str, call: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the figures of one call, and its latents."""
    ends: list[float] = []

    def note(*args: Any) -> dict[str, Any]:
        anyaccel.synchronize(device)
        ends.append(time.perf_counter())
        return {}

    gc.collect()
    anyaccel.empty_cache(device)
    anyaccel.synchronize(device)
    anyaccel.reset_peak_memory(device)
    held = anyaccel.memory(device).used_bytes
    generator = torch.Generator().manual_seed(7)
    started = time.perf_counter()
    latents = pipe(**{**call, "generator": generator}, callback_on_step_end=note).images
    steps = [after - before for before, after in itertools.pairwise(ends)]
    figures = {
        "first_step_s": round(ends[0] - started, 3),
        "step_s": round(statistics.median(steps), 4),
        "steps_s": [round(step, 4) for step in steps],
        "peak_bytes": anyaccel.max_memory(device),
        "held_before_bytes": held,
        "held_after_bytes": anyaccel.memory(device).used_bytes,
    }
    return figures, latents.detach().to("cpu", torch.float32)


def run_way(pipe: Any, device: str, call: dict[str, Any], way: str, dtype: str) -> tuple[dict[str, Any], Any]:
    """Return the row of one way and its latents."""
    started = time.perf_counter()
    if way == PLACED:
        placed = place(pipe, device, dtype=dtype, memory="layer", vae_tiling=False, check_finite=False)
        row: dict[str, Any] = {"setup_s": round(time.perf_counter() - started, 1)}
        figures, latents = measure(placed, device, call)
        forecast = placed.plan.report.forecast
        row["rule"] = str(placed.plan.memory_in_use)
        row["predicted_bytes"] = dict(forecast.phases).get("denoise") if forecast else None
        place(pipe, "cpu")
        return row | figures, latents
    offload(pipe, anyaccel.open_device(device).torch_device, WAYS[way])
    row = {"setup_s": round(time.perf_counter() - started, 1)}
    figures, latents = measure(pipe, device, call)
    return row | figures, latents


def run_model(name: str, options: argparse.Namespace, ends_at: float) -> Iterator[dict[str, Any]]:
    """Yield the rows of one model; an error is a row, too."""
    pipe, call = build(name, options.device, options.tiny)
    dtype = "float32" if options.tiny else str(WORKS[name].dtype)
    pipe.set_progress_bar_config(disable=True)
    reference = None
    for way in options.ways:
        row: dict[str, Any] = {"model": TINY[name] if options.tiny else WORKS[name].title, "way": way}
        if time.perf_counter() > ends_at:
            yield row | {"error": f"left out: {options.limit} s are over"}
            continue
        try:
            figures, latents = run_way(pipe, options.device, call, way, dtype)
            reference = latents if reference is None else reference
            row |= figures | {
                "finite": bool(latents.isfinite().all()),
                "same": torch.equal(latents.nan_to_num(), reference.nan_to_num()),
                "off": float((latents - reference).nan_to_num().abs().max()),
            }
        except Exception as error:  # noqa: BLE001 - a way that fails is a result
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        if way != PLACED:
            bring_back(pipe)
        yield row


def main() -> None:
    """Run the models and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device")
    parser.add_argument("--models", nargs="*", choices=WORKS, default=list(WORKS))
    parser.add_argument("--ways", nargs="*", choices=[*WAYS, PLACED], default=[*WAYS, PLACED])
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
