"""Keys for the compile cache, which are equal on machines with the same device and library versions."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
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
        "workarounds": f"{plan.workarounds}; dtypes {plan.replacements}",
        "code": _hash_code([models[name] for name in names if name in models]),
        "device": placement.opened.driver.device_name(placement.opened.index),
        **find_versions(),
    }


def find_versions() -> dict[str, str]:
    """Return the versions of the libraries that affect compiled code; empty if not installed."""
    # From the package metadata: the packages need not be imported, or even installed.
    versions = {"python": platform.python_version()}
    for name in ("anyaccel", "torch", "triton", "diffusers", "transformers", "peft", "torchao"):
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


def _hash_code(models: list[Any]) -> str:
    """Hash the source files of anyaccel's runtime and of the models' layers.

    Code in an editable install or in a user's project changes without a new version.
    """
    folder = Path(__file__).parent.parent
    runtime = {path.relative_to(folder).as_posix(): path for path in folder.glob("**/*.py")}
    sources = {base.__module__ for model in models for layer in model.modules() for base in type(layer).__mro__}
    # torch is left out: its version includes the commit, and its compiler checks its own code.
    files = {name: _find_file(name) for name in sources if name.partition(".")[0] != "torch"}
    digest = hashlib.sha256()
    for name, path in sorted({**runtime, **files}.items()):
        digest.update(name.encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest() if path is not None and path.is_file() else b"-")
    return digest.hexdigest()[:16]


def _find_file(module: str) -> Path | None:
    """Return the source file of an imported Python module, or None if it has none."""
    path = getattr(sys.modules.get(module), "__file__", None)
    return Path(path) if path else None
