"""Compilation of models with the device's `torch.compile` backend and its graph workarounds."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from anyaccel.errors import NotMeasurableError, UnknownComponentError, UsageError, nearest
from anyaccel.planning.compiler import CompileRule
from anyaccel.planning.decision import Decision
from anyaccel.runtime.call_request import CallRequest, bucket_of
from anyaccel.runtime.introspection import find_components, find_denoisers, find_models, list_denoisers
from anyaccel.runtime.module_fingerprint import LayerHooks
from anyaccel.runtime.placement_state import Placement
from anyaccel.runtime.speed.compiled_forward import compile_blocks, compile_forward
from anyaccel.runtime.speed.compiled_model_workarounds import GraphWorkarounds, read_graph_workarounds
from anyaccel.runtime.speed.graph_fusions import fuse
from anyaccel.runtime.speed.graph_rewrites import fold_cpu_constants, keep_rounding, replace_fill_diagonal
from anyaccel.storage.cache_dir import find_graphs_folder, find_write_error, warn_not_cached
from anyaccel.upstream.torch_compile_internals import (
    draw_like_eager,
    find_compiler,
    find_inductor_cache,
    is_compiled,
    set_ptxas_path,
)
from anyaccel.upstream.torch_internals import is_storage_shared

__all__ = ["compile_cache_env", "compile_components", "compile_for_speed", "has_decoder", "record_shape"]

_LOG = logging.getLogger("anyaccel")


def compile_components(
    pipe: Any,
    placement: Placement,
    names: Sequence[str] | str | None,
    cache_dir: str | os.PathLike[str] | None,
    fullgraph: bool | None,
) -> None:
    """Compile the named models of a pipeline; if `names` is None, compile the denoisers.

    Raise an error if the device has no compiler or does not support `cache_dir`.
    """
    rule = placement.plan.compiler.value
    if not rule.backend:
        raise NotMeasurableError(
            f"no compiler is available for {placement.plan.title}: {placement.plan.compiler.reason}",
            hint="run the pipeline without enable_compile()",
        )
    selected = _select_models(pipe, names)
    placement.cache_dir = None if cache_dir is None else str(Path(cache_dir).expanduser().absolute())
    if placement.cache_dir and not rule.cache_variable:
        raise UsageError(
            f"{placement.plan.title} does not support cache_dir={placement.cache_dir!r}: its compile cache cannot be "
            "moved",
            hint="omit cache_dir",
        )
    fullgraph = rule.fullgraph if fullgraph is None else fullgraph
    with _restore_env(rule.cache_variable):
        for name in selected:
            _compile(pipe, name, placement, fullgraph)
    report = placement.report
    names = tuple(dict.fromkeys((*(report.compiled_models.value if report.compiled_models else ()), *selected)))
    cached = f", cached in {placement.cache_dir}" if placement.cache_dir else ""
    report.compiled_models = Decision(names, f"compilation was requested: {rule}{cached}")


def compile_for_speed(pipe: Any, placement: Placement) -> tuple[str, ...]:
    """Compile the denoisers and decoders in place as planned; return the names of their models."""
    plan = placement.plan
    policy = plan.compile_policy.value
    options = _find_options(placement, plan.compiler.value.fullgraph)
    models: dict[str, Any] = dict(find_models(pipe))
    # Compiled code would bypass a forward that another library has replaced.
    denoisers = [
        name for name, model in find_denoisers(pipe, placement).items() if not LayerHooks(model).has_foreign_forward()
    ]
    decoders = [
        name
        for name, model in models.items()
        if has_decoder(model) and not LayerHooks(model.decoder).has_foreign_forward()
    ]
    if plan.channels_last.value:
        # Not the encoder of an autoencoder, which is not compiled: eager normalization layers convert to the other
        # format and back.
        for module in [models[name] for name in denoisers] + [models[name].decoder for name in decoders]:
            _convert_to_channels_last(module)
    for name in denoisers:
        if policy.region == "blocks":
            compile_blocks(models[name], name, options)
        else:
            compile_forward(models[name], name, options)
    for name in decoders:
        # As one graph, or not at all: with torch 2.11, Wan's decoder becomes 23 graphs, which take longer to compile
        # than its transformer.
        compile_forward(models[name].decoder, name, {**options, "fullgraph": True})
    return (*denoisers, *decoders)


def _convert_to_channels_last(model: torch.nn.Module) -> None:
    """Convert the weights of 2-D convolutions to the channels-last memory format, unless the model is for videos."""
    # Layer by layer, because `model.to(memory_format=…)` would also convert weights that are not of convolutions.
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, torch.nn.Conv2d)]
    if any(isinstance(layer, torch.nn.Conv3d) for layer in model.modules()):
        return  # its 2-D convolutions get contiguous frames from 3-D ones, and would convert each of them
    # In inference mode, the new weights could not be trained.
    with torch.inference_mode(False), torch.no_grad():
        for layer in layers:
            # The user edits weights through tensors that share their memory, such as those of a state dict.
            if not is_storage_shared(layer.weight) and not layer.weight.is_inference():
                layer.to(memory_format=torch.channels_last)


def has_decoder(model: Any) -> bool:
    """Return whether a model has `decode()` and a `decoder` module, as autoencoders do."""
    return hasattr(model, "decode") and isinstance(getattr(model, "decoder", None), torch.nn.Module)


def _select_models(pipe: Any, names: Sequence[str] | str | None) -> list[str]:
    models = [name for name, component in find_components(pipe).items() if isinstance(component, torch.nn.Module)]
    if names is None:
        return list(list_denoisers(pipe)) or models
    requested = [names] if isinstance(names, str) else list(names)
    if requested == ["all"]:
        return models
    for name in requested:
        if name not in models:
            raise UnknownComponentError(f"the pipeline has no model named {name!r}", hint=nearest(name, models))
    return requested


def _compile(pipe: Any, name: str, placement: Placement, fullgraph: bool) -> None:
    """Replace a model, or an autoencoder's encoder and decoder, with a compiled version."""
    module = getattr(pipe, name)
    if is_compiled(module):
        return
    options = _find_options(placement, fullgraph)
    if hasattr(module, "decode") and not hasattr(module, "generate"):
        # Pipelines call vae.encode and vae.decode, and never the forward that torch.compile would replace.
        for attribute in ("encoder", "decoder"):
            child = getattr(module, attribute, None)
            if isinstance(child, torch.nn.Module):
                setattr(module, attribute, torch.compile(child, **options))
        return
    setattr(pipe, name, torch.compile(module, **options))


def _find_options(placement: Placement, fullgraph: bool) -> dict[str, Any]:
    plan = placement.plan
    rule: CompileRule = plan.compiler.value
    if rule.backend == "inductor":  # before the first lookup in Triton's cache
        set_ptxas_path()
    backend = _find_backend(
        rule.backend,
        read_graph_workarounds(plan, placement.device),
        plan.fusions.value,
        keep_casts=plan.dtype.value == "float32",
    )
    return {
        "backend": backend,
        "fullgraph": fullgraph,
        "dynamic": False if rule.static else None,
    }


@functools.cache  # Dynamo reuses graphs only if the backend is the same object
def _find_backend(name: str, workarounds: GraphWorkarounds, fusions: tuple[str, ...], *, keep_casts: bool) -> Any:
    """Return the backend's name, or a custom backend that modifies the graph and then calls it.

    With `keep_casts`, parts of a float32 model that use half precision are rounded as in eager mode.
    """
    if not workarounds and not fusions and name != "inductor":
        return name

    def compile_transformed(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if workarounds:
            workarounds.apply(module)
        if fusions:
            fuse(module, fusions)
        replace_fill_diagonal(module)
        fold_cpu_constants(module)
        if keep_casts:
            keep_rounding(module)
        compile_graph = find_compiler(name)
        with draw_like_eager() if name == "inductor" else nullcontext():
            compiled: Callable[..., Any] = compile_graph(module, inputs)
        return compiled

    return compile_transformed


@contextmanager
def compile_cache_env(placement: Placement) -> Iterator[None]:
    """Set the environment variable for the compiler's cache directory inside the `with` block.

    If the compiler sets the variable to its own default, that change is also undone.
    """
    variable = placement.plan.compiler.value.cache_variable
    if not variable or not (placement.cache_dir or placement.report.compiled_models):
        yield
        return
    with _restore_env(variable):
        folder = placement.cache_dir or _find_default_cache(placement, variable)
        if folder:
            os.environ[variable] = placement.plan.compiler.value.cache_value.format(folder)
        yield


def _find_default_cache(placement: Placement, variable: str) -> str | None:
    """Return the default cache directory for automatic compilation, or None if it is not used.

    It is not used if the user has set the environment variable, if the directory is not writable, or
    if nothing was compiled automatically.
    """
    if _is_set_by_user(variable) or placement.speed is None or not placement.speed.compiled:
        return None
    folder = find_graphs_folder() / placement.opened.sheet.name
    return str(folder) if _can_write(folder) else None


@functools.cache  # one warning per process
def _can_write(folder: Path) -> bool:
    """Return whether the cache directory is writable; log one warning per process if it is not."""
    error = find_write_error(folder)
    if error:
        warn_not_cached(error)
    return not error


def _is_set_by_user(variable: str) -> bool:
    # Inductor writes its own default into TORCHINDUCTOR_CACHE_DIR (_inductor/runtime/cache_dir_utils.py, torch 2.13).
    return os.environ.get(variable) not in (None, find_inductor_cache())


@contextmanager
def _restore_env(variable: str) -> Iterator[None]:
    """Restore an environment variable to its earlier value after the `with` block."""
    before = os.environ.get(variable)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before


def record_shape(placement: Placement, request: CallRequest) -> None:
    """Add a call's image size to the report; warn if a new graph must be compiled for this size."""
    report, rule = placement.report, placement.plan.compiler.value
    if report.compiled_models is None:
        return
    sizes = report.compiled_sizes.value if report.compiled_sizes else ()
    size = bucket_of(request)
    if size in sizes:
        return
    if sizes and rule.static:
        _LOG.warning(
            "anyaccel: compiling for the new size %s; sizes already compiled: %s",
            size,
            "; ".join(sizes),
        )
    reason = "the device compiles one graph per size" if rule.static else "sizes that ran with compiled models"
    report.compiled_sizes = Decision((*sizes, size), reason)
