"""Recording what a function asks of the host: calls with their memory laid out, replayed without the function.

Small models spend a quarter of their time in Python, in making views and in asking for memory. A replay has none of it:
every tensor lies where it will lie, and only what computes is called again, by the same kernels in the same order, so
that the numbers are the same to the last bit. What cannot be replayed so is refused while it is recorded: numbers that
Python reads, random draws, shapes that depend on values.
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["record_host"]

_ATEN = torch.ops.aten
_MADE_EMPTY = frozenset((
    _ATEN.empty.memory_format, _ATEN.empty_like.default, _ATEN.empty_strided.default, _ATEN.new_empty.default,
    _ATEN.new_empty_strided.default,
))  # fmt: skip
_COPIES = frozenset((_ATEN.clone.default, _ATEN._to_copy.default))
_REFUSED = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))
_MOST_BYTES = 256 * 2**20
"""What one recording may hold. The calls of larger models take so long that there is nothing to gain."""


class _View(NamedTuple):
    """Where a tensor lies."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Call:
    """One call that computes, with a `_View` in the place of every tensor."""

    function: Any
    args: Sequence[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    made: tuple[_View, ...] = ()
    """What it makes memory for itself; nothing where it writes to what is there."""
    several: bool = False
    """Whether it gives a tuple."""


def record_host(
    function: Callable[[], Any],
    inputs: Sequence[torch.Tensor],
    kept: Sequence[bool],
    *,
    longest_call_s: float = math.inf,
) -> tuple[Any, Callable[[], None]]:
    """Run a function, and give its result, whose tensors stay where they are, and a replay that fills them anew.

    What follows from inputs that are `kept` alone is worked out again only once one of these was written to. A function
    whose calls take longer on average is refused.
    """
    log = _Log()
    before = torch.default_generator.get_state()
    with torch.inference_mode(False), torch.no_grad():  # where all calls are seen, and memory can be written to again
        with log:
            start = time.perf_counter()
            result = function()
            each = (time.perf_counter() - start) / max(1, len(log.calls))
        if each > longest_call_s:
            raise RuntimeError(f"its calls take {1e3 * each:.1f} ms each, which a replay shortens by little")
        if not torch.equal(before, torch.default_generator.get_state()):
            raise RuntimeError("it draws random numbers")
        program = _Program(log, inputs, kept)
        leaves, spec = tree_flatten(result)
        program.lay_out(log.describe(leaves))
    return tree_unflatten(program.results, spec), program.replay


class _Log(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes all calls while it is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
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
        if kind.is_view and not args[0].is_inference():
            return func(*args, **kwargs)
        self._reads = set()
        given = self.describe(args), self.describe(kwargs) if kwargs else {}
        reads = frozenset(self._reads)
        result = func(*args, **kwargs)
        if kind.written:
            self.calls.append(_Call(func, *given, reads, _find_written(kind, *given)))
        elif not kind.makes_nothing:
            made = tuple(self._name(one, reads) for one in _flatten(result) if isinstance(one, torch.Tensor))
            writes = frozenset([one.storage for one in made if one.storage not in reads])
            if writes:  # else it is a view
                self.calls.append(_Call(func, *given, reads, writes, made, isinstance(result, tuple | list)))
        else:
            self._name(result, reads)
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # which would import it for nothing
        return False

    def describe(self, value: Any) -> Any:
        """The same with a `_View` in the place of every tensor that has memory which others may share."""
        if isinstance(value, torch.Tensor):
            return self.locate(value)
        kind = type(value)
        if kind is list or kind is tuple:
            return kind([self.describe(one) for one in value])
        return {name: self.describe(one) for name, one in value.items()} if kind is dict else value

    def locate(self, tensor: torch.Tensor) -> _View | torch.Tensor:
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
        return _View(key, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _name(self, tensor: torch.Tensor, read: frozenset[int]) -> _View:
        if tensor.layout is torch.strided and tensor.untyped_storage()._cdata not in read:
            storage = tensor.untyped_storage()
            self._names.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
            self.sizes[storage._cdata] = storage.nbytes()
        found = self.locate(tensor)
        if not isinstance(found, _View):
            raise RuntimeError(f"it makes a tensor whose memory cannot be laid out: {tensor.layout}")
        return found


class _Program:
    """All calls in their order, with the memory that they work in."""

    def __init__(self, log: _Log, inputs: Sequence[torch.Tensor], kept: Sequence[bool]) -> None:
        self.results: list[Any] = []
        self._sizes, self._memory = log.sizes, dict(log.outside)
        self._calls = [lowered for call in log.calls for lowered in _lower(call)]
        self._loose = {one.storage for call in self._calls for one in call.made}
        self._kept = [tensor for tensor, one in zip(inputs, kept, strict=True) if one]
        places = [tensor.untyped_storage()._cdata for tensor in inputs]
        self._steady = self._find_steady(places, kept) if self._kept else {}
        self._tensors: dict[_View, torch.Tensor] = {}
        self._slots: list[torch.Tensor | None] = []
        self._numbers: dict[_View, int] = {}
        """Of the slots of loose tensors."""
        self._bases: dict[int, int] = {}
        self._seen: list[int] = []
        self._first: list[tuple[frozenset[int], Callable[[], Any]]] = []
        self._body: list[Callable[[], Any]] = []

    def _find_steady(self, places: Sequence[int], kept: Sequence[bool]) -> dict[int, frozenset[int]]:
        """Storages that follow from weights and kept inputs alone, and from which of the latter."""
        number = iter(range(len(places)))
        found: dict[int, frozenset[int]] = dict.fromkeys(self._memory, frozenset())
        for place, one in zip(places, kept, strict=True):
            if one:
                found[place] = frozenset((next(number),))
            else:
                found.pop(place, None)
        writers = Counter(key for call in self._calls for key in call.writes)
        for call in self._calls:
            read = call.reads - call.writes
            if all(key in found for key in read) and all(writers[key] == 1 for key in call.writes):
                of = frozenset[int]().union(*(found[key] for key in read))
                found.update(dict.fromkeys(call.writes, of))
        return found

    def lay_out(self, outputs: list[Any]) -> None:
        """Give every tensor its place."""
        for call in self._calls:
            if any(key in self._memory for key in call.writes):
                raise RuntimeError(f"it writes to what is not its own: {call.function}")
        steady = [call for call in self._calls if call.writes <= self._steady.keys()]
        body = [call for call in self._calls if not call.writes <= self._steady.keys()]
        stay = _find_storages(outputs)
        self._share(steady, body, stay)
        made: set[int] = set()
        for call in steady:
            of = frozenset[int]().union(*(self._steady[key] for key in call.writes))
            self._first.append((of, self._bind(call, made, ())))
        ends = self._find_ends(body, stay)
        self._body = [self._bind(call, made, ends[number]) for number, call in enumerate(body)]
        self.results = [self._give(leaf) if isinstance(leaf, _View) else leaf for leaf in outputs]

    def _share(self, steady: list[_Call], body: list[_Call], stay: frozenset[int]) -> None:
        """Take memory for what is written to; in the body that of what is no longer read is taken again."""
        own = {key for call in steady for key in call.writes if key not in self._loose}
        blocks, free = [self._sizes[key] for key in own], list[int]()
        place = {key: number for number, key in enumerate(own)}
        last = {key: number for number, call in enumerate(body) for key in call.reads | call.writes}
        for number, call in enumerate(body):
            for key in call.reads | call.writes:
                if key not in place and key not in self._loose and key not in self._memory:
                    place[key] = _find_block(self._sizes[key], blocks, free)
            done = [key for key in call.reads | call.writes if last[key] == number]
            free += [place[key] for key in done if key in place and key not in own and key not in stay]
        if sum(blocks) > _MOST_BYTES:
            raise RuntimeError(f"it would hold {sum(blocks) / 2**20:.0f} MiB")
        memory = [torch.empty(size, dtype=torch.uint8).untyped_storage() for size in blocks]
        self._memory.update({key: memory[block] for key, block in place.items()})

    def _find_ends(self, body: list[_Call], stay: frozenset[int]) -> list[list[int]]:
        """The loose storages that are read for the last time, for each call."""
        ends: list[list[int]] = [[] for _ in body]
        last = {key: number for number, call in enumerate(body) for key in call.reads | call.writes}
        for key in self._loose - self._steady.keys() - stay:
            if key in last:
                ends[last[key]].append(key)
        return ends

    def _bind(self, call: _Call, made: set[int], ends: Sequence[int]) -> Callable[[], Any]:
        """One call as a function of nothing; `made` are the slots that are filled by then."""
        needed = [leaf for leaf in _flatten((call.args, call.kwargs)) if _is_in(leaf, self._loose)]
        args, kwargs = _exchange(
            (call.args, call.kwargs),
            lambda leaf: _Slot(self._number(leaf)) if _is_in(leaf, self._loose) else self._find(leaf),
        )
        if not needed and not call.made:
            return functools.partial(call.function, *args, **kwargs)
        views = []
        for view in needed:
            if self._number(view) not in made:
                made.add(self._number(view))
                views.append((self._number(view), self._bases[view.storage], view))
        for view in call.made:
            self._bases[view.storage] = self._number(view)
            made.add(self._number(view))
        gives = [self._number(view) for view in call.made]
        done = [number for view, number in self._numbers.items() if view.storage in ends] if ends else []
        return _Step(self._slots, call.function, args, kwargs, views, gives, call.several, done)

    def _number(self, view: _View) -> int:
        if view not in self._numbers:
            self._numbers[view] = len(self._slots)
            self._slots.append(None)
        return self._numbers[view]

    def _find(self, leaf: Any) -> Any:
        if not isinstance(leaf, _View):
            return leaf
        if leaf not in self._tensors:
            self._tensors[leaf] = _lie_in(self._memory[leaf.storage], leaf)
        return self._tensors[leaf]

    def _give(self, view: _View) -> torch.Tensor:
        """Where a result is found after each replay."""
        if view.storage not in self._loose:
            found: torch.Tensor = self._find(view)
            return found
        place = torch.empty_strided(view.size, view.stride, dtype=view.dtype)
        self._body.append(self._bind(_Call(_ATEN.copy_.default, (place, view)), {self._bases[view.storage]}, ()))
        return place

    def replay(self) -> None:
        """Do it all again."""
        versions = [tensor._version for tensor in self._kept]
        if versions != self._seen:
            changed = {number for number, one in enumerate(versions) if [one] != self._seen[number : number + 1]}
            for of, call in self._first:
                if not of or of & changed:
                    call()
            self._seen = versions
        for call in self._body:
            call()


class _Slot(int):
    """In the place of a loose tensor, which is another one at every replay."""


@dataclass
class _Step:
    """A call that reads or makes loose tensors."""

    slots: list[torch.Tensor | None]
    function: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    views: list[tuple[int, int, _View]]
    """To be made before: the slot, the slot of what it is a view of, and how it lies there."""
    made: list[int]
    several: bool = False
    ends: list[int] = field(default_factory=list)
    """Slots that nobody reads from then on."""

    def __call__(self) -> None:
        slots = self.slots
        for slot, base, view in self.views:
            whole = slots[base]
            assert whole is not None
            slots[slot] = _see(whole, view)
        args = [self._fill(value) for value in self.args]
        kwargs = {name: self._fill(value) for name, value in self.kwargs.items()}
        made = self.function(*args, **kwargs)
        if self.several:
            for slot, one in zip(self.made, made, strict=True):
                slots[slot] = one
        elif self.made:
            slots[self.made[0]] = made
        for slot in self.ends:
            slots[slot] = None

    def _fill(self, value: Any) -> Any:
        if type(value) is _Slot:
            return self.slots[value]
        return [self._fill(one) for one in value] if type(value) is list else value


def _see(tensor: torch.Tensor, view: _View) -> torch.Tensor:
    """A view of a tensor, in another type where pairs of numbers are seen as complex ones."""
    if tensor.dtype != view.dtype:
        return _lie_in(tensor.untyped_storage(), view)
    return tensor.as_strided(view.size, view.stride, view.offset)


def _lie_in(storage: torch.UntypedStorage, view: _View) -> torch.Tensor:
    return torch.empty(0, dtype=view.dtype).set_(storage, view.offset, view.size, view.stride)


def _exchange(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same lists, tuples and dictionaries with other things in them."""
    if type(value) in (list, tuple):
        return type(value)([_exchange(one, change) for one in value])
    return {name: _exchange(one, change) for name, one in value.items()} if type(value) is dict else change(value)


def _flatten(value: Any) -> Iterator[Any]:
    """What is inside lists, tuples and dictionaries."""
    if type(value) in (list, tuple):
        for one in value:
            yield from _flatten(one)
    elif type(value) is dict:
        yield from _flatten(list(value.values()))
    else:
        yield value


def _is_by_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether places are looked up by their numbers, whose count is the shape, and not by what is true of them."""
    looked_up = func is _ATEN.index.Tensor
    return looked_up and not any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])


def _is_in(leaf: Any, storages: set[int]) -> bool:
    return isinstance(leaf, _View) and leaf.storage in storages


def _find_storages(value: Any) -> frozenset[int]:
    return frozenset(leaf.storage for leaf in _flatten(value) if isinstance(leaf, _View))


class _Kind(NamedTuple):
    """What is to be known of an operation."""

    is_view: bool
    refused: bool
    makes_nothing: bool
    """Whether memory is all that it gives."""
    names: tuple[str, ...]
    written: frozenset[str]
    """The arguments that it writes to."""


@functools.cache
def _read_kind(func: Any) -> _Kind:
    arguments = func._schema.arguments
    written = frozenset(one.name for one in arguments if one.alias_info and one.alias_info.is_write)
    refused = not _REFUSED.isdisjoint(func.tags)
    return _Kind(func.is_view, refused, func in _MADE_EMPTY, tuple(one.name for one in arguments), written)


def _find_written(kind: _Kind, args: Sequence[Any], kwargs: dict[str, Any]) -> frozenset[int]:
    given = {**dict(zip(kind.names, args, strict=False)), **kwargs}
    return _find_storages([given.get(name) for name in kind.written])


def _find_block(size: int, blocks: list[int], free: list[int]) -> int:
    """The block that was let go last and is just large enough, the largest one made larger, or a new one."""
    fits = [block for block in reversed(free) if blocks[block] >= size]
    if not free:
        blocks.append(size)
        return len(blocks) - 1
    chosen = min(fits, key=blocks.__getitem__) if fits else max(free, key=blocks.__getitem__)
    blocks[chosen] = max(size, blocks[chosen])
    free.remove(chosen)
    return chosen


def _lower(call: _Call) -> list[_Call]:
    """The same as calls that write to memory that is there, where there are such."""
    if call.several or len(call.made) != 1:
        return [call]
    made, touched = call.made[0], call.reads | call.writes
    if call.function in _COPIES:
        return [_Call(_ATEN.copy_.default, (made, call.args[0]), {}, touched, call.writes)]
    if call.function is _ATEN.constant_pad_nd.default and min(call.args[1]) >= 0:
        fill, middle = _split_pad(call, made)
        return [
            _Call(_ATEN.fill_.Scalar, (made, fill), {}, call.writes, call.writes),
            _Call(_ATEN.copy_.default, (middle, call.args[0]), {}, touched, call.writes),
        ]
    out = _find_out(call.function)
    return [call] if out is None else [_Call(out, call.args, {**call.kwargs, "out": made}, touched, call.writes)]


def _split_pad(call: _Call, made: _View) -> tuple[Any, _View]:
    """What a margin is filled with, and the place of what is inside it."""
    source, margins, *rest = call.args
    offset = made.offset
    for number, before in enumerate(margins[::2]):
        offset += before * made.stride[-1 - number]
    return (rest[0] if rest else call.kwargs.get("value", 0)), made._replace(size=source.size, offset=offset)


@functools.cache
def _find_out(function: Any) -> Any:
    """The form of an operation that writes to memory that it is given, where the host has a kernel for it."""
    wanted = [(one.name, str(one.type)) for one in function._schema.arguments]
    for name in function.overloadpacket.overloads():
        other = getattr(function.overloadpacket, name)
        arguments = [(one.name, str(one.type)) for one in other._schema.arguments]
        fits = arguments[:-1] == wanted and arguments[-1] == ("out", "Tensor")
        if fits and torch._C._dispatch_has_kernel_for_dispatch_key(other.name(), "CPU"):
            return other
    return None
