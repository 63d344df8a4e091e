"""Program that each rank runs: every case on one rank, then split across both.

`torchrun --nproc-per-node 2 program.py DEVICE FOLDER CASE…` writes `FOLDER/RANK.json` with a result per case.
"""

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.utils import logging as diffusers_logging

import anyaccel
from anyaccel.planning import parallel as parallel_planning
from anyaccel.recipes import recipes
from anyaccel.recipes import run as run_recipe

RANK = int(os.environ["RANK"])
DEVICE = sys.argv[1]
Case = Callable[[], dict[str, Any]]


def place(name: str, **options: Any) -> Any:
    return anyaccel.place(recipes()[name].make(), DEVICE, dtype="fp32", **options)


def generate(name: str, **options: Any) -> Any:
    return run_recipe(recipes()[name], place(name, **options))


def largest_difference(first: Any, second: Any) -> float:
    return float(np.abs(np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)).max())


def split(name: str, parallel: str, **options: Any) -> dict[str, Any]:
    """Compare the split image with that of one rank, and record the rows, tokens and weights of this rank."""
    expected = generate(name)
    pipe = place(name, parallel=parallel, **options)
    denoiser = getattr(pipe, "transformer", None) or pipe.unet
    rows, tokens = set(), set()
    for module in denoiser.modules():
        if isinstance(module, torch.nn.Linear) and "DTensor" not in type(module.weight).__name__:
            module.register_forward_pre_hook(lambda _, args: tokens.add(tuple(args[0].shape)))
            module.register_forward_pre_hook(lambda _, args: rows.add(args[0].shape[0]))
    image = run_recipe(recipes()[name], pipe)
    weights = [getattr(parameter, "_local_tensor", parameter).numel() for parameter in denoiser.parameters()]
    return {
        "difference": largest_difference(expected, image),
        "spread": float(np.std(expected)),
        "plan": str(pipe.plan.parallel),
        "reason": pipe.plan.parallel.reason,
        "compile_policy": str(pipe.plan.compile_policy),
        "device": str(pipe.plan.device),
        "rows": sorted(rows),
        "tokens": sorted({shape[1] for shape in tokens if len(shape) == 3}),
        "weights": sum(weights),
        "all_weights": sum(parameter.numel() for parameter in denoiser.parameters()),
        "sum": float(np.asarray(image, dtype=np.float64).sum()),
    }


def reject(name: str, parallel: str, **options: Any) -> dict[str, Any]:
    pipe: Any = recipes()[name].make()
    try:
        anyaccel.place(pipe, DEVICE, dtype="fp32", parallel=parallel, **options)
        run_recipe(recipes()[name], pipe)
    except anyaccel.errors.UsageError as error:
        return {"message": error.message, "hint": error.hint, "moved": pipe.device.type != "cpu"}
    return {}


def run_flux(pipe: Any, **more: Any) -> Any:
    call = {name: value for name, value in recipes()["flux"].call().items() if name != "generator"}
    return pipe(**call | {"output_type": "pt"} | more).images.cpu().numpy()


def no_seed() -> dict[str, Any]:
    """Run without a seed; the default generators of the ranks have different states."""
    pipe = place("flux", parallel="context:2")
    torch.manual_seed(100 + RANK)
    first, second = run_flux(pipe), run_flux(pipe)
    torch.manual_seed(100)
    expected = run_flux(place("flux"))
    return {
        "sum": float(first.sum()),
        "next": float(second.sum()),
        "difference": largest_difference(first, expected),
    }


def different_seeds() -> dict[str, Any]:
    """Run with seeds and generators that differ between ranks: rank 0 decides."""
    pipe, single = place("flux", parallel="context:2"), place("flux")
    seeded = run_flux(pipe, seed=7 + RANK)
    generated = run_flux(pipe, generator=torch.Generator().manual_seed(7 + RANK))
    return {
        "seed": largest_difference(seeded, run_flux(single, seed=7)),
        "generator": largest_difference(generated, run_flux(single, generator=torch.Generator().manual_seed(7))),
    }


def placed_twice() -> dict[str, Any]:
    """Place again with the same split, which works, and without a split, which raises."""
    pipe = place("flux", parallel="context:2")
    before = run_flux(pipe, seed=3)
    pipe.to(DEVICE)
    after = run_flux(pipe, seed=3)
    try:
        pipe.to(DEVICE, parallel=None)
    except anyaccel.errors.UsageError as error:
        return {"difference": largest_difference(before, after), "message": error.message}
    return {}


def still_fails(name: str, parallel: str = "context:2") -> dict[str, Any]:
    """Check that a split that plans reject because of a diffusers bug still fails."""
    failures = dict(parallel_planning._KNOWN_FAILURES)
    parallel_planning._KNOWN_FAILURES.clear()
    try:
        generate(name, parallel=parallel)
    except RuntimeError as error:
        return {"failed": str(error)}
    finally:
        parallel_planning._KNOWN_FAILURES.update(failures)
    return {}


CASES: dict[str, Case] = {
    "flux context": lambda: split("flux", "context:2"),
    "wan context": lambda: split("wan", "context:2"),
    "uneven context": lambda: split("qwen-image", "context"),
    "one model at a time": lambda: split("flux", "context:2", memory="component"),
    "flux tensor": lambda: split("flux", "tensor:2"),
    "guidance": lambda: split("stable-diffusion", "cfg"),
    "auto flux": lambda: split("flux", "auto"),
    "auto unet": lambda: split("stable-diffusion", "auto"),
    "two experts": lambda: split("wan-two-experts", "context:2"),
    "tensor rejected": lambda: reject("flux", "tensor:2"),
    "no tensor plan": lambda: reject("wan", "tensor:2"),
    "no context plan": lambda: reject("stable-diffusion", "context:2"),
    "wrong count": lambda: reject("flux", "context:4"),
    "attention across rows": lambda: reject("text-to-video-zero", "cfg"),
    "no seed": no_seed,
    "different seeds": different_seeds,
    "placed twice": placed_twice,
    "masks per head": lambda: still_fails("ltx"),
    "attention of the whole batch": lambda: still_fails("stable-diffusion-self-attention-guidance", "cfg"),
    "reference tokens": lambda: still_fails("flux-2-klein-kv"),
}


def main() -> None:
    diffusers_logging.set_verbosity_error()
    logging.getLogger("anyaccel").setLevel(logging.ERROR)
    results = {name: CASES[name]() for name in sys.argv[3:]}
    Path(sys.argv[2], f"{RANK}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
