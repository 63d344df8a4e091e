"""Counting what is alive while a pipeline runs with shapes alone."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from anyaccel.planning.attention import AS_IT_IS, AttentionRule
from anyaccel.planning.kernel_workspace import Workspace
from anyaccel.planning.limit_hits import TraceFacts
from anyaccel.upstream.torch_internals import TorchDispatchMode, read_address, read_schema

__all__ = ["AllocationTracker"]


class AllocationTracker(TorchDispatchMode):
    """Bytes alive and at the peak, by storage; the weights, which are there already, do not count."""

    def __init__(
        self, workspace: Workspace, weights: Iterable[torch.Tensor], attention: AttentionRule = AS_IT_IS
    ) -> None:
        super().__init__()
        self.used = self.peak = 0
        self.workspace = workspace
        self._known = {read_address(tensor.untyped_storage()) for tensor in weights}
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._attention = _Attention(self, attention)
        self._paused = False
        self.seen = TraceFacts()
        self.model = ""
        """The model that runs now."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count while the block runs."""
        with self._attention, self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = _WITHOUT_NUMBERS.get(func)
        known = answer is not None and args[0].is_meta
        made = answer(*args, **kwargs) if answer and known else _run_once(func, args, kwargs)
        if self._paused:
            return made
        for one in made if isinstance(made, list | tuple) else (made,):
            if isinstance(one, torch.Tensor):
                self.add(one)
                if one.is_meta:
                    self._look(func, one)
        if func is _ATEN._local_scalar_dense.default and args[0].is_meta:
            self._look(func, args[0])
        if func is torch.ops.aten.convolution.default:
            given, weight, result = (tuple(part.shape) for part in (args[0], args[1], made))
            last = _is_channels_last(args[0])
            self.pass_by(self.workspace.of_convolution(given, weight, result, made.element_size(), last))
        return made

    def _look(self, func: Any, tensor: torch.Tensor) -> None:
        """Note what a device's limits may be about."""
        seen, dtype, elements = self.seen, str(tensor.dtype)[6:], tensor.numel()
        seen.dtypes.add(dtype)
        seen.most_elements = max(seen.most_elements, elements)
        seen.most_bytes = max(seen.most_bytes, elements * tensor.element_size())
        sizes = seen.operations.setdefault(func.overloadpacket.__name__, {})
        sizes[dtype] = max(sizes.get(dtype, 0), elements)

    def pass_by(self, size: int) -> None:
        """Count something that is freed before the operation ends."""
        self.peak = max(self.peak, self.used + size)

    def add(self, tensor: torch.Tensor, *, in_place_of_another: bool = False) -> None:
        """Count a tensor's storage, once; one that takes another's place does not make a peak."""
        storage = tensor.untyped_storage()
        key = read_address(storage)
        if key in self._known:
            return
        known = self._alive.get(key)
        if known is not None and known[0]() is not None:
            return
        size = self.workspace.of_block(storage.nbytes())
        self._alive[key] = (weakref.ref(storage, lambda _: self._drop(key)), size)
        self.used += size
        if not in_place_of_another:
            self.peak = max(self.peak, self.used)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing that is made while the block runs."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def ignore(self, tensor: torch.Tensor) -> None:
        """Never count this one: it stands for another that counts."""
        storage = tensor.untyped_storage()
        key = read_address(storage)
        self._alive[key] = (weakref.ref(storage, lambda _: self._drop(key)), 0)

    def pass_by_again(self, run: Callable[[], Any]) -> tuple[Any, int]:
        """Run something, and tell how far above what is there now it went."""
        before, self.peak = self.peak, self.used
        start = self.used
        made = run()
        above = self.peak - start
        self.peak = max(before, self.peak)
        return made, above

    def take_peak(self) -> int:
        """The peak since it was last taken."""
        peak, self.peak = self.peak, self.used
        return peak

    def _drop(self, key: int) -> None:
        known = self._alive.pop(key, None)
        if known is not None:
            self.used -= known[1]


class _Attention(TorchFunctionMode):
    """Attention in the form that the device has it, rather than as `meta` would spell it out."""

    def __init__(self, tracker: AllocationTracker, rule: AttentionRule) -> None:
        super().__init__()
        self.tracker, self.rule = tracker, rule

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | (kwargs or {})
        query, key, value, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
        if not query.is_meta:
            return func(*args, **(kwargs or {}))
        if self.rule.contiguous:
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        plain = mask is None or mask.stride(-1) == 1 or mask.shape[-1] == 1
        workspace = self.tracker.workspace
        shapes = tuple(query.shape), tuple(key.shape), value.shape[-1]
        scores = query.numel() // query.shape[-1] * key.shape[-2]
        seen = self.tracker.seen
        seen.most_scores = max(seen.most_scores, scores)
        seen.score_bytes = max(seen.score_bytes, scores * query.element_size())
        seen.sequences[self.tracker.model] = max(seen.sequences.get(self.tracker.model, 0), query.shape[-2])
        sliced = self.rule.slices(shapes[0], key.shape[-2])
        if sliced is None:
            made = torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device=query.device)
            self.tracker.pass_by(workspace.of_attention(*shapes, plain_mask=plain))
            return made
        # Heads laid out in a row, the parts of the result, and the result.
        flat = [part.reshape(-1, *part.shape[-2:]) for part in (query, key, value)]
        parts = torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device=query.device)
        masks = 0 if mask is None and not given.get("is_causal") else 2 * sliced[0][0] * sliced[0][1] * sliced[1][1]
        self.tracker.pass_by(workspace.of_attention(*sliced, plain_mask=plain) + masks)
        made = torch.empty_like(parts)
        del flat, parts
        return made


_Shape = tuple[torch.Size, tuple[int, ...], torch.dtype]
_MADE: dict[Any, _Shape] = {}
"""What each operation made of which shapes: models repeat their blocks, and working a shape out takes torch long."""


def _run_once(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation; one that made a new tensor of the same shapes before is answered from memory."""
    key = None if _aliases(func) else _read_key(func, args, kwargs)
    known = _MADE.get(key) if key is not None else None
    if known is not None:
        return torch.empty_strided(known[0], known[1], dtype=known[2], device="meta")
    if func in _POINTWISE and _is_large(args[0]):
        return _without_numbers(func, args, kwargs)
    made = func(*args, **kwargs)
    if key is not None and isinstance(made, torch.Tensor) and made.is_meta:
        _MADE[key] = (made.shape, made.stride(), made.dtype)
    return made


def _is_large(tensor: Any) -> bool:
    """Whether a tensor of the host is as large as a picture: it came out of a model, and its numbers are zeros."""
    return isinstance(tensor, torch.Tensor) and not tensor.is_meta and tensor.numel() >= _PICTURE


def _without_numbers(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Zeros of the right shape in place of what millions of zeros give."""
    shapes = [one.to("meta") if isinstance(one, torch.Tensor) and one.dim() else one for one in args]
    made = func(*shapes, **kwargs)
    return torch.zeros(made.shape, dtype=made.dtype)


@functools.cache
def _aliases(func: Any) -> bool:
    """Whether an operation gives a view, changes what it is given, or gives several tensors."""
    schema = read_schema(func)
    given, made = schema.arguments, schema.returns
    return len(made) != 1 or any(one.alias_info is not None for one in (*given, *made))


def _read_key(func: Any, args: Any, kwargs: Any) -> Any:
    """What decides the result's shape; None where a tensor of the host takes part."""
    parts: list[Any] = [func]
    for value in (*args, *kwargs.items()):
        part = _read_part(value)
        if part is None:
            return None
        parts.append(part)
    return tuple(parts)


def _read_part(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype) if value.is_meta else None
    if isinstance(value, list | tuple):
        parts = tuple(_read_part(part) for part in value)
        return None if any(part is None for part in parts) else parts
    return (type(value), value)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether a batch of pictures lies in memory pixel by pixel.

    A batch of one that came to lie so by chance, out of attention, is not taken for it by torch's kernels.
    """
    pictures = tensor.dim() == 4 and tensor.shape[0] > 1
    return pictures and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def _convolve(*args: Any) -> torch.Tensor:
    """A convolution keeps channels last, which `meta` by itself forgets."""
    made: torch.Tensor = _run_once(_ATEN.convolution.default, args, {})
    if not _is_channels_last(args[0]):
        return made
    return torch.empty(made.shape, dtype=made.dtype, device="meta", memory_format=torch.channels_last)


def _any_number(tensor: torch.Tensor) -> Any:
    """A number that was never computed: 1, in the tensor's own kind."""
    return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1


def _copy(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
    """What a pipeline takes to the host out of a model is zeros: there are no numbers."""
    if torch.device(options.get("device") or "meta").type == "meta":
        return _run_once(_ATEN._to_copy.default, (tensor,), options)  # type: ignore[no-any-return]
    return torch.zeros(tensor.shape, dtype=options.get("dtype") or tensor.dtype)


def _normalize(tensor: torch.Tensor, weight: Any, bias: Any, images: int, *sizes: Any) -> Any:
    """A norm over groups, whose shapes torch works out by spelling the whole of it out."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return made, *(torch.empty(images, sizes[2], dtype=tensor.dtype, device="meta") for _ in range(2))


def _one_place(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(1, tensor.dim(), dtype=torch.int64, device=tensor.device)


_ATEN = torch.ops.aten
_PICTURE = 2**20
_POINTWISE = {_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.div.Tensor, _ATEN.clamp.default}
_WITHOUT_NUMBERS: dict[Any, Callable[..., Any]] = {
    _ATEN._local_scalar_dense.default: _any_number,
    _ATEN._to_copy.default: _copy,
    _ATEN.convolution.default: _convolve,
    _ATEN.native_group_norm.default: _normalize,
    _ATEN.nonzero.default: _one_place,
    _ATEN.equal.default: lambda left, right: True,
}
"""Operations whose result depends on numbers, which there are none of."""
