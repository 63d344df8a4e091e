"""Error of the estimated times of `anyaccel explain`.

    python -m benchmarks.time_estimate

The work of each model in benchmarks/results/models_cuda.json that `explain` can trace is counted from its configs.
The share of the H200's published throughput and the time per kernel are fitted to the measured times in eager mode,
and each model is also estimated from a fit to the others. The last table compares times that others published for
other products with estimates from the same two constants. Needs no device. Writes
benchmarks/results/time_estimate_cuda.json, whose results are the constants in planning/time_estimate.py.
"""

import itertools
import json
import math
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import anyaccel
from anyaccel.explanation.call_arguments import CallSize
from anyaccel.explanation.explain import trace_call
from anyaccel.planning.footprint import Work
from anyaccel.planning.time_estimate import count_work
from benchmarks.model_cases import CASES, MODELS
from benchmarks.provenance import describe_run, read_commit

RESULTS = Path(__file__).parent / "results"
SOURCE, RESULT = RESULTS / "models_cuda.json", RESULTS / "time_estimate_cuda.json"
DEVICE, VARIANT = "h200", "stock eager"
# Arguments of the measured calls that change the work.
PASSED = (
    "guidance_scale",
    "true_cfg_scale",
    "audio_guidance_scale",
    "stg_scale",
    "audio_stg_scale",
    "modality_scale",
    "audio_modality_scale",
    "use_resolution_binning",
    "negative_prompt",
)
SD, SDXL, SQUARE = "stable-diffusion-v1-5/stable-diffusion-v1-5", "stabilityai/sdxl-turbo", CallSize((1024, 1024))
WAN = str(MODELS / "wan2.1-t2v-1.3b")
# Seconds with PyTorch in eager mode that others published: model, size, steps, product, seconds, source.
PUBLISHED = (
    (SD, CallSize((512, 512)), 50, "rtx4090", 51 / 24.9, "https://github.com/chengzeyi/stable-fast (24.9 it/s)"),
    (SDXL, SQUARE, 20, "rtx4090", 3.23, "https://github.com/siliconflow/onediff/pull/998"),
    (SDXL, SQUARE, 20, "rtx3090", 5.60, "https://github.com/siliconflow/onediff/pull/998"),
    (SDXL, SQUARE, 30, "a100-80gb", 3.315, "https://huggingface.co/datasets/sayakpaul/sample-datasets"),
    ("black-forest-labs/FLUX.2-klein-4B", SQUARE, 4, "rtx5090", 0.970, "https://github.com/vipshop/cache-dit"),
    ("black-forest-labs/FLUX.1-schnell", SQUARE, 28, "h100", 6.573, "https://github.com/sayakpaul/diffusers-torchao"),
    (WAN, CallSize((832, 480), 81), 50, "rtx4090", 240, "https://github.com/Wan-Video/Wan2.1 (about 4 minutes)"),
)
UTILIZATIONS = [share / 100 for share in range(35, 96)]
KERNEL_SECONDS = [microseconds * 1e-6 for microseconds in range(61)]
Constants = tuple[float, float]


def estimate(work: Work, product: str, constants: Constants) -> float:
    """Return the estimated seconds, given the share of the throughput and the seconds per kernel."""
    facts = anyaccel.sheet("cuda").product(product)
    assert facts.half_precision_flops is not None
    assert facts.memory_bytes_per_s is not None
    share, kernel_s = constants
    computing_s = work.flops / (facts.half_precision_flops * share)
    return computing_s + work.traffic_bytes / facts.memory_bytes_per_s + work.kernels * kernel_s


def fit(rows: list[tuple[Work, float]]) -> Constants:
    """Return the constants with the smallest squared logarithmic error."""

    def count_error(constants: Constants) -> float:
        return sum(math.log(seconds / estimate(work, DEVICE, constants)) ** 2 for work, seconds in rows)

    return min(itertools.product(UTILIZATIONS, KERNEL_SECONDS), key=count_error)


def measure(row: dict[str, Any]) -> Work:
    """Return the work of one measured model."""
    case, call = CASES[row["case"]], row["call"]
    # As in the measured calls, embeddings replace the prompts.
    embeds = {name: torch.ones(shape, dtype=choose_dtype(name)) for name, shape in case.embeds.items()}
    prompts = ["prompt", *(["negative_prompt"] if "negative_prompt_embeds" in embeds else [])]
    arguments = {**dict.fromkeys(prompts), **embeds, **{name: call[name] for name in PASSED if name in call}}
    size = None if "width" not in call else (call["width"], call["height"])
    footprint = trace_call(case.model, DEVICE, CallSize(size, call.get("num_frames"), tuple(arguments.items())))
    return count_work(footprint, call["num_inference_steps"], encoders=False)


def choose_dtype(name: str) -> torch.dtype:
    """Return the dtype of a prompt embedding or of its mask."""
    return torch.int64 if "mask" in name else torch.bfloat16


def compare_published(constants: Constants) -> list[dict[str, Any]]:
    """Return the published times of other products with their estimates."""
    rows = []
    for model, size, steps, product, seconds, source in PUBLISHED:
        estimated_s = estimate(count_work(trace_call(model, DEVICE, size), steps), product, constants)
        name = Path(model).name
        rows.append({"model": name, "size": str(size), "steps": steps, "product": product, "published_s": seconds,
                     "source": source, **compare(seconds, estimated_s)})  # fmt: skip
    return rows


def compare(seconds: float, estimated_s: float) -> dict[str, float]:
    """Return an estimate and its ratio to a measured time."""
    return {"estimated_s": round(estimated_s, 3), "measured_over_estimated": round(seconds / estimated_s, 3)}


def main() -> None:
    """Count, fit, compare, print and write the file."""
    works, left_out = {}, {}
    measured = {row["case"]: row for row in json.loads(SOURCE.read_text())["rows"]}
    for name, row in measured.items():
        if CASES[name].pipeline or CASES[name].images:
            left_out[name] = "the pipeline or its input differs from the one that explain traces"
            continue
        works[name] = (measure(row), row["variants"][VARIANT]["median_s"])
    constants = fit(list(works.values()))
    rows = []
    for name, (work, seconds) in works.items():
        others = fit([value for other, value in works.items() if other != name])
        counts = {key: round(value, 3) for key, value in asdict(work * 1e-12).items() if key != "kernels"}
        rows.append({"case": name, "steps": measured[name]["call"]["num_inference_steps"], "tflop": counts["flops"],
                     "traffic_tb": counts["traffic_bytes"], "kernels": round(work.kernels), "measured_s": seconds,
                     **compare(seconds, estimate(work, DEVICE, others))})  # fmt: skip
    ratios = [float(row["measured_over_estimated"]) for row in rows]
    result = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **describe_run(read_commit()),
        "device": DEVICE,
        "measured": f"{SOURCE.name}, {VARIANT}",
        "utilization": constants[0],
        "seconds_per_kernel": constants[1],
        "measured_over_estimated": {"least": min(ratios), "most": max(ratios)},
        "rows": rows,
        "left_out": left_out,
        "published": compare_published(constants),
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
