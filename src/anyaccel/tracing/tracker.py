"""Counting what is alive while a model runs on torch's `meta` device, where there are shapes and no numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["AttentionForm", "Tracker", "tracking"]

AttentionForm: TypeAlias = Literal["fused", "materialised", "sliced"]
"""Whether a device keeps the scores of attention: not at all, all of them, or those of one head at a time."""

_BLOCK = 512
"""Allocators of devices hand out whole blocks of this many bytes."""
_ROW_BYTES = 4
"""What a fused kernel keeps of each row of the scores: its sum, in float32."""


class Tracker(TorchDispatchMode):
    """Bytes alive and at the peak, by storage; weights that are there already do not count."""

    def __init__(self, known: Iterator[torch.Tensor]) -> None:
        super().__init__()
        self.used = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = _WITHOUT_NUMBERS.get(func)
        made = answer(*args, **(kwargs or {})) if answer else func(*args, **(kwargs or {}))
        for one in made if isinstance(made, list | tuple) else (made,):
            if isinstance(one, torch.Tensor):
                self._add(one)
        if func is torch.ops.aten.convolution.default:
            self.pass_by(_convolution_workspace(args[0], made))
        return made

    def pass_by(self, size: int) -> None:
        """Count something that is freed before the operation ends."""
        self.peak = max(self.peak, self.used + size)

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        known = self._alive.get(key)
        if known is not None and known[0]() is not None:
            return
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        self._alive[key] = (weakref.ref(storage, lambda _: self._drop(key)), size)
        self.used += size
        self.peak = max(self.peak, self.used)

    def _drop(self, key: int) -> None:
        known = self._alive.pop(key, None)
        if known is not None:
            self.used -= known[1]


class _Attention(TorchFunctionMode):
    """Attention in the form that the device has it, rather than as `meta` would spell it out."""

    def __init__(self, tracker: Tracker, form: AttentionForm) -> None:
        super().__init__()
        self.tracker, self.form = tracker, form

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
        query, key, value = given["query"], given["key"], given["value"]
        made = torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device=query.device)
        rows = query.numel() // query.shape[-1]
        if self.form == "fused":
            self.tracker.pass_by(rows * _ROW_BYTES)
        else:
            heads = query.shape[1] if self.form == "sliced" and query.dim() > 3 else 1
            scores = rows * key.shape[-2] * query.element_size() // heads
            self.tracker.pass_by(2 * scores)  # before and after the softmax
        return made


@contextmanager
def tracking(model: torch.nn.Module, form: AttentionForm) -> Iterator[Tracker]:
    """Count what a model holds beside its weights while it runs on `meta`."""
    tracker = Tracker(iter([*model.parameters(), *model.buffers()]))
    with torch.no_grad(), tracker, _Attention(tracker, form):
        yield tracker


def _convolution_workspace(given: torch.Tensor, made: torch.Tensor) -> int:
    """Kernels for half precision want channels last: they copy what comes in and what goes out."""
    if given.dim() != 4 or given.element_size() > 2:
        return 0
    return given.numel() * given.element_size() + made.numel() * made.element_size()


def _any_number(tensor: torch.Tensor) -> Any:
    """A number that was never computed: 1, in the tensor's own kind."""
    return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1


def _one_place(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(1, tensor.dim(), dtype=torch.int64, device=tensor.device)


_ATEN = torch.ops.aten
_WITHOUT_NUMBERS: dict[Any, Callable[..., Any]] = {
    _ATEN._local_scalar_dense.default: _any_number,
    _ATEN.nonzero.default: _one_place,
    _ATEN.equal.default: lambda left, right: True,
}
"""Operations whose result depends on numbers, which there are none of."""


