"""Classifier-free guidance on two ranks, each of which runs half of every batch.

This is possible because pipelines with a UNet, and many with a transformer, pass the conditional
and unconditional inputs to the model as one batch.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch

from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.errors import AnyaccelError, UsageError
from anyaccel.forward_overrides import Slot, set_override
from anyaccel.tracing.meta_module import map_tensors

__all__ = ["split_cfg_over_ranks"]

Forward = Callable[..., Any]

_LOG = logging.getLogger("anyaccel")
# Largest difference between the joined halves and the whole batch, relative to the largest absolute output.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
# The same for half precision, where kernels for another batch size sum in another order.
_HALF_PRECISION_TOLERANCE = 5e-2


def split_cfg_over_ranks(model: torch.nn.Module, *, required: bool) -> None:
    """Split each batch that a model receives across two ranks.

    If the joined halves differ from the unsplit result, raise `UsageError` when `required` is set;
    otherwise, log a warning and stop splitting batches.
    """
    first = next(iter(inspect.signature(model.forward).parameters))
    set_override(model, Slot.CFG_SPLIT, _CfgSplit(first, required))


class _CfgSplit:
    """A `forward` override that runs half of each batch on each of two ranks."""

    def __init__(self, first: str, required: bool) -> None:
        self.first, self.required = first, required
        """The name of the model's first argument, and whether to raise if the halves give another result."""
        self.compared: set[int] = set()
        """Batch sizes for which the halves gave the result of the whole batch."""
        self.disabled = False
        self.warned = False

    def __call__(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run this rank's half of the batch and return the output for the whole batch."""
        sample = args[0] if args else kwargs.get(self.first)
        rows = sample.shape[0] if isinstance(sample, torch.Tensor) else 1
        # An odd batch cannot be halved: guidance is off, or the pipeline calls the model once per half.
        if self.disabled or rows % 2:
            self._warn_unsplit(rows)
            return forward(*args, **kwargs)
        if rows in self.compared:
            return self._run_half(forward, rows, args, kwargs)
        return self._compare(forward, rows, args, kwargs)

    def _run_half(self, forward: Forward, rows: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rank = torch.distributed.get_rank()

        def take_half(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.chunk(2)[rank] if _is_batched(tensor, rows) else tensor

        half = forward(*map_tensors(args, take_half), **map_tensors(kwargs, take_half))
        return map_tensors(half, _gather_halves)

    def _compare(self, forward: Forward, rows: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the first batch of each size both whole and in halves, and return the unsplit output.

        If the outputs differ, raise `UsageError` or stop splitting batches.
        """
        # Some models mix the rows of a batch, for example with attention across the images of a batch.
        whole = forward(*args, **kwargs)
        try:
            reason = _find_difference(whole, self._run_half(forward, rows, args, kwargs))
        except Exception as error:
            if isinstance(error, AnyaccelError) or is_out_of_memory(error):
                raise  # not caused by the split
            reason = f"the model cannot run half of the batch: {type(error).__name__}: {error}"
        if not reason:
            self.compared.add(rows)
            return whole
        if self.required:
            raise UsageError(
                f"parallel='cfg' cannot be used with this model, because it would change the result: {reason}",
                hint="load the pipeline again and omit parallel",
            )
        self.disabled = True
        _LOG.warning("anyaccel: guidance is not split across ranks, so each rank runs the whole batch: %s", reason)
        return whole

    def _warn_unsplit(self, rows: int) -> None:
        if not self.warned and not self.disabled:
            self.warned = True
            _LOG.warning(
                "anyaccel: parallel='cfg' cannot split a batch of %d, so both ranks do the same work: guidance is "
                "off, or "
                "the pipeline runs the guidance branches one after the other",
                rows,
            )


def _is_batched(tensor: torch.Tensor, rows: int) -> bool:
    """Return whether a tensor's first dimension is a multiple of the batch size.

    The dimension is either the batch size or, for videos, the batch size times the number of frames.
    """
    # More than two dimensions for batch times frames: a table of positions has two and can have any length.
    return tensor.dim() > 0 and (tensor.shape[0] == rows or (tensor.dim() > 2 and tensor.shape[0] % rows == 0))


def _gather_halves(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the output halves from both ranks into one tensor."""
    half = tensor.contiguous()
    halves = [torch.empty_like(half) for _ in range(2)]
    torch.distributed.all_gather(halves, half)
    return torch.cat(halves)


def _find_difference(whole: Any, joined: Any) -> str:
    """Describe how two outputs differ; return an empty string if they differ only by rounding errors."""
    for expected, actual in zip(_list_tensors(whole), _list_tensors(joined), strict=True):
        if expected.shape != actual.shape:
            return f"the output of the two halves has shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
        if expected.is_floating_point():
            difference, largest = float((expected - actual).abs().max()), float(expected.abs().max())
            # `not <=` instead of `>`, because NaN must count as a difference.
            if not difference <= _TOLERANCES.get(expected.dtype, _HALF_PRECISION_TOLERANCE) * max(largest, 1e-6):
                return f"the output of the two halves differs by up to {difference:.2g} at a maximum of {largest:.2g}"
    return ""


def _list_tensors(value: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(value, collect)
    return tensors
