"""Batch splitting: models run a few rows of a batch at a time, while the pipeline handles the whole batch.

On devices with unreliable support for batches, and for batches that do not fit in memory, the forward of each denoiser
and ControlNet runs several times with fewer rows. The pipeline itself is called once, so noise, callbacks and
the order of images are those of diffusers. See docs/decisions/0017-split-batches.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.errors import first_line
from anyaccel.forward_overrides import Slot, find_replaced_forward, remove_override, set_override
from anyaccel.runtime.library_code import find_source, find_user_code_in_model, is_library_code
from anyaccel.runtime.module_fingerprint import is_random_adapter
from anyaccel.runtime.placement.row_arguments import (
    Arguments,
    NotSplittableError,
    RowRules,
    count_rows,
    join_outputs,
    load_table,
    split_arguments,
)
from anyaccel.runtime.workarounds.function_modes import has_foreign_modes
from anyaccel.upstream.accelerate_internals import find_hooked_forward
from anyaccel.upstream.diffusers_internals import STATELESS_HOOKS, find_slicing_obstacle, list_hooks
from anyaccel.upstream.torch_compile_internals import is_compiled
from anyaccel.upstream.torch_internals import read_child_table, read_global_hooks, read_hook_tables

__all__ = ["find_obstacle", "find_split_obstacle", "split_rows", "split_traced_rows"]

_DROPOUTS = (torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d, torch.nn.AlphaDropout)
_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)

# Called with the reason why a model is not split.
Report = Callable[[str], None]


# Layers of torch that models of diffusers consist of and that treat every row of a batch alike.
_ROW_WISE_LAYERS = frozenset((
    "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AvgPool1d", "AvgPool2d", "AvgPool3d", "Conv1d", "Conv2d", "Conv3d",
    "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "Dropout", "Embedding", "GELU", "GroupNorm", "Identity",
    "LayerNorm", "LeakyReLU", "Linear", "MaxPool2d", "Mish", "Module", "ModuleDict", "ModuleList",
    "NonDynamicallyQuantizableLinear", "ParameterDict", "ParameterList", "PixelShuffle", "PixelUnshuffle", "RMSNorm",
    "ReLU", "ReplicationPad2d", "Sequential", "SiLU", "Sigmoid", "Tanh", "Upsample", "ZeroPad2d",
))  # fmt: skip


class _RowSplit:
    """Override of a model's forward that runs a few rows at a time."""

    def __init__(self, name: str, module: torch.nn.Module, rules: RowRules, report: Report) -> None:
        self.name, self.module, self.rules, self.report = name, module, rules, report
        self.images, self.images_per_call = 1, 1
        # Another pipeline may run the same model in another thread.
        self.thread_id = threading.get_ident()

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model, in several calls if it has more rows than allowed."""
        if threading.get_ident() != self.thread_id:
            return forward(*args, **kwargs)
        try:
            rows = count_rows(self.module, self.rules, args, kwargs)
            # A pipeline may run several rows per image: two with guidance.
            limit = max(1, self.images_per_call * rows // self.images)
            if rows <= limit:
                return forward(*args, **kwargs)
            obstacle = find_obstacle(self.module)
            if obstacle:
                raise NotSplittableError(obstacle)
            chunks = split_arguments(self.module, self.rules, args, kwargs, limit)
            return self._run(forward, chunks)
        except NotSplittableError as error:
            self.report(f"{self.name} ({type(self.module).__name__}): {error}")
        return forward(*args, **kwargs)

    def _run(self, forward: Callable[..., Any], chunks: list[Arguments]) -> Any:
        try:
            outputs = [forward(*args, **kwargs) for args, kwargs in chunks]
            return join_outputs(outputs, joins_lists=self.rules.joins_lists)
        except NotSplittableError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # For example, outputs that are padded to the longest prompt of the chunk. Other errors occur again.
            raise NotSplittableError(f"{type(error).__name__}: {first_line(error)}") from error


def find_obstacle(model: torch.nn.Module) -> str:
    """Return why the rows of a model may depend on one another, or why its calls are observable; empty if neither."""
    if torch.is_grad_enabled():
        return "gradients are enabled"
    if has_foreign_modes():
        return "a torch function or dispatch mode is active"
    code = find_user_code_in_model(model)
    if code:
        return f"{code} may combine the images of a batch"
    if any(not _is_stateless(hook) for table in read_global_hooks() for hook in table.values()):
        return "a global hook is registered"
    for layer in model.modules():
        obstacle = _find_layer_obstacle(layer, is_model=layer is model)
        if obstacle:
            return obstacle
    return ""


def _find_layer_obstacle(layer: torch.nn.Module, *, is_model: bool) -> str:
    attributes = vars(layer)
    processor = attributes.get("processor") or read_child_table(layer).get("processor")
    if processor is not None and type(processor).__name__ not in load_table().processors:
        return f"the attention processor {type(processor).__name__} may combine the images of a batch"
    # Hooks on the model itself run outside of the split forward.
    if not is_model and any(not _is_stateless(hook) for table in read_hook_tables(layer) for hook in table.values()):
        return f"a hook is registered on {type(layer).__name__}"
    hooks = [name for name in list_hooks(attributes) if name not in STATELESS_HOOKS]
    if hooks:
        return f"the hook {hooks[0]} is enabled"
    # Checked here because `find_user_code_in_model` sees only the outermost forward.
    replaced = [
        function for function in (find_replaced_forward(layer), find_hooked_forward(attributes)) if function is not None
    ]
    if not all(is_library_code(function) and getattr(function, "__self__", layer) is layer for function in replaced):
        return f"the forward of {type(layer).__name__} is replaced"
    if layer.training and isinstance(layer, _DROPOUTS) and layer.p > 0:
        return "dropout is active, because the model is in training mode"
    if layer.training and is_random_adapter(layer):
        return f"{type(layer).__name__} of peft may draw random numbers in training mode"
    if layer.training and type(layer).__name__ == "LabelEmbedding":  # diffusers, models/embeddings.py
        return "labels are dropped at random, because the model is in training mode"
    if isinstance(layer, _BATCH_NORMS):
        return "batch normalization computes statistics of the batch" if _uses_batch_statistics(layer) else ""
    return "" if _is_row_wise(layer) else f"{type(layer).__name__} may combine the images of a batch"


def _uses_batch_statistics(layer: Any) -> bool:
    return layer.training or layer.running_mean is None


def _is_row_wise(layer: torch.nn.Module) -> bool:
    """Return whether a layer of torch treats the images of a batch apart; the table covers the layers of diffusers."""
    if type(layer).__module__.partition(".")[0] != "torch" or type(layer).__name__ in _ROW_WISE_LAYERS:
        return True
    return isinstance(layer, torch.nn.MultiheadAttention) and layer.batch_first


def _is_stateless(hook: Any) -> bool:
    """Return whether a hook does the same work for every batch: that of `weight_norm`, which some VAEs use."""
    return find_source(hook) == torch.nn.utils.weight_norm.__module__


def find_split_obstacle(models: Mapping[str, torch.nn.Module]) -> str:
    """Return why the batch of a pipeline with these denoisers cannot be split; empty if it can.

    A call may still run unsplit, if the pipeline changes a model or passes an unknown argument.
    """
    for name, model in models.items():
        for module in _find_split_modules(model):
            obstacle = _find_static_obstacle(module)
            if obstacle:
                return f"{name} ({type(module).__name__}): {obstacle}"
    return ""


def _find_static_obstacle(module: torch.nn.Module) -> str:
    if is_compiled(module):
        return "it is compiled by the user"
    if load_table().find_rules(module) is None:
        return "it is not known whether its rows are independent"
    with torch.no_grad():
        return find_obstacle(module)


def _find_split_modules(model: torch.nn.Module) -> Iterable[torch.nn.Module]:
    """Return the modules to split: the model, or the models that it consists of, such as several ControlNets."""
    parts = getattr(model, "nets", None)
    return parts if isinstance(parts, torch.nn.ModuleList) else [model]


@contextmanager
def split_rows(
    components: Mapping[str, Any], denoisers: Iterable[str], images: int, images_per_call: int | None, report: Report
) -> Iterator[None]:
    """Run the models for at most `images_per_call` of the `images` images at a time inside the `with` block.

    A model whose rows cannot be separated with certainty runs the whole batch, and `report` is called with the reason.
    """
    if images_per_call is None or images <= images_per_call:
        yield
        return
    with ExitStack() as stack:
        for name in denoisers:
            for module in _find_split_modules(components[name]) if name in components else ():
                _install(name, module, images, images_per_call, report, stack)
        for name, component in components.items():
            is_autoencoder = hasattr(component, "decode") and hasattr(component, "encode")
            if (
                isinstance(component, torch.nn.Module)
                and is_autoencoder
                and not getattr(component, "use_slicing", False)
            ):
                _enable_slicing(name, component, report, stack)
        yield


def _enable_slicing(name: str, vae: Any, report: Report, stack: ExitStack) -> None:
    """Let an autoencoder run one image at a time until the stack is closed."""
    obstacle = "slicing is not supported"
    if type(vae).__name__ in load_table().vaes:
        with torch.no_grad():
            obstacle = find_slicing_obstacle(vae) or find_obstacle(vae)
    if obstacle:
        report(f"{name} ({type(vae).__name__}): {obstacle}")
        return
    vae.enable_slicing()
    stack.callback(vae.disable_slicing)


def split_traced_rows(pipe: Any, denoisers: Iterable[str]) -> Callable[[int, int | None], AbstractContextManager[None]]:
    """Return `split_rows` for a pipeline with its models on `meta`."""

    def split(images: int, images_per_call: int | None) -> AbstractContextManager[None]:
        return split_rows(pipe.components, denoisers, images, images_per_call, lambda reason: None)

    return split


def _install(
    name: str, module: torch.nn.Module, images: int, images_per_call: int, report: Report, stack: ExitStack
) -> None:
    rules = None if is_compiled(module) else load_table().find_rules(module)
    if rules is None:
        report(f"{name} ({type(module).__name__}): {_find_static_obstacle(module)}")
        return
    split = _RowSplit(name, module, rules, report)
    split.images, split.images_per_call = images, images_per_call
    set_override(module, Slot.ROWS, split)
    stack.callback(remove_override, module, Slot.ROWS)
