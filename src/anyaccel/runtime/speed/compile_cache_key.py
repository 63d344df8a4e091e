"""Keys for the compile cache, which are equal on machines with the same device and library versions."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from anyaccel.runtime.introspection import find_models
from anyaccel.runtime.placement_state import Placement

__all__ = ["find_versions", "make_cache_key"]


def make_cache_key(pipe: Any, placement: Placement, shape: str) -> dict[str, str]:
    """Return the compile-cache key for a pipeline, which covers everything its compiled code depends on."""
    plan = placement.plan
    models = find_models(pipe)
    compiled = placement.report.compiled_models
    names = compiled.value if compiled is not None else ()
    # Entries are found by a digest of the whole key: a change of a name or text below invalidates all of them.
    structure = {name: _summarize_model(models[name]) for name in names if name in models}
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
    """Return the versions of the libraries that affect compiled code; empty if not installed."""
    # From the package metadata: the packages need not be imported, or even installed.
    versions = {}
    for name in ("anyaccel", "torch", "triton", "diffusers", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = ""
    return versions


def _summarize_model(model: Any) -> dict[str, Any]:
    """Summarize a model by its class, its config, and a hash of its weights' names, shapes and dtypes."""
    # The weights, because LoRA adapters add some without changing the config.
    weights = hashlib.sha256()
    for name, parameter in model.named_parameters():
        weights.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
    return {"class": type(model).__name__, "config": dict(getattr(model, "config", {})), "weights": weights.hexdigest()}
