"""Error of the estimated times of `anyaccel explain` on an H200.

    python -m benchmarks.time_estimate

For each model in benchmarks/results/models_cuda.json that `explain` can trace, the floating-point operations of the
measured call are counted from its configs. The utilization is the share of the H200's published throughput that eager
diffusers reaches. The time of each model is then estimated with the median utilization of the other models. Needs no
device. Writes benchmarks/results/time_estimate_cuda.json, whose results are the constants in planning/time_estimate.py.
"""

import json
import statistics
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import anyaccel
from anyaccel.explanation.call_arguments import CallSize
from anyaccel.explanation.explain import trace_call
from anyaccel.planning.time_estimate import count_flops
from benchmarks.model_cases import CASES
from benchmarks.provenance import describe_run, read_commit

RESULTS = Path(__file__).parent / "results"
SOURCE, RESULT = RESULTS / "models_cuda.json", RESULTS / "time_estimate_cuda.json"
DEVICE, VARIANT = "h200", "stock eager"
# Arguments of the measured calls that change the number of floating-point operations.
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


def measure(row: dict[str, Any], throughput: float) -> dict[str, Any]:
    """Return the operations, the measured time and the utilization of one measured model."""
    case, call = CASES[row["case"]], row["call"]
    # As in the measured calls, embeddings replace the prompts.
    embeds = {name: torch.ones(shape, dtype=choose_dtype(name)) for name, shape in case.embeds.items()}
    prompts = ["prompt", *(["negative_prompt"] if "negative_prompt_embeds" in embeds else [])]
    arguments = {**dict.fromkeys(prompts), **embeds, **{name: call[name] for name in PASSED if name in call}}
    size = None if "width" not in call else (call["width"], call["height"])
    footprint = trace_call(case.model, DEVICE, CallSize(size, call.get("num_frames"), tuple(arguments.items())))
    flops = count_flops(footprint, call["num_inference_steps"], encoders=False)
    seconds = row["variants"][VARIANT]["median_s"]
    return {
        "case": row["case"],
        "steps": call["num_inference_steps"],
        "tflop": round(flops / 1e12, 2),
        "measured_s": seconds,
        "utilization": round(flops / seconds / throughput, 4),
    }


def choose_dtype(name: str) -> torch.dtype:
    """Return the dtype of a prompt embedding or of its mask."""
    return torch.int64 if "mask" in name else torch.bfloat16


def main() -> None:
    """Count, compare, print and write the file."""
    product = anyaccel.sheet("cuda").product(DEVICE)
    throughput = product.half_precision_flops
    assert throughput is not None
    rows, left_out = [], {}
    for row in json.loads(SOURCE.read_text())["rows"]:
        case = CASES[row["case"]]
        if case.pipeline or case.images:
            left_out[row["case"]] = "the pipeline or its input differs from the one that explain traces"
            continue
        try:
            rows.append(measure(row, throughput))
        except anyaccel.AnyaccelError as error:
            left_out[row["case"]] = error.message
    for row in rows:
        others = statistics.median(other["utilization"] for other in rows if other is not row)
        row["estimated_s"] = round(row["tflop"] * 1e12 / throughput / others, 3)
        row["measured_over_estimated"] = round(row["measured_s"] / row["estimated_s"], 3)
    ratios = [row["measured_over_estimated"] for row in rows]
    result = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **describe_run(read_commit()),
        "device": DEVICE,
        "measured": f"{SOURCE.name}, {VARIANT}",
        "throughput_tflops": throughput / 1e12,
        "utilization": round(statistics.median(row["utilization"] for row in rows), 3),
        "measured_over_estimated": {"least": min(ratios), "most": max(ratios)},
        "rows": rows,
        "left_out": left_out,
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
