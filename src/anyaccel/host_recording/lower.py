"""Calls that write to memory which is there, in the place of calls that make their own.

Such a call is taken only if it was tried in this process beside the one that it stands for, and gave the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from anyaccel.host_recording.call import Call, View, flatten, have_same_numbers, lie_in

__all__ = ["lower"]

_ATEN = torch.ops.aten
_COPIES = frozenset(("aten::clone", "aten::_to_copy"))
_SAME: dict[Any, bool] = {}
"""Whether the calls that stand for another gave the same, for each kind that was met."""


def lower(call: Call, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> list[Call]:
    """The same as calls that write to memory that is there, where there are such: a call with what it took and gave."""
    if call.several or len(call.made) != 1:
        return [call]
    others, made = _find(call, call.made[0]), call.made[0]
    kind = call.function, made.dtype, tuple(sorted(range(len(made.stride)), key=made.stride.__getitem__))
    if kind not in _SAME:
        _SAME[kind] = bool(others) and _is_same(others, call, (args, kwargs), result)
    return others if _SAME[kind] else [call]


def _is_same(others: list[Call], call: Call, given: Any, result: torch.Tensor) -> bool:
    pairs = zip(flatten((call.args, call.kwargs)), flatten(given), strict=True)
    known = {view: tensor for view, tensor in pairs if type(view) is View}
    room = torch.empty(result.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage()

    def fill(value: Any) -> Any:
        if type(value) in (list, tuple):
            return [fill(one) for one in value]
        if type(value) is not View:
            return value
        return known[value] if value.storage not in call.writes else lie_in(room, value)

    try:
        for one in others:
            one.function(*fill(one.args), **{name: fill(value) for name, value in one.kwargs.items()})
    except (RuntimeError, TypeError):  # a form that is not for such tensors
        return False
    return have_same_numbers(lie_in(room, call.made[0]), result)


def _find(call: Call, made: View) -> list[Call]:
    name = call.function.name()
    if name in _COPIES:
        return [Call(_ATEN.copy_.default, (made, call.args[0]), {}, call.reads, call.writes)]
    if name == "aten::constant_pad_nd" and min(call.args[1]) >= 0:
        fill, middle = _split_pad(call, made)
        return [
            Call(_ATEN.fill_.Scalar, (made, fill), {}, frozenset(), call.writes),
            Call(_ATEN.copy_.default, (middle, call.args[0]), {}, call.reads | call.writes, call.writes),
        ]
    out = _find_out(call.function)
    return [] if out is None else [Call(out, call.args, {**call.kwargs, "out": made}, call.reads, call.writes)]


def _split_pad(call: Call, made: View) -> tuple[Any, View]:
    """What a margin is filled with, and the place of what is inside it."""
    source, margins, *rest = call.args
    offset = made.offset
    for number, before in enumerate(margins[::2]):
        offset += before * made.stride[-1 - number]
    return (rest[0] if rest else call.kwargs.get("value", 0)), made._replace(size=source.size, offset=offset)


@functools.cache
def _find_out(function: Any) -> Callable[..., Any] | None:
    """The form of an operation that writes to memory that it is given, where the host has a kernel for it."""
    wanted = [(one.name, str(one.type)) for one in function._schema.arguments]
    for name in function.overloadpacket.overloads():
        other = getattr(function.overloadpacket, name)
        arguments = [(one.name, str(one.type)) for one in other._schema.arguments]
        fits = arguments[:-1] == wanted and arguments[-1] == ("out", "Tensor")
        if fits and torch._C._dispatch_has_kernel_for_dispatch_key(other.name(), "CPU"):
            return other  # type: ignore[no-any-return]
    return None
