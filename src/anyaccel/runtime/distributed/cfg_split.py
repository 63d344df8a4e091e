"""The two halves of classifier-free guidance on two ranks: a batch is halved before a model and put together after it.

Pipelines with a UNet, and many with a transformer, run both halves as one batch: what was asked for and what was not.
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
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE = 5e-2
"""How far halves may be from the batch, against its largest number: in half precision sums of another order differ."""


def split_cfg_over_ranks(model: torch.nn.Module, *, insist: bool) -> None:
    """Let each of two ranks run one half of every batch that a model is given.

    Where halves do not give what the batch gives, it is an error if one insists, else batches are run whole.
    """
    first = next(iter(inspect.signature(model.forward).parameters))
    set_override(model, Slot.CFG_SPLIT, _CfgSplit(first, insist))


class _CfgSplit:
    """The override of one model's forward."""

    def __init__(self, first: str, insist: bool) -> None:
        self.first, self.insist = first, insist
        """The name of the model's first argument, and whether to raise where halves give another result."""
        self.compared: set[int] = set()
        """Batches, by their rows, whose halves were seen to give the same."""
        self.off = False
        self.told = False

    def __call__(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the model's output for a whole batch, of which this rank ran one half."""
        sample = args[0] if args else kwargs.get(self.first)
        rows = sample.shape[0] if isinstance(sample, torch.Tensor) else 1
        if self.off or rows % 2:
            self._tell(rows)
            return forward(*args, **kwargs)
        if rows in self.compared:
            return self._run_half(forward, rows, args, kwargs)
        return self._compare(forward, rows, args, kwargs)

    def _run_half(self, forward: Forward, rows: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rank = torch.distributed.get_rank()

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.chunk(2)[rank] if _has_a_row_a_picture(tensor, rows) else tensor

        mine = forward(*map_tensors(args, keep), **map_tensors(kwargs, keep))
        return map_tensors(mine, _join)

    def _compare(self, forward: Forward, rows: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a batch of so many rows in both ways, once: some models let the pictures of a batch see one another."""
        whole = forward(*args, **kwargs)
        try:
            reason = _find_difference(whole, self._run_half(forward, rows, args, kwargs))
        except Exception as error:
            if isinstance(error, AnyaccelError) or is_out_of_memory(error):
                raise
            reason = f"a half fails with {type(error).__name__}: {error}"
        if not reason:
            self.compared.add(rows)
            return whole
        if self.insist:
            raise UsageError(
                f"parallel='cfg': the halves of a batch do not give what the batch gives: {reason}",
                hint="load the pipeline anew and leave parallel out",
            )
        self.off = True
        _LOG.warning("anyaccel: guidance is not shared, and each rank runs whole batches: %s", reason)
        return whole

    def _tell(self, rows: int) -> None:
        if not self.told and not self.off:
            self.told = True
            _LOG.warning(
                "anyaccel: parallel='cfg' has nothing to halve in a batch of %d: guidance is off, or the pipeline runs "
                "its halves one after the other; both ranks do the same work",
                rows,
            )


def _has_a_row_a_picture(tensor: torch.Tensor, rows: int) -> bool:
    """Whether a tensor's rows are pictures, or the frames of each: a table of positions has two dimensions alone."""
    return tensor.dim() > 0 and (tensor.shape[0] == rows or (tensor.dim() > 2 and tensor.shape[0] % rows == 0))


def _join(tensor: torch.Tensor) -> torch.Tensor:
    """Both ranks' halves of an output."""
    mine = tensor.contiguous()
    halves = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(halves, mine)
    return torch.cat(halves)


def _find_difference(whole: Any, joined: Any) -> str:
    """How far two outputs are apart, in words; empty where it is rounding."""
    for one, other in zip(_list_tensors(whole), _list_tensors(joined), strict=True):
        if one.shape != other.shape:
            return f"{tuple(other.shape)} instead of {tuple(one.shape)}"
        if one.is_floating_point():
            apart, most = float((one - other).abs().max()), float(one.abs().max())
            if not apart <= _TOLERANCES.get(one.dtype, _COARSE) * max(most, 1e-6):
                return f"they are {apart:.2g} apart, of {most:.2g}"
    return ""


def _list_tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found
