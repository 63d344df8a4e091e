"""What stands in for a model's forward: compiled, and recorded for each shape and replayed where asking is slow.

A recording reads its inputs from fixed places and leaves its outputs in others: inputs are copied in, and outputs out.
It is used only if it gives what the model gave, which its first replay or the recorder itself shows, and as long as
nothing about the model changed.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from types import MethodType
from typing import Any

import torch
from torch.nn.modules import module as everywhere
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from anyaccel.backends.driver import Recorder
from anyaccel.runtime.snapshot import Snapshot, is_our_forward
from anyaccel.runtime.step_reuse import find_steps
from anyaccel.runtime.tensor_state import TensorState, read_state

__all__ = [
    "FastForward",
    "can_stand_in",
    "find_fast_forward",
    "find_hooks",
    "find_own_methods",
    "find_stranger",
    "is_as_written",
    "is_free",
    "is_known",
    "release",
]

_LOG = logging.getLogger(__name__)

Wait = Callable[[], None]

_MOST_SHAPES = 8
"""Recordings that one model keeps; a call with ever new shapes runs without."""
_KNOWN = frozenset(("torch", "diffusers", "transformers", "peft", "torchao", "anyaccel"))
"""Whose layers and processors keep nothing that nobody sees: all their pipelines were run both ways."""
_PLAIN = (str, int, float, bool, type(None), torch.dtype, torch.device)


@dataclass
class _Shape:
    """What is known of one shape."""

    runs: int = 0
    refused: str = ""
    """Why it is not recorded."""
    inputs: list[torch.Tensor] = field(default_factory=list)
    output: Any = None
    replay: Callable[[], None] | None = None
    given: list[_Given | None] = field(default_factory=list)
    """The tensors of the run before, of which is told whether they are the same again."""
    kept: list[bool] = field(default_factory=list)
    """Whether an input stays from step to step: then it is copied in only if it is another one."""


@dataclass(frozen=True)
class _Given:
    """A tensor as it was given."""

    tensor: weakref.ref[torch.Tensor]
    state: TensorState

    def is_same(self, tensor: torch.Tensor) -> bool:
        """Whether it is the same one, and nobody wrote to it."""
        return self.tensor() is tensor and self.state == read_state(tensor)


class FastForward:
    """Stands in for a model's `forward`; the model stays the object that it is."""

    def __init__(
        self,
        module: torch.nn.Module,
        run: Callable[..., Any] | None = None,
        recorder: Recorder | None = None,
        wait: Wait = lambda: None,
    ) -> None:
        self.module, self.run, self.recorder, self.wait = module, run or _plain_forward(module), recorder, wait
        self.compiled = run is not None
        self.warm = recorder.warm if recorder else 0
        """Runs of a shape before it is recorded."""
        self.shapes: dict[Any, _Shape] = {}
        self.recorded_of: Snapshot | None = None
        self.hooks: list[Any] = []
        """Of the layers inside, which a recording does not call."""
        self.weights: list[torch.Tensor] = []
        """Those to which torch counts writes."""
        self.written = -1
        """How often the weights had been written to, where recordings do not see that."""
        self.lock, self.inside = threading.RLock(), False
        """A recording has one place for its inputs; a model that calls itself is inside already."""
        self.looked_at = False
        """Whether the model was looked at and no recording replayed since."""
        self.told = ""
        """What was found, in words, for the plan."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, or what it was at an earlier step where the plan says so."""
        steps = None if torch.compiler.is_compiling() else find_steps()
        if steps is None:
            return self._answer(*args, **kwargs)
        return steps.answer(id(self), self._answer, args, kwargs)

    def _answer(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output: replayed where its shape is recorded."""
        recorder = self.recorder
        if recorder is None or torch.compiler.is_compiling() or torch.is_grad_enabled():
            return self.run(*args, **kwargs)
        if torch._C._is_any_autocast_enabled():  # which is no argument, and keeps casts of weights for itself
            return self.run(*args, **kwargs)
        if any(self.hooks):
            self.told = "hooks are on its layers"
            return self.run(*args, **kwargs)
        with self.lock:
            if self.inside:
                return self.run(*args, **kwargs)
            self.inside = True
            try:
                return self._run_or_replay(recorder, args, kwargs)
            finally:
                self.inside = False

    def _run_or_replay(self, recorder: Recorder, args: Any, kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        if recorder.of_calls and self.written != (written := self._count_writes()):
            self.forget()
            self.written = written
        shape = self._find(leaves, spec)
        if shape is None or shape.refused:
            return self.run(*args, **kwargs)
        if shape.replay is not None and self._is_as_recorded(recorder):
            try:
                return self._again(shape, _find_tensors(leaves))
            except (RuntimeError, TypeError, ValueError) as error:
                if not recorder.of_calls:  # a device that failed
                    raise
                self._refuse(shape, error)
                return self.run(*args, **kwargs)
        if shape.replay is not None:
            self.forget()
            return self.run(*args, **kwargs)
        shape.runs += 1
        if shape.runs > self.warm:
            return self._begin(recorder, shape, leaves, spec)
        shape.given = [_give(tensor) for tensor in _find_tensors(leaves)]
        return self.run(*args, **kwargs) if shape.runs < self.warm else self._look(shape, args, kwargs)

    def _refuse(self, shape: _Shape, error: Exception) -> None:
        """Let go of a shape's recording for good."""
        _LOG.debug("anyaccel: %s is not recorded: %r", type(self.module).__name__, error)
        words = next(iter(str(error).strip().splitlines()), "")
        words = words if isinstance(error, RuntimeError) and words else type(error).__name__
        self.told = shape.refused = f"it cannot be recorded: {words}"
        shape.replay, shape.output, shape.inputs = None, None, []

    def _is_as_recorded(self, recorder: Recorder) -> bool:
        """Whether the model is what it was: asked as a call's first step runs, and where that is short, at every step.

        A pipeline may change processors as its call begins, and a callback anything between two steps.
        """
        if self.looked_at or recorder.of_calls:
            self.looked_at = False
            return self.recorded_of is None or self.recorded_of.holds()
        return True

    def _count_writes(self) -> int:
        return sum(weight._version for weight in self.weights)

    def install(self) -> None:
        """Take the place of the model's forward."""
        self.module.forward = self

    def renew(self) -> None:
        """Forget all recordings if the model is no longer what was recorded: other weights, adapters, processors."""
        if self.recorded_of is None or not self.recorded_of.holds():
            self.forget()
            self.recorded_of = Snapshot(self.module)
            numbers = chain(self.module.parameters(), self.module.buffers())
            self.weights = [weight for weight in numbers if not weight.is_inference()]
            inside = [part for part in self.module.modules() if part is not self.module]
            self.hooks = find_hooks(inside)
        self.looked_at = True
        for shape in self.shapes.values():
            shape.given = [None] * len(shape.given)  # a new call: what follows from its inputs is worked out anew

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
        except (TypeError, RuntimeError):  # an argument that cannot be told from another
            return None
        if found is None and len(self.shapes) < _MOST_SHAPES:
            found = self.shapes[key] = _Shape()
        return found

    def _look(self, shape: _Shape, args: Any, kwargs: Any) -> Any:
        """One run that is timed, and looked at for what the model keeps: such a one is not recorded."""
        before, given = self.recorded_of, tree_flatten((args, kwargs))[0]
        if before is None or not before.holds():  # a pipeline changed it as its call began
            self.shapes = {key: one for key, one in self.shapes.items() if one is shape}
            before = self.recorded_of = Snapshot(self.module)
        self.wait()
        start = time.perf_counter()
        output = self.run(*args, **kwargs)
        launched = time.perf_counter()
        self.wait()
        done = time.perf_counter()
        figures = f"{1e3 * (done - start):.1f} ms by itself"
        if self.recorder is not None and not self.recorder.of_calls:
            figures = f"the host launches for {1e3 * (launched - start):.1f} of {1e3 * (done - start):.1f} ms"
        if not before.holds():
            shape.refused = "the model keeps something from one run to the next"
        elif not _are_same(given, tree_flatten((args, kwargs))[0]):
            shape.refused = "the model writes to what it is given"
        self.told = shape.refused or figures
        return output

    def _begin(self, recorder: Recorder, shape: _Shape, leaves: list[Any], spec: Any) -> Any:
        """Record a shape, and keep the recording if it gives what the model gives."""
        given = _find_tensors(leaves)
        shape.kept = [
            recorder.of_calls and known is not None and known.is_same(tensor)
            for known, tensor in zip(shape.given, given, strict=True)
        ]
        made = [] if recorder.of_calls else [self._run(spec, leaves, given)]
        with torch.inference_mode(False), torch.no_grad():  # places that can be written to in any mode
            shape.inputs = [tensor.clone() for tensor in given]

        def run() -> Any:
            made.append(self._run(spec, leaves, shape.inputs))
            return made[-1]

        holds = False
        try:
            shape.output, shape.replay = recorder.record(run, shape.inputs, shape.kept)
            if not all(isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in tree_flatten(made[0])[0]):
                raise RuntimeError("its output may hold tensors that nobody sees")
            if recorder.off is not None and not _is_same(self._again(shape, given), made[0], recorder.off):
                raise RuntimeError("a replay gave another result")
            shape.given = _know(given, shape.kept)
            holds = True
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self._refuse(shape, error)
        finally:
            if not holds:  # after Ctrl-C too
                shape.replay, shape.output, shape.inputs = None, None, []
        return _copy(made[0]) if made else self._run(spec, leaves, given)

    def _run(self, spec: Any, leaves: list[Any], tensors: list[torch.Tensor]) -> Any:
        """The model with other tensors in the place of those that were given."""
        following = iter(tensors)
        filled = [next(following) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(filled, spec)
        return self.run(*args, **kwargs)

    @staticmethod
    def _again(shape: _Shape, given: list[torch.Tensor]) -> Any:
        known, shape.given = shape.given or [None] * len(given), []  # until all are copied, nothing is known
        for place, tensor, last, kept in zip(shape.inputs, given, known, shape.kept, strict=True):
            if not kept or last is None or not last.is_same(tensor):
                place.copy_(tensor)
        shape.given = _know(given, shape.kept)
        assert shape.replay is not None
        shape.replay()
        return _copy(shape.output)

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


def _are_same(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether these are the same objects: a list of caches has others in it once a model put them there."""
    return len(leaves) == len(others) and all(map(is_, leaves, others))


def _copy(output: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, output)


def _find_tensors(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _give(tensor: torch.Tensor) -> _Given | None:
    """A tensor as it was given; None for one of inference mode, to which writes are not counted."""
    return None if tensor.is_inference() else _Given(weakref.ref(tensor), read_state(tensor))


def _know(given: list[torch.Tensor], kept: list[bool]) -> list[_Given | None]:
    """The tensors that stay, as they were given."""
    return [_give(tensor) if one else None for tensor, one in zip(given, kept, strict=True)]


def _is_same(made: Any, expected: Any, most: float) -> bool:
    pairs = zip(tree_flatten(made)[0], tree_flatten(expected)[0], strict=True)
    tensors = [(one, other) for one, other in pairs if isinstance(one, torch.Tensor)]
    for one, other in tensors:
        if not one.is_floating_point():  # numbers and pairs of them that are counted or told apart
            if not torch.equal(one, other):
                return False
            continue
        off = (one.float() - other.float()).norm() / other.float().norm().clamp_min(1e-20)
        if not bool(off <= most) and bool(torch.isfinite(other).all()):
            return False
    return True


def is_free(module: torch.nn.Module) -> bool:
    """Whether nothing stands in for a forward; what was copied or unpickled has its class's own."""
    found = vars(module).get("forward")
    return found is None or getattr(found, "__func__", None) is type(module).forward


def is_as_written(kind: type, *names: str) -> bool:
    """Whether methods of a class are those of its own file: some exchange them for everybody."""
    for name in names:
        method = getattr(kind, name)
        if method.__module__ != kind.__module__ or method.__qualname__ != f"{kind.__qualname__}.{name}":
            return False
    return True


def can_stand_in(module: torch.nn.Module) -> bool:
    """Whether nothing else stands in for the forward of a model or of its layers: offloading, caches, casts."""
    if not is_free(module) and not isinstance(vars(module)["forward"], FastForward):
        return False
    return not any(hasattr(part, "_hf_hook") or hasattr(part, "_diffusers_hook") for part in module.modules())


def find_fast_forward(module: Any) -> FastForward | None:
    """What stands in for a model's forward, if it is captured."""
    found = vars(module).get("forward") if isinstance(module, torch.nn.Module) else None
    return found if isinstance(found, FastForward) else None


def find_stranger(module: torch.nn.Module) -> str:
    """What in a model is of a kind whose Python may do anything between two calls: replayed, it would not."""
    for part in module.modules():
        processor = vars(part).get("processor")
        kinds = [type(part), *([type(processor)] if processor is not None else [])]
        for kind in kinds:
            if not is_known(kind):
                return kind.__name__
        forward = vars(part).get("forward")
        if forward is not None and not is_free(part) and not is_our_forward(forward):
            return f"another forward of {type(part).__name__}"
        for name in find_own_methods(part):
            return f"another {name} of {type(part).__name__}"
    return ""


def is_known(one: Any) -> bool:
    """Whether a class or a function is of a library whose pipelines were all run both ways."""
    module = getattr(one, "__module__", None) or type(one).__module__
    return str(module).partition(".")[0] in _KNOWN


def find_hooks(parts: Iterable[torch.nn.Module]) -> list[dict[int, Any]]:
    """The tables of hooks of some layers, and those of hooks for all layers; they stay the same, and are filled."""
    tables = [table for part in parts for table in (part._forward_hooks, part._forward_pre_hooks)]
    return [*tables, everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks]


def find_own_methods(module: torch.nn.Module) -> list[str]:
    """The methods that one layer has and others of its class have not, its forward apart."""
    kind = type(module)
    return [
        name
        for name, value in vars(module).items()
        if callable(value) and name != "forward" and callable(getattr(kind, name, None))
    ]


def release(module: torch.nn.Module) -> None:
    """Let a model run as before, and let go of its recordings."""
    found = find_fast_forward(module)
    if found is not None:
        found.forget()
        del module.forward  # the class's own is found again
