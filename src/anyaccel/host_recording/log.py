"""What a function asks of the host, noted call by call while it runs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from anyaccel.host_recording.call import Call, View, find_storages, flatten
from anyaccel.host_recording.lower import lower

__all__ = ["Log"]

_MADE_EMPTY = frozenset((
    "aten::empty.memory_format", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
    "aten::new_empty_strided",
))  # fmt: skip
"""By name, since to look an operation up takes torch a millisecond."""
_ATTENTION = ("scaled_dot_product", "sdp_choice")
_REFUSED = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


class Log(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes all calls while it is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.sizes: dict[int, int] = {}
        """Of the storages that were made."""
        self._outside: dict[int, StorageWeakRef] = {}
        self._reads: set[int] = set()
        """The storages of the call that is described."""
        self._names: list[StorageWeakRef] = []
        """Of all storages that were made, so that none that is made later is given the same."""

    @property
    def outside(self) -> dict[int, torch.UntypedStorage]:
        """The storages that were there: inputs, weights, and what was made of them before."""
        found = {key: torch.UntypedStorage._new_with_weak_ptr(key) for key in self._outside}
        if None in found.values():
            raise RuntimeError("it reads a tensor of which nobody saw how it was made")
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _read_kind(func)
        if kind.refused and not _is_by_numbers(func, args):
            raise RuntimeError(f"Python reads a number of a tensor: {func}")
        if kind.draws:
            raise RuntimeError(f"it draws random numbers: {func}")
        if kind.is_view and not args[0].is_inference():
            return func(*args, **kwargs)
        self._reads = set()
        given = self.describe(args), self.describe(kwargs) if kwargs else {}
        reads = frozenset(self._reads)
        result = func(*args, **kwargs)
        if kind.written:
            self.calls.append(Call(func, *given, reads, _find_written(kind, *given)))
        elif not kind.makes_nothing:
            parts = list(flatten(result))
            made = tuple(self._name(one, reads) for one in parts if isinstance(one, torch.Tensor))
            if made and len(made) < len(parts):
                raise RuntimeError(f"it gives tensors and others: {func}")
            writes = frozenset([one.storage for one in made if one.storage not in reads])
            if writes:  # else it is a view
                call = Call(func, *given, reads, writes, made, isinstance(result, tuple | list))
                self.calls += lower(call, args, kwargs, result)
        else:
            self._name(result, reads)
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # which would import it for nothing
        return False

    def describe(self, value: Any) -> Any:
        """The same with a `View` in the place of every tensor that has memory which others may share."""
        if isinstance(value, torch.Tensor):
            return self.locate(value)
        kind = type(value)
        if kind is list or kind is tuple:
            return kind([self.describe(one) for one in value])
        return {name: self.describe(one) for name, one in value.items()} if kind is dict else value

    def locate(self, tensor: torch.Tensor) -> View | torch.Tensor:
        """Where a tensor lies."""
        if tensor.layout is not torch.strided:
            return tensor
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_conj() or tensor.is_neg():
            raise RuntimeError(f"it works on {type(tensor).__name__}, which is not a plain tensor")
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._reads.add(key)
        if key not in self.sizes and key not in self._outside:
            self._outside[key] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return View(key, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _name(self, tensor: torch.Tensor, read: frozenset[int]) -> View:
        if tensor.layout is torch.strided and tensor.untyped_storage()._cdata not in read:
            storage = tensor.untyped_storage()
            self._names.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
            self.sizes[storage._cdata] = storage.nbytes()
        found = self.locate(tensor)
        if not isinstance(found, View):
            raise RuntimeError(f"it makes a tensor whose memory cannot be laid out: {tensor.layout}")
        return found


class Kind(NamedTuple):
    """What is to be known of an operation."""

    is_view: bool
    refused: bool
    draws: bool
    """Whether it takes numbers from a generator, whichever; attention says so too, and does where it drops some."""
    makes_nothing: bool
    """Whether memory is all that it gives."""
    names: tuple[str, ...]
    written: frozenset[str]
    """The arguments that it writes to."""


@functools.cache
def _read_kind(func: Any) -> Kind:
    arguments = func._schema.arguments
    written = frozenset(one.name for one in arguments if one.alias_info and one.alias_info.is_write)
    refused, name = not _REFUSED.isdisjoint(func.tags), func.name()
    draws = torch.Tag.nondeterministic_seeded in func.tags and not any(one in name for one in _ATTENTION)
    names = tuple(one.name for one in arguments)
    return Kind(func.is_view, refused, draws, name in _MADE_EMPTY, names, written)


def _find_written(kind: Kind, args: Sequence[Any], kwargs: dict[str, Any]) -> frozenset[int]:
    given = {**dict(zip(kind.names, args, strict=False)), **kwargs}
    return find_storages([given.get(name) for name in kind.written])


def _is_by_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether places are looked up by their numbers, whose count is the shape, and not by what is true of them."""
    looked_up = func.name() == "aten::index.Tensor"
    return looked_up and not any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
