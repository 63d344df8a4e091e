"""All that something compiled depends on, as a key that two machines of one kind have in common."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from anyaccel.runtime.introspection import find_models
from anyaccel.runtime.placement_state import Placement

__all__ = ["find_versions", "make_cache_key"]


def make_cache_key(pipe: Any, placement: Placement, shape: str) -> dict[str, str]:
    """All that what was compiled depends on."""
    plan = placement.plan
    models = find_models(pipe)
    compiled = placement.report.compiled_models
    names = compiled.value if compiled is not None else ()
    structure = {name: _describe_model(models[name]) for name in names if name in models}
    return {
        "pipeline": plan.pipeline,
        "structure": hashlib.sha256(json.dumps(structure, sort_keys=True, default=str).encode()).hexdigest()[:16],
        "shape": shape,
        "dtype": plan.dtype.value,
        "how": f"{plan.compile_policy.value.region}; {plan.compiler.value}",
        "with": f"fusions {plan.fusions}; channels last {plan.channels_last}; in {plan.quantization}",
        "attention": str(plan.attention),
        "device": placement.opened.driver.device_name(placement.opened.index),
        **find_versions(),
    }


def find_versions() -> dict[str, str]:
    """The versions that compiled things hold for; empty where a library is not there."""
    found = {}
    for name in ("anyaccel", "torch", "triton", "diffusers", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def _describe_model(model: Any) -> dict[str, Any]:
    """A model's class, its config, and the shapes of its weights, which adapters add to."""
    weights = hashlib.sha256()
    for name, parameter in model.named_parameters():
        weights.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
    return {"class": type(model).__name__, "config": dict(getattr(model, "config", {})), "weights": weights.hexdigest()}
