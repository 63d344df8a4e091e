"""Compiling: `torch.compile` as the device's sheet says, with the plan's repairs made in the graph."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from anyaccel.errors import NotMeasurableError, UnknownComponentError, UsageError, nearest
from anyaccel.planning.compile import CompileRule
from anyaccel.planning.decision import Decision
from anyaccel.planning.plan import Plan
from anyaccel.runtime.placement import Placement, find_components, read_facts
from anyaccel.runtime.request import Request

__all__ = ["compile_components", "compiling", "note_shape"]

_LOG = logging.getLogger("anyaccel")


def compile_components(
    pipe: Any,
    placement: Placement,
    names: Sequence[str] | str | None,
    cache_dir: str | os.PathLike[str] | None,
    fullgraph: bool | None,
) -> None:
    """Compile some models of a pipeline: those that run at every step unless others are named."""
    rule = placement.plan.compile.value
    if not rule.backend:
        raise NotMeasurableError(
            f"no compiler is known for {placement.plan.title}: {placement.plan.compile.reason}",
            hint="run it without compiling",
        )
    chosen = _choose(pipe, names)
    placement.cache_dir = None if cache_dir is None else str(Path(cache_dir).expanduser().absolute())
    if placement.cache_dir and not rule.cache_variable:
        raise UsageError(
            f"where {placement.plan.title} keeps its compiled graphs cannot be chosen", hint="leave cache_dir out"
        )
    whole = rule.fullgraph if fullgraph is None else fullgraph
    with _put_back(rule.cache_variable):
        for name in chosen:
            _compile(pipe, name, placement.plan, whole)
    plan = placement.plan
    done = tuple(dict.fromkeys((*plan.compiled.value, *chosen)))
    kept = f", kept in {placement.cache_dir}" if placement.cache_dir else ""
    placement.plan = replace(plan, compiled=Decision(done, f"asked for: {rule}{kept}"))


def _choose(pipe: Any, names: Sequence[str] | str | None) -> list[str]:
    models = [name for name, part in find_components(pipe).items() if isinstance(part, torch.nn.Module)]
    if names is None:
        return list(read_facts(pipe).denoisers) or models
    asked = [names] if isinstance(names, str) else list(names)
    if asked == ["all"]:
        return models
    for name in asked:
        if name not in models:
            raise UnknownComponentError(f"this pipeline has no model {name!r} to compile", hint=nearest(name, models))
    return asked


def _compile(pipe: Any, name: str, plan: Plan, fullgraph: bool) -> None:
    """Put a compiled model in the place of one; of an autoencoder, whose methods are called, the parts inside."""
    module = getattr(pipe, name)
    if hasattr(module, "_orig_mod"):
        return
    options: dict[str, Any] = {
        "backend": _find_backend(plan),
        "fullgraph": fullgraph,
        "dynamic": False if plan.compile.value.static else None,
    }
    if hasattr(module, "decode") and not hasattr(module, "generate"):
        for part in ("encoder", "decoder"):
            inside = getattr(module, part, None)
            if isinstance(inside, torch.nn.Module):
                setattr(module, part, torch.compile(inside, **options))
        return
    setattr(pipe, name, torch.compile(module, **options))


def _find_backend(plan: Plan) -> Any:
    """The compiler's name, or the compiler behind a pass that puts number types right, where the device lacks some."""
    rule: CompileRule = plan.compile.value
    lacking = {name: instead for name, instead in plan.replacements.value if name == "float64" and instead != "pairs"}
    if not lacking:
        return rule.backend
    types = {getattr(torch, name): getattr(torch, instead) for name, instead in lacking.items()}

    def compile_repaired(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        _replace_types(module, types)
        compile_graph: Any = torch._dynamo.lookup_backend(rule.backend)
        compiled: Callable[..., Any] = compile_graph(module, inputs)
        return compiled

    return compile_repaired


def _replace_types(module: torch.fx.GraphModule, types: dict[torch.dtype, torch.dtype]) -> None:
    """Ask for the type that stands in wherever a graph asks for one that the device lacks."""

    def exchange(value: Any) -> Any:
        return types.get(value, value) if isinstance(value, torch.dtype) else value

    for node in module.graph.nodes:
        if node.op in ("call_function", "call_method"):
            node.args = torch.fx.map_arg(node.args, lambda found: found)
            node.args = tuple(exchange(value) for value in node.args)
            node.kwargs = {name: exchange(value) for name, value in node.kwargs.items()}
            if node.op == "call_method" and node.target == "double" and torch.float64 in types:
                node.target, node.args = "to", (*node.args, types[torch.float64])
    module.recompile()


@contextmanager
def compiling(placement: Placement) -> Iterator[None]:
    """Name the cache folder to the vendor's compiler while the block runs, and put the environment back.

    A compiler that is told nothing may write its own default there: that is put back too.
    """
    variable = placement.plan.compile.value.cache_variable
    if not variable or not (placement.cache_dir or placement.plan.compiled.value):
        yield
        return
    with _put_back(variable):
        if placement.cache_dir:
            os.environ[variable] = placement.plan.compile.value.cache_value.format(placement.cache_dir)
        yield


@contextmanager
def _put_back(variable: str) -> Iterator[None]:
    """Leave one variable of the environment as it was."""
    before = os.environ.get(variable)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before


def note_shape(placement: Placement, request: Request) -> None:
    """A compiled pipeline is about to run at some size: one of its buckets, or a new one, which is compiled."""
    plan = placement.plan
    if not plan.compiled.value:
        return
    size = " × ".join(str(request.arguments[name]) for name in ("height", "width") if request.arguments.get(name))
    bucket = f"{size or 'default size'}, {request.images} image{'s' if request.images != 1 else ''}"
    if bucket in plan.buckets.value:
        return
    if plan.buckets.value and plan.compile.value.static:
        _LOG.warning(
            "anyaccel: %s is a new size for a compiled pipeline, and is compiled now; ready are: %s",
            bucket,
            "; ".join(plan.buckets.value),
        )
    reason = "every size is a graph of its own here" if plan.compile.value.static else "sizes that were run compiled"
    placement.plan = replace(plan, buckets=Decision((*plan.buckets.value, bucket), reason))
