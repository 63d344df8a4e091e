"""The calls of a recording in their order, with the memory that they work in."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from anyaccel.host_recording.call import Call, View, find_storages, lie_in
from anyaccel.host_recording.log import Log

__all__ = ["Program"]

_ATEN = torch.ops.aten
_TORCHS = frozenset(("aten", "prims", "mkldnn"))
"""Whose operations say truly what they write to."""


class Program:
    """All calls in their order, with the memory that they work in."""

    def __init__(self, log: Log, inputs: Sequence[torch.Tensor], kept: Sequence[bool]) -> None:
        self.results: list[Any] = []
        self._sizes, self._memory = log.sizes, dict(log.outside)
        self._calls = log.calls
        self.is_sure = all(call.function.namespace in _TORCHS for call in self._calls)
        """Whether replays need not be tried: calls do what they say, and those that stand for others were tried."""
        self._loose = {one.storage for call in self._calls for one in call.made}
        self._kept = [tensor for tensor, one in zip(inputs, kept, strict=True) if one]
        places = [tensor.untyped_storage()._cdata for tensor in inputs]
        self._steady = self._find_steady(places, kept) if self._kept else {}
        self._tensors: dict[View, torch.Tensor] = {}
        self._slots: list[torch.Tensor | None] = []
        self._numbers: dict[View, int] = {}
        """Of the slots of loose tensors."""
        self._slots_of: defaultdict[int, list[int]] = defaultdict(list)
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

    def lay_out(self, outputs: list[Any], most_bytes: int | None) -> None:
        """Give every tensor its place, if that takes no more than so much memory."""
        for call in self._calls:
            if not call.writes or any(key in self._memory for key in call.writes):
                raise RuntimeError(f"it writes to what is not its own: {call.function}")
        steady = [call for call in self._calls if call.writes <= self._steady.keys()]
        body = [call for call in self._calls if not call.writes <= self._steady.keys()]
        stay = find_storages(outputs)
        self._share(steady, body, stay, most_bytes)
        made: set[int] = set()
        for call in steady:
            of = frozenset[int]().union(*(self._steady[key] for key in call.writes))
            self._first.append((of, self._bind(call, made, ())))
        ends = self._find_ends(body, stay)
        self._body = [self._bind(call, made, ends[number]) for number, call in enumerate(body)]
        self.results = [self._give(leaf) if isinstance(leaf, View) else leaf for leaf in outputs]
        self._calls, self._tensors, self._numbers = [], {}, {}  # what replays need is bound

    def _share(self, steady: list[Call], body: list[Call], stay: frozenset[int], most_bytes: int | None) -> None:
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
        if most_bytes is not None and sum(blocks) > most_bytes:
            raise RuntimeError(f"it would hold {sum(blocks) / 2**20:.0f} MiB")
        _check_places({key: block for key, block in place.items() if key not in own}, body, stay)
        memory = [torch.empty(size, dtype=torch.uint8).untyped_storage() for size in blocks]
        self._memory.update({key: memory[block] for key, block in place.items()})

    def _find_ends(self, body: list[Call], stay: frozenset[int]) -> list[list[int]]:
        """The loose storages that are read for the last time, for each call."""
        ends: list[list[int]] = [[] for _ in body]
        last = {key: number for number, call in enumerate(body) for key in call.reads | call.writes}
        for key in self._loose - self._steady.keys() - stay:
            if key in last:
                ends[last[key]].append(key)
        return ends

    def _bind(self, call: Call, made: set[int], ends: Sequence[int]) -> Callable[[], Any]:
        """One call as a function of nothing; `made` are the slots that are filled by then."""
        needed: list[View] = []
        args = [self._take(value, needed) for value in call.args]
        kwargs = {name: self._take(value, needed) for name, value in call.kwargs.items()}
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
        done = [number for key in ends for number in self._slots_of[key]]
        return _Step(self._slots, call.function, args, kwargs, views, gives, call.several, done)

    def _number(self, view: View) -> int:
        if view not in self._numbers:
            self._numbers[view] = len(self._slots)
            self._slots_of[view.storage].append(len(self._slots))
            self._slots.append(None)
        return self._numbers[view]

    def _take(self, value: Any, needed: list[View]) -> Any:
        """What stands for an argument: a tensor that lies there, or the slot of a loose one, which is then needed."""
        kind = type(value)
        if kind is View:
            if value.storage not in self._loose:
                return self._find(value)
            needed.append(value)
            return _Slot(self._number(value))
        return [self._take(one, needed) for one in value] if kind is list or kind is tuple else value

    def _find(self, view: View) -> torch.Tensor:
        if view not in self._tensors:
            self._tensors[view] = lie_in(self._memory[view.storage], view)
        return self._tensors[view]

    def _give(self, view: View) -> torch.Tensor:
        """Where a result is found after each replay."""
        if view.storage not in self._loose:
            return self._find(view)
        if any(step == 0 < size - 1 for size, step in zip(view.size, view.stride, strict=True)):
            raise RuntimeError("it gives an expanded view")
        place = torch.empty_strided(view.size, view.stride, dtype=view.dtype)
        self._body.append(self._bind(Call(_ATEN.copy_.default, (place, view)), {self._bases[view.storage]}, ()))
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
    views: list[tuple[int, int, View]]
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


def _see(tensor: torch.Tensor, view: View) -> torch.Tensor:
    """A view of a tensor, in another type where pairs of numbers are seen as complex ones."""
    if tensor.dtype != view.dtype:
        return lie_in(tensor.untyped_storage(), view)
    return tensor.as_strided(view.size, view.stride, view.offset)


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


def _check_places(place: dict[int, int], body: list[Call], stay: frozenset[int]) -> None:
    """Go through all calls, and see that what each reads is still there."""
    holds: dict[int, int] = {}
    written: set[int] = set()
    for call in body:
        for key in call.reads & place.keys():
            is_first = key in call.writes and key not in written  # what is in new memory is nobody's
            if not is_first and holds.get(place[key]) != key:
                raise RuntimeError(f"what it reads was written over: {call.function}")
        holds.update({place[key]: key for key in call.writes & place.keys()})
        written |= call.writes
    if any(holds.get(place[key]) != key for key in stay & place.keys()):
        raise RuntimeError("what it gives was written over")
