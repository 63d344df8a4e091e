"""What is checked: a recipe, a folder's architecture built small, a function that makes a pipeline, or a pipeline."""

from __future__ import annotations

import contextlib
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
from anyaccel.explanation.known_models import described_models, find_description
from anyaccel.recipes import Recipe, recipes

__all__ = ["CheckTarget", "read_target"]

_STEPS = 2
_OUTPUTS = ("images", "videos", "audio", "latents")
"""What a modular pipeline is asked for, the first that it has."""


@dataclass(frozen=True, kw_only=True)
class CheckTarget:
    """Something to check: what it is called, how it is made and called."""

    name: str
    recipe: Recipe
    notes: tuple[str, ...] = ()


def read_target(what: Any, call: Mapping[str, Any]) -> CheckTarget:
    """Find out what is meant; `call` goes over the arguments that it would be called with."""
    if not isinstance(what, str | Path):
        return _change_call(_from_pipeline(what), call)
    text = str(find_embedded_model()) if str(what) == NAME else str(what)
    if Path(text).expanduser().is_dir():
        small = make_small_model(Path(text).expanduser())
        return _change_call(CheckTarget(name=str(what), recipe=small.recipe, notes=small.notes), call)
    described = find_description(text)
    if described is not None:
        small = make_small_model(described)
        return _change_call(CheckTarget(name=text, recipe=small.recipe, notes=small.notes), call)
    if text in recipes():
        return _change_call(CheckTarget(name=text, recipe=recipes()[text]), call)
    module, colon, function = text.partition(":")
    if colon and not text.startswith("/"):
        return _change_call(_from_factory(text, module, function), call)
    raise ModelError(
        f"{text} is no folder, no recipe and no package.module:function",
        hint=f"give a folder with a model_index.json, or a function that makes a pipeline; "
        f"{nearest(text, [*described_models(), *recipes()])}",
    )


def _change_call(subject: CheckTarget, call: Mapping[str, Any]) -> CheckTarget:
    if not call:
        return subject
    before = subject.recipe.call
    return replace(subject, recipe=replace(subject.recipe, call=lambda: {**before(), **call}))


def _from_factory(text: str, module: str, function: str) -> CheckTarget:
    """A function of somebody's, imported from where the command was given."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    with contextlib.redirect_stdout(sys.stderr):  # what it prints is no part of a report
        try:
            make: Callable[[], Any] = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f"{text} cannot be imported: {error}", hint="is the module on the path, and the name right?"
            ) from error
        except (Exception, SystemExit) as error:
            raise UsageError(f"{module} fails as it is imported: {describe_failure(error)}", hint="mend it") from error
        try:
            made = make()
        except (Exception, SystemExit) as error:
            raise UsageError(
                f"{text} fails: {describe_failure(error)}", hint="it is called with nothing, and gives a pipeline"
            ) from error
    pipe, call = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    return _from_pipeline(pipe, text, call)


def _from_pipeline(pipe: Any, name: str = "", call: Mapping[str, Any] | None = None) -> CheckTarget:
    """A pipeline that exists, or the blocks of one; each process has a copy of it of its own."""
    if not hasattr(pipe, "components") and hasattr(pipe, "init_pipeline"):
        pipe = pipe.init_pipeline()
    if not callable(pipe) or not hasattr(pipe, "components"):
        raise UsageError(f"{type(pipe).__name__} is no pipeline", hint="give a pipeline of diffusers, or its folder")
    kind = type(pipe).__name__
    recipe = Recipe(
        name=name or kind,
        pipeline=kind,
        family="",
        make=lambda: pipe,
        call=lambda: {**_plain_call(pipe), **(call or {})},
    )
    return CheckTarget(name=name or kind, recipe=recipe)


def _plain_call(pipe: Any) -> dict[str, Any]:
    """Two steps of a prompt with a fixed seed, as far as the pipeline takes those."""
    import torch

    wanted: dict[str, Any] = {
        "prompt": "a red fox",
        "num_inference_steps": _STEPS,
        "generator": torch.Generator("cpu").manual_seed(7),
        "output_type": "np",
    }
    blocks = getattr(pipe, "blocks", None)
    if blocks is None:
        takes = inspect.signature(pipe.__call__).parameters
        return {name: value for name, value in wanted.items() if name in takes}
    # A modular pipeline takes what its blocks take, and gives what it is asked for.
    gives = next((name for name in _OUTPUTS if name in blocks.output_names), [*blocks.output_names, ""][-1])
    taken = {name: value for name, value in wanted.items() if name in blocks.input_names}
    return taken | ({"output": gives} if gives else {})
