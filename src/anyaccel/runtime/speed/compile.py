"""Compiling: `torch.compile` as the device's sheet says, with the repairs of `graph_repairs.py` made in the graph."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from anyaccel.errors import NotMeasurableError, UnknownComponentError, UsageError, nearest
from anyaccel.planning.compiler import CompileRule
from anyaccel.planning.decision import Decision
from anyaccel.runtime.call_request import CallRequest, bucket_of
from anyaccel.runtime.introspection import find_components, find_denoisers, find_models, read_facts
from anyaccel.runtime.placement_state import Placement
from anyaccel.runtime.speed.compiled_forward import compile_blocks, compile_forward
from anyaccel.runtime.speed.graph_fusions import fuse
from anyaccel.runtime.speed.graph_workarounds import GraphWorkarounds, read_graph_workarounds
from anyaccel.runtime.speed.module_fingerprint import LayerHooks
from anyaccel.storage.cache_dir import find_graphs_folder, find_write_fault, tell_write_fault
from anyaccel.upstream.torch_internals import find_compiler, find_inductor_cache, is_compiled, set_triton_assembler

__all__ = ["compile_cache_env", "compile_components", "compile_for_speed", "has_decoder", "record_shape"]

_LOG = logging.getLogger("anyaccel")


def compile_components(
    pipe: Any,
    placement: Placement,
    names: Sequence[str] | str | None,
    cache_dir: str | os.PathLike[str] | None,
    fullgraph: bool | None,
) -> None:
    """Compile some models of a pipeline: those that run at every step unless others are named."""
    rule = placement.plan.compiler.value
    if not rule.backend:
        raise NotMeasurableError(
            f"no compiler is known for {placement.plan.title}: {placement.plan.compiler.reason}",
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
            _compile(pipe, name, placement, whole)
    report = placement.report
    names = tuple(dict.fromkeys((*(report.compiled_models.value if report.compiled_models else ()), *chosen)))
    cached = f", cached in {placement.cache_dir}" if placement.cache_dir else ""
    report.compiled_models = Decision(names, f"requested: {rule}{cached}")


def compile_for_speed(pipe: Any, placement: Placement) -> tuple[str, ...]:
    """Compile what takes the time of a picture in place, as the plan says: denoisers, and what decodes."""
    plan = placement.plan
    policy = plan.compile_policy.value
    options = _find_options(placement, plan.compiler.value.fullgraph)
    models: dict[str, Any] = dict(find_models(pipe))
    denoisers = [
        name for name, model in find_denoisers(pipe, placement).items() if not LayerHooks(model).has_foreign_forward()
    ]
    decoders = [
        name
        for name, model in models.items()
        if has_decoder(model) and not LayerHooks(model.decoder).has_foreign_forward()
    ]
    if plan.channels_last.value:
        for name in (*denoisers, *decoders):
            _lay_out_channels_last(models[name])
    for name in denoisers:
        if policy.region == "blocks":
            compile_blocks(models[name], name, options)
        else:
            compile_forward(models[name], name, options)
    for name in decoders:
        compile_forward(models[name].decoder, name, options)
    return (*denoisers, *decoders)


def _lay_out_channels_last(model: torch.nn.Module) -> None:
    """Store the weights of 2-D convolutions channels last; `Module.to` would refuse a model with 3-D ones."""
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, torch.nn.Conv2d)]
    for layer in layers:
        layer.to(memory_format=torch.channels_last)


def has_decoder(model: Any) -> bool:
    """Whether a model decodes by a part of its own that is called so."""
    return hasattr(model, "decode") and isinstance(getattr(model, "decoder", None), torch.nn.Module)


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


def _compile(pipe: Any, name: str, placement: Placement, fullgraph: bool) -> None:
    """Put a compiled model in the place of one; of an autoencoder, whose methods are called, the parts inside."""
    module = getattr(pipe, name)
    if is_compiled(module):
        return
    options = _find_options(placement, fullgraph)
    if hasattr(module, "decode") and not hasattr(module, "generate"):
        for part in ("encoder", "decoder"):
            inside = getattr(module, part, None)
            if isinstance(inside, torch.nn.Module):
                setattr(module, part, torch.compile(inside, **options))
        return
    setattr(pipe, name, torch.compile(module, **options))


def _find_options(placement: Placement, fullgraph: bool) -> dict[str, Any]:
    plan = placement.plan
    rule: CompileRule = plan.compiler.value
    if rule.backend == "inductor":
        set_triton_assembler()
    return {
        "backend": _find_backend(rule.backend, read_graph_workarounds(plan, placement.device), plan.fusions.value),
        "fullgraph": fullgraph,
        "dynamic": False if rule.static else None,
    }


@functools.cache  # graphs are shared among models for as long as their backend is one object
def _find_backend(name: str, workarounds: GraphWorkarounds, fusions: tuple[str, ...]) -> Any:
    """Return the compiler's name, or the compiler behind passes that change a graph first."""
    if not workarounds and not fusions:
        return name

    def compile_changed(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if workarounds:
            workarounds.apply(module)
        if fusions:
            fuse(module, fusions)
        compile_graph = find_compiler(name)
        compiled: Callable[..., Any] = compile_graph(module, inputs)
        return compiled

    return compile_changed


@contextmanager
def compile_cache_env(placement: Placement) -> Iterator[None]:
    """Name the cache folder to the vendor's compiler while the block runs, and put the environment back.

    A compiler that is told nothing may write its own default there: that is put back too.
    """
    variable = placement.plan.compiler.value.cache_variable
    if not variable or not (placement.cache_dir or placement.report.compiled_models):
        yield
        return
    with _put_back(variable):
        folder = placement.cache_dir or _find_own_folder(placement, variable)
        if folder:
            os.environ[variable] = placement.plan.compiler.value.cache_value.format(folder)
        yield


def _find_own_folder(placement: Placement, variable: str) -> str | None:
    """Where graphs are kept that were compiled for speed: beside all else that is kept, unless the user said where."""
    if _was_given(variable) or placement.speed is None or not placement.speed.compiled:
        return None
    folder = find_graphs_folder() / placement.opened.sheet.name
    return str(folder) if _can_write(folder) else None


@functools.cache  # tried once
def _can_write(folder: Path) -> bool:
    """Whether a compiler can keep its graphs in a folder; where not, it keeps them where it does by itself."""
    fault = find_write_fault(folder)
    if fault:
        tell_write_fault(fault)
    return not fault


def _was_given(variable: str) -> bool:
    """Whether the user said where graphs go: torch writes its own default into the variable as it is imported."""
    return os.environ.get(variable) not in (None, find_inductor_cache())


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


def record_shape(placement: Placement, request: CallRequest) -> None:
    """Note the size that a compiled pipeline is about to run at; a new one may be compiled, which takes time."""
    report, rule = placement.report, placement.plan.compiler.value
    if report.compiled_models is None:
        return
    sizes = report.compiled_sizes.value if report.compiled_sizes else ()
    size = bucket_of(request)
    if size in sizes:
        return
    if sizes and rule.static:
        _LOG.warning(
            "anyaccel: %s is a new size for a compiled pipeline, and is compiled now; ready are: %s",
            size,
            "; ".join(sizes),
        )
    reason = "every size is a graph of its own here" if rule.static else "sizes that were run compiled"
    report.compiled_sizes = Decision((*sizes, size), reason)
