"""Target of a check: a recipe, a model folder, a function that creates a pipeline, or a pipeline."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anyaccel.checking.error_text import describe_failure
from anyaccel.checking.small_model import make_small_model
from anyaccel.embedded.model import NAME, find_embedded_model
from anyaccel.errors import ModelError, UsageError, nearest
from anyaccel.explanation.known_models import find_bundled_configs, list_bundled_models
from anyaccel.recipes import Recipe, recipes

__all__ = ["CheckTarget", "quantize_target", "read_target"]

_STEPS = 2
# Outputs to request from a modular pipeline; the first one that it has is used.
_OUTPUTS = ("images", "videos", "audio", "latents")


@dataclass(frozen=True, kw_only=True)
class CheckTarget:
    """Pipeline to check: its name, and a recipe to build and call it."""

    name: str
    recipe: Recipe
    notes: tuple[str, ...] = ()


def read_target(target: Any, call: Mapping[str, Any]) -> CheckTarget:
    """Resolve the target passed to `check`; `call` overrides the default pipeline arguments."""
    if not isinstance(target, str | Path):
        return _override_call(_from_pipeline(target), call)
    text = str(find_embedded_model()) if str(target) == NAME else str(target)
    if Path(text).expanduser().is_dir():
        small = make_small_model(Path(text).expanduser())
        return _override_call(CheckTarget(name=str(target), recipe=small.recipe, notes=small.notes), call)
    configs = find_bundled_configs(text)
    if configs is not None:
        small = make_small_model(configs)
        return _override_call(CheckTarget(name=text, recipe=small.recipe, notes=small.notes), call)
    if text in recipes():
        return _override_call(CheckTarget(name=text, recipe=recipes()[text]), call)
    module, colon, function = text.partition(":")
    if colon and not text.startswith("/"):
        return _override_call(_from_factory(text, module, function), call)
    raise ModelError(
        f"{text} is not a model folder, a known model, a recipe or package.module:function",
        hint="pass a folder that contains model_index.json or modular_model_index.json, or package.module:function for "
        f"a function that returns a pipeline; {nearest(text, [*list_bundled_models(), *recipes()])}",
    )


def quantize_target(target: CheckTarget, weights: str | None) -> CheckTarget:
    """Return a target whose pipeline is quantized after it is built, for the CPU and for the device."""
    if weights is None:
        return target
    note = f"the weights are quantized to {weights}, also in the run on the CPU"
    recipe = replace(target.recipe, make=functools.partial(_make_quantized, target.recipe, weights))
    return replace(target, recipe=recipe, notes=(*target.notes, note))


def _make_quantized(recipe: Recipe, weights: str) -> Any:
    from anyaccel.quantized_weights.quantize import read_error
    from anyaccel.runtime.introspection import find_models
    from anyaccel.runtime.placement.quantized_layers import find_models_to_quantize, quantize_models

    pipe: Any = recipe.make()
    quantize_models(find_models_to_quantize(pipe, weights), weights)
    if all(read_error(model) is None for model in find_models(pipe).values()):
        raise UsageError(
            f"{recipe.name} has no layers that weights={weights!r} can quantize",
            hint="use another format, such as int8",
        )
    return pipe


def _override_call(target: CheckTarget, call: Mapping[str, Any]) -> CheckTarget:
    if not call:
        return target
    default_call = target.recipe.call
    return replace(target, recipe=replace(target.recipe, call=lambda: {**default_call(), **call}))


def _from_factory(text: str, module: str, function: str) -> CheckTarget:
    """Import and call a function that creates a pipeline, and return a target for the pipeline.

    The working directory is added to `sys.path` first.
    """
    # The console script does not put the working directory on the path, unlike `python -m`.
    if "" not in sys.path:
        sys.path.insert(0, "")
    with contextlib.redirect_stdout(sys.stderr):  # prints of the user's code must not end up in a JSON report
        try:
            make: Callable[[], Any] = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f"cannot import {text}: {error}", hint="check the module name and the function name"
            ) from error
        except (Exception, SystemExit) as error:
            raise UsageError(
                f"cannot import {module}: {describe_failure(error)}",
                hint=f"fix the module so that `python -c 'import {module}'` works",
            ) from error
        try:
            result = make()
        except (Exception, SystemExit) as error:
            raise UsageError(
                f"{text} raised an error: {describe_failure(error)}",
                hint="fix the function: it must accept no arguments and return a pipeline",
            ) from error
    # The function may also return `(pipe, arguments)`.
    pipe, call = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    return _from_pipeline(pipe, text, call)


def _from_pipeline(pipe: Any, name: str = "", call: Mapping[str, Any] | None = None) -> CheckTarget:
    """Return a target for a pipeline or for modular pipeline blocks.

    Each forked process has its own copy of the pipeline.
    """
    if not hasattr(pipe, "components") and hasattr(pipe, "init_pipeline"):
        pipe = pipe.init_pipeline()
    if not callable(pipe) or not hasattr(pipe, "components"):
        raise UsageError(
            f"expected a diffusers pipeline, got an object of type {type(pipe).__name__}",
            hint="pass a diffusers pipeline, or the folder of a model",
        )
    kind = type(pipe).__name__
    recipe = Recipe(
        name=name or kind,
        pipeline=kind,
        family="",
        make=lambda: pipe,
        call=lambda: {**_default_call(pipe), **(call or {})},
    )
    return CheckTarget(name=name or kind, recipe=recipe)


def _default_call(pipe: Any) -> dict[str, Any]:
    """Return default call arguments (prompt, two steps, fixed seed) that the pipeline accepts."""
    import torch

    arguments: dict[str, Any] = {
        "prompt": "a red fox",
        "num_inference_steps": _STEPS,
        "generator": torch.Generator("cpu").manual_seed(7),
        "output_type": "np",
    }
    blocks = getattr(pipe, "blocks", None)
    if blocks is None:
        parameters = inspect.signature(pipe.__call__).parameters
        return {name: value for name, value in arguments.items() if name in parameters}
    # A modular pipeline accepts the inputs of its blocks, and returns only the output named in the call.
    output = next((name for name in _OUTPUTS if name in blocks.output_names), [*blocks.output_names, ""][-1])
    accepted = {name: value for name, value in arguments.items() if name in blocks.input_names}
    return accepted | ({"output": output} if output else {})
