"""What stands in for a model's forward: compiled, and recorded for each shape and replayed where launching is slow.

A recording reads its inputs from fixed places and leaves its outputs in others: inputs are copied in, and outputs out.
It is used only if its first replay gives what the model gave, and as long as nothing about the model changed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

__all__ = ["FastForward", "Recorder", "can_stand_in", "find_fast_forward", "fingerprint", "release"]

_LOG = logging.getLogger(__name__)

Replay = Callable[[], None]
Recorder = Callable[[Callable[[], Any]], tuple[Any, Replay]]
"""Records what a function asks of the device; gives its result, whose tensors stay where they are, and a replay."""
Wait = Callable[[], None]

_WARM = 2
"""Runs of a shape before it is recorded: libraries choose their kernels and make their workspaces in them."""
_MOST_SHAPES = 8
"""Recordings that one model keeps; a call with ever new shapes runs without."""
_BOUND = 0.75
"""A model is bound by launching where the host is busy for this share of a run."""
_SAME = 2e-2
_PLAIN = (str, int, float, bool, type(None), torch.dtype, torch.device)
_OURS = ("forward", "_anyaccel_boundary")
"""What is put on models here, and changes with plans."""


@dataclass
class _Shape:
    """What is known of one shape."""

    runs: int = 0
    refused: str = ""
    """Why it is not recorded."""
    inputs: list[torch.Tensor] = field(default_factory=list)
    output: Any = None
    replay: Replay | None = None


class FastForward:
    """Stands in for a model's `forward`; the model stays the object that it is."""

    def __init__(
        self,
        module: torch.nn.Module,
        run: Callable[..., Any] | None = None,
        record: Recorder | None = None,
        wait: Wait = lambda: None,
        *,
        always: bool = False,
    ) -> None:
        self.module, self.run, self.record, self.wait, self.always = (
            module,
            run or _plain_forward(module),
            record,
            wait,
            always,
        )
        self.compiled = run is not None
        self.shapes: dict[Any, _Shape] = {}
        self.mark: int | None = None
        self.told = ""
        """What was found, in words, for the plan."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output: replayed where its shape is recorded."""
        if self.record is None or torch.compiler.is_compiling() or torch.is_grad_enabled():
            return self.run(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        shape = self._find(leaves, spec)
        if shape is None or shape.refused:
            return self.run(*args, **kwargs)
        if shape.replay is None:
            shape.runs += 1
            if shape.runs <= _WARM:
                return self.run(*args, **kwargs) if shape.runs < _WARM else self._look(shape, args, kwargs)
            return self._begin(shape, leaves, spec)
        return self._again(shape, leaves)

    def install(self) -> None:
        """Take the place of the model's forward."""
        self.module.forward = self

    def renew(self) -> None:
        """Forget all recordings if the model is no longer what was recorded: other weights, adapters, processors."""
        mark = fingerprint(self.module)
        if mark != self.mark:
            self.forget()
            self.mark = mark

    def forget(self) -> None:
        """Let go of all recordings, and of the memory that they hold."""
        self.shapes.clear()

    @property
    def recordings(self) -> int:
        """How many shapes are recorded."""
        return sum(shape.replay is not None for shape in self.shapes.values())

    def _find(self, leaves: list[Any], spec: Any) -> _Shape | None:
        try:
            key = (spec, tuple(_describe(leaf) for leaf in leaves))
            found = self.shapes.get(key)
        except TypeError:  # an argument that cannot be told from another
            return None
        if found is None and len(self.shapes) < _MOST_SHAPES:
            found = self.shapes[key] = _Shape()
        return found

    def _look(self, shape: _Shape, args: Any, kwargs: Any) -> Any:
        """One run that is timed: whether the host's launching takes longer than the device's work."""
        before = fingerprint(self.module)
        self.wait()
        start = time.perf_counter()
        output = self.run(*args, **kwargs)
        launched = time.perf_counter()
        self.wait()
        done = time.perf_counter()
        share = (launched - start) / max(done - start, 1e-9)
        figures = f"the host launches for {1e3 * (launched - start):.1f} of {1e3 * (done - start):.1f} ms"
        if fingerprint(self.module) != before:
            shape.refused = "the model keeps something from one run to the next"
        elif share < _BOUND and not self.always:
            shape.refused = f"{figures}, so that a recording would save nothing"
        self.told = shape.refused or figures
        return output

    def _begin(self, shape: _Shape, leaves: list[Any], spec: Any) -> Any:
        """Record a shape, and keep the recording if it gives what the model gives."""
        assert self.record is not None
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        args, kwargs = _fill(spec, leaves, given)
        expected = self.run(*args, **kwargs)
        shape.inputs = [tensor.clone() for tensor in given]
        args, kwargs = _fill(spec, leaves, shape.inputs)
        try:
            shape.output, shape.replay = self.record(lambda: self.run(*args, **kwargs))
            made = self._again(shape, leaves)
            if not _is_same(made, expected):
                raise RuntimeError("a replay gave another result")
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            _LOG.debug("anyaccel: %s is not recorded: %r", type(self.module).__name__, error)
            words = next(iter(str(error).strip().splitlines()), type(error).__name__)
            shape.replay, shape.output, shape.inputs = None, None, []
            self.told = shape.refused = f"it cannot be recorded: {words}"
        return expected

    @staticmethod
    def _again(shape: _Shape, leaves: list[Any]) -> Any:
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for place, tensor in zip(shape.inputs, given, strict=True):
            place.copy_(tensor)
        assert shape.replay is not None
        shape.replay()
        return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, shape.output)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of the model is a model that nobody recorded.
        return _plain_forward(memo.get(id(self.module), self.module))

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain_forward, (self.module,)


def _plain_forward(module: torch.nn.Module) -> Any:
    return MethodType(type(module).forward, module)


def _describe(leaf: Any) -> Any:
    """What makes two arguments alike: of a tensor its shape, type and place, of anything else itself."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    if not isinstance(leaf, _PLAIN):
        raise TypeError(f"{type(leaf).__name__} may hold tensors that nobody sees")
    return type(leaf), leaf


def _fill(spec: Any, leaves: list[Any], tensors: list[torch.Tensor]) -> Any:
    """The arguments with other tensors in the place of theirs."""
    following = iter(tensors)
    return tree_unflatten([next(following) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)


def _is_same(made: Any, expected: Any) -> bool:
    pairs = zip(tree_flatten(made)[0], tree_flatten(expected)[0], strict=True)
    tensors = [(one, other) for one, other in pairs if isinstance(one, torch.Tensor) and one.is_floating_point()]
    for one, other in tensors:
        off = (one.float() - other.float()).norm() / other.float().norm().clamp_min(1e-20)
        if not bool(off <= _SAME) and bool(torch.isfinite(other).all()):
            return False
    return True


def fingerprint(module: torch.nn.Module) -> int:
    """A number that changes where a model's weights lie elsewhere, or an attribute of one of its layers is another."""
    seen = []
    for part in module.modules():
        inside = vars(part)
        seen.append(hash(tuple(id(value) for name, value in inside.items() if name not in _OURS)))
        seen.extend(parameter.data_ptr() for parameter in inside["_parameters"].values() if parameter is not None)
        scaling = inside.get("scaling")
        if isinstance(scaling, dict):  # how strong adapters are is kept in a dictionary
            seen.append(hash(tuple(scaling.items())))
            seen.append(hash(tuple(inside.get("_active_adapter") or ())))
    return hash(tuple(seen))


def can_stand_in(module: torch.nn.Module) -> bool:
    """Whether nothing else stands in for the forward of a model or of its layers: offloading, caches, casts."""
    if "forward" in vars(module) and not isinstance(vars(module)["forward"], FastForward):
        return False
    return not any(hasattr(part, "_hf_hook") or hasattr(part, "_diffusers_hook") for part in module.modules())


def find_fast_forward(module: Any) -> FastForward | None:
    """What stands in for a model's forward, if it is captured."""
    found = vars(module).get("forward") if isinstance(module, torch.nn.Module) else None
    return found if isinstance(found, FastForward) else None


def release(module: torch.nn.Module) -> None:
    """Let a model run as before, and let go of its recordings."""
    found = find_fast_forward(module)
    if found is not None:
        found.forget()
        del module.forward  # the class's own is found again
