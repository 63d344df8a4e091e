"""What each rank runs: every case in turn, alone and then shared with the other rank.

`torchrun --nproc-per-node 2 program.py DEVICE FOLDER CASE…` leaves `FOLDER/RANK.json`: a finding for each case.
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
from diffusers.utils import logging as of_diffusers

import anyaccel
from anyaccel.planning import parallel as deciding
from anyaccel.recipes import recipes
from anyaccel.recipes import run as run_recipe

RANK = int(os.environ["RANK"])
DEVICE = sys.argv[1]
Case = Callable[[], dict[str, Any]]


def place(name: str, **options: Any) -> Any:
    return anyaccel.place(recipes()[name].make(), DEVICE, dtype="fp32", **options)


def make(name: str, **options: Any) -> Any:
    return run_recipe(recipes()[name], place(name, **options))


def apart(one: Any, other: Any) -> float:
    return float(np.abs(np.asarray(one, dtype=np.float64) - np.asarray(other, dtype=np.float64)).max())


def split(name: str, parallel: str, **options: Any) -> dict[str, Any]:
    """A picture alone and shared: how far apart they are, and what a rank had of the model while it ran."""
    alone = make(name)
    pipe = place(name, parallel=parallel, **options)
    denoiser = getattr(pipe, "transformer", None) or pipe.unet
    rows, tokens = set(), set()
    for module in denoiser.modules():
        if isinstance(module, torch.nn.Linear) and "DTensor" not in type(module.weight).__name__:
            module.register_forward_pre_hook(lambda _, args: tokens.add(tuple(args[0].shape)))
            module.register_forward_pre_hook(lambda _, args: rows.add(args[0].shape[0]))
    shared = run_recipe(recipes()[name], pipe)
    weights = [getattr(one, "_local_tensor", one).numel() for one in denoiser.parameters()]
    return {
        "apart": apart(alone, shared),
        "spread": float(np.std(alone)),
        "plan": str(pipe.plan.parallel),
        "reason": pipe.plan.parallel.reason,
        "compiling": str(pipe.plan.compile_policy),
        "device": str(pipe.plan.device),
        "rows": sorted(rows),
        "tokens": sorted({shape[1] for shape in tokens if len(shape) == 3}),
        "weights": sum(weights),
        "all_weights": sum(one.numel() for one in denoiser.parameters()),
        "sum": float(np.asarray(shared, dtype=np.float64).sum()),
    }


def refuse(name: str, parallel: str, **options: Any) -> dict[str, Any]:
    pipe: Any = recipes()[name].make()
    try:
        anyaccel.place(pipe, DEVICE, dtype="fp32", parallel=parallel, **options)
        run_recipe(recipes()[name], pipe)
    except anyaccel.errors.UsageError as error:
        return {"message": error.message, "hint": error.hint, "moved": pipe.device.type != "cpu"}
    return {}


def latents(pipe: Any, **more: Any) -> Any:
    call = {name: value for name, value in recipes()["flux"].call().items() if name != "generator"}
    return pipe(**call | {"output_type": "pt"} | more).images.cpu().numpy()


def no_seed() -> dict[str, Any]:
    """Nobody names a seed, and each rank's own generator stands elsewhere."""
    pipe = place("flux", parallel="context:2")
    torch.manual_seed(100 + RANK)
    first, second = latents(pipe), latents(pipe)
    torch.manual_seed(100)
    alone = latents(place("flux"))
    return {"sum": float(first.sum()), "next": float(second.sum()), "apart": apart(first, alone)}


def other_seeds() -> dict[str, Any]:
    """Seeds and generators that differ between ranks: those of rank 0 hold."""
    pipe, alone = place("flux", parallel="context:2"), place("flux")
    seeded = latents(pipe, seed=7 + RANK)
    generated = latents(pipe, generator=torch.Generator().manual_seed(7 + RANK))
    return {
        "seed": apart(seeded, latents(alone, seed=7)),
        "generator": apart(generated, latents(alone, generator=torch.Generator().manual_seed(7))),
    }


def placed_twice() -> dict[str, Any]:
    """Placed again as before it runs on; placed in another way it cannot be."""
    pipe = place("flux", parallel="context:2")
    before = latents(pipe, seed=3)
    pipe.to(DEVICE)
    after = latents(pipe, seed=3)
    try:
        pipe.to(DEVICE, parallel=None)
    except anyaccel.errors.UsageError as error:
        return {"apart": apart(before, after), "message": error.message}
    return {}


def still_fails(name: str, parallel: str = "context:2") -> dict[str, Any]:
    """Whether what a plan refuses for diffusers' sake still fails there."""
    kept = dict(deciding._KNOWN_FAILURES)
    deciding._KNOWN_FAILURES.clear()
    try:
        make(name, parallel=parallel)
    except RuntimeError as error:
        return {"failed": str(error)}
    finally:
        deciding._KNOWN_FAILURES.update(kept)
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
    "tensor refused": lambda: refuse("flux", "tensor:2"),
    "no tensor plan": lambda: refuse("wan", "tensor:2"),
    "no context plan": lambda: refuse("stable-diffusion", "context:2"),
    "wrong count": lambda: refuse("flux", "context:4"),
    "rows that see one another": lambda: refuse("text-to-video-zero", "cfg"),
    "no seed": no_seed,
    "other seeds": other_seeds,
    "placed twice": placed_twice,
    "masks of heads": lambda: still_fails("ltx"),
    "attention of a batch": lambda: still_fails("stable-diffusion-self-attention-guidance", "cfg"),
    "reference tokens": lambda: still_fails("flux-2-klein-kv"),
}


def main() -> None:
    of_diffusers.set_verbosity_error()
    logging.getLogger("anyaccel").setLevel(logging.ERROR)
    found = {name: CASES[name]() for name in sys.argv[3:]}
    Path(sys.argv[2], f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
