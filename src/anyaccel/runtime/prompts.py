"""Prompts: what a pipeline's encoders made of one is kept, so that the same prompt is encoded once."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from itertools import chain
from types import CodeType
from typing import Any

import torch

from anyaccel.backends.host import is_host
from anyaccel.runtime.compile import has_decoder
from anyaccel.runtime.fast_forward import find_hooks, find_stranger, is_known
from anyaccel.runtime.placement import find_components, find_placement
from anyaccel.runtime.snapshot import Snapshot
from anyaccel.runtime.tensor_state import fingerprint, read_state
from anyaccel.tracing.shell import map_tensors

__all__ = ["Prompts", "keep_prompts"]

_PLAIN = (str, int, float, bool, type(None), torch.device, torch.dtype)


class _Encoder:
    """An encoder or a tokenizer, and how to tell that it changed: adapters, new words, other weights."""

    def __init__(self, part: Any, at_home: bool) -> None:
        self.part, self.state, self.at_home = part, _describe(part), at_home
        self.snapshot = Snapshot(part) if isinstance(part, torch.nn.Module) else None
        self.prints = self._take_prints()

    def is_still(self, part: Any) -> bool:
        if part is not self.part or _describe(part) != self.state:
            return False
        if self.snapshot is not None and not self.snapshot.holds():
            return False
        prints = self._take_prints()
        return len(prints) == len(self.prints) and all(map(torch.equal, prints, self.prints))

    def is_strange(self) -> bool:
        """Whether Python of somebody's own runs in it, which may do another thing each time."""
        if not isinstance(self.part, torch.nn.Module):
            return False
        hooks = chain.from_iterable(table.values() for table in find_hooks(self.part.modules()))
        return bool(find_stranger(self.part)) or not all(map(is_known, hooks))

    def _take_prints(self) -> list[torch.Tensor]:
        """Of the weights that the host computes with: to look at those that only wait there would take long."""
        if not self.at_home or not isinstance(self.part, torch.nn.Module):
            return []
        near = [one for one in self.part.parameters() if type(one.data) is torch.Tensor and is_host(one.device)]
        return [fingerprint(one) for one in near]


def _describe(part: Any) -> Any:
    """Of a tokenizer its words and ways, of a model how often its weights were written."""
    if isinstance(part, torch.nn.Module):
        return sum(0 if one.is_inference() else one._version for one in part.parameters())
    ways = [getattr(part, name, None) for name in ("padding_side", "truncation_side", "model_max_length", "pad_token")]
    return len(part) if hasattr(type(part), "__len__") else 0, ways


@dataclass
class Prompts:
    """What was encoded, by all that it depends on; it waits on the host, so that it takes no memory of the device."""

    most: int
    at_home: bool = False
    """Whether the host encodes: then nothing has to be fetched, and a prompt is kept the first time."""
    seen: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)
    kept: OrderedDict[Hashable, Any] = field(default_factory=OrderedDict)
    encoders: list[_Encoder] = field(default_factory=list)
    """What it was encoded by."""

    def renew(self, pipe: Any, named: Collection[str] = ()) -> None:
        """Forget everything if an encoder, a tokenizer or one of the named components is another, or was changed."""
        parts = [part for name, part in find_components(pipe).items() if _may_encode(name, part, named)]
        if len(parts) == len(self.encoders) and all(map(_Encoder.is_still, self.encoders, parts)):
            return
        self.seen.clear()
        self.kept.clear()
        self.encoders = [_Encoder(part, self.at_home) for part in parts]

    def find(self, key: Hashable, device: torch.device) -> Any:
        """What is kept for a key, on the device; None where nothing is."""
        if key not in self.kept:
            return None
        self.kept.move_to_end(key)
        return map_tensors(self.kept[key], lambda tensor: tensor.to(device, copy=True))

    def note(self, key: Hashable, made: Any) -> None:
        """Keep what was made; where it has to be fetched, the second time that it is asked for: most never are."""
        if key not in self.seen and not self.at_home:
            self.seen[key] = None
            if len(self.seen) > 8 * self.most:
                self.seen.popitem(last=False)
            return
        self.kept[key] = map_tensors(made, lambda tensor: tensor.detach().to("cpu", copy=True))
        while len(self.kept) > self.most:
            self.kept.popitem(last=False)


def keep_prompts(kind: Any) -> Any:
    """The `encode_prompt` of a pipeline's class that looks first whether it was asked the same before."""
    encode, read = kind.encode_prompt, _find_read(kind)
    if not is_known(encode):
        return encode
    signature = inspect.signature(encode)

    @functools.wraps(encode)
    def encode_prompt(self: Any, *args: Any, **kwargs: Any) -> Any:
        placement = find_placement(self)
        key = (
            None
            if placement is None or not placement.plan.prompts_kept.value
            else _key(self, signature, read, args, kwargs)
        )
        if placement is None or key is None or torch.is_grad_enabled():  # with gradients it is not for a picture
            return encode(self, *args, **kwargs)
        if placement.prompts is None:
            placement.prompts = Prompts(placement.plan.prompts_kept.value, at_home=is_host(placement.device))
        placement.prompts.renew(self, read.difference(placement.denoisers))
        if any(encoder.is_strange() for encoder in placement.prompts.encoders):
            return encode(self, *args, **kwargs)
        found = placement.prompts.find(key, placement.device)
        if found is None:
            found = encode(self, *args, **kwargs)
            placement.prompts.note(key, found)
        return found

    return encode_prompt


def _may_encode(name: str, part: Any, named: Collection[str]) -> bool:
    """Whether a component may have a share in encoding; what decodes is named by code that asks for its sizes."""
    return "encoder" in name or "token" in name or (name in named and not has_decoder(part))


def _find_read(kind: type) -> frozenset[str]:
    """The names that `encode_prompt` of a pipeline's class has in its code, or in that of methods that it names."""
    found: set[str] = set()
    codes = [_find_code(inspect.getattr_static(kind, "encode_prompt"))]
    while codes:
        code = codes.pop()
        if code is None:
            continue
        new = set(code.co_names) - found
        found |= new
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
        codes += [_find_code(inspect.getattr_static(kind, name, None)) for name in new]
    return frozenset(found)


def _find_code(attribute: Any) -> CodeType | None:
    """The code of a method or a property."""
    function = getattr(attribute, "fget", None) or getattr(attribute, "__func__", attribute)
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return code if isinstance(code, CodeType) else None


def _key(
    pipe: Any, signature: inspect.Signature, read: frozenset[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Hashable | None:
    """All that an encoding depends on beside the encoders: arguments, and what the pipeline has itself, as templates.

    None where that cannot be told, such as for a tensor.
    """
    try:
        given = signature.bind(pipe, *args, **kwargs).arguments
    except TypeError:
        return None
    given = dict(list(given.items())[1:])
    given |= given.pop("kwargs", None) or {}
    values = tuple((name, _plain(value)) for name, value in sorted(given.items()))
    if any(value is _plain for _, value in values):
        return None
    names = read.difference(find_components(pipe))
    own = {name: value for name, value in sorted(vars(pipe).items()) if name in names}
    named = [(name, read_state(one) if isinstance(one, torch.Tensor) else _plain(one)) for name, one in own.items()]
    if any(value is _plain and (callable(own[name]) or not is_known(type(own[name]))) for name, value in named):
        return None
    return values, tuple((name, value) for name, value in named if value is not _plain)


def _plain(value: Any) -> Any:
    """A value that can be told from others; this function itself where it cannot."""
    if isinstance(value, dict):
        return _plain(sorted(value.items())) if all(isinstance(name, str) for name in value) else _plain
    if isinstance(value, list | tuple):
        parts = tuple(_plain(item) for item in value)
        return _plain if any(part is _plain for part in parts) else (type(value).__name__, parts)
    return (type(value).__name__, value) if isinstance(value, _PLAIN) else _plain
