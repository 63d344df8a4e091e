"""Device graphs: a denoiser's work is captured once per input shape and replayed.

A captured graph reads its inputs from fixed buffers and writes its outputs to others: inputs are copied in and outputs
out. It is replayed only if its first replay gave the eager result, and only while the module, the torch modes and the
numeric settings are those of the capture. Anything else runs the forward beneath, and so does a capture that fails.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch

from anyaccel.backends.driver import Recorder
from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.errors import first_line
from anyaccel.runtime.speed.module_fingerprint import LayerHooks, ModuleFingerprint, find_custom_code
from anyaccel.runtime.workarounds.function_modes import ModelFunctionMode, PipelineFunctionMode
from anyaccel.upstream.torch_internals import (
    count_dispatch_modes,
    count_function_modes,
    is_autocast_enabled,
    read_function_modes,
    tree_flatten,
    tree_map,
    tree_unflatten,
)

__all__ = ["GraphCapture"]

_LOG = logging.getLogger(__name__)

Forward = Callable[..., Any]
_MAX_SHAPES = 8
"""Shapes that are captured per module; a pipeline with ever new shapes runs without."""
_PLAIN = (str, int, float, bool, type(None), torch.dtype, torch.device)


@dataclass
class _Shape:
    """What is known about one input shape."""

    runs: int = 0
    refused: str = ""
    """Why it is not captured."""
    inputs: list[torch.Tensor] = field(default_factory=list)
    output: Any = None
    replay: Callable[[], None] | None = None

    def drop(self) -> None:
        """Release the graph's buffers."""
        self.replay, self.output, self.inputs = None, None, []


class GraphCapture:
    """The override that captures and replays a module's forward."""

    def __init__(self, module: torch.nn.Module, recorder: Recorder, synchronize: Callable[[], None]) -> None:
        self.recorder, self.synchronize = recorder, synchronize
        self.status = ""
        """What was found, for the run report."""
        self._module = weakref.ref(module)
        self._shapes: dict[Any, _Shape] = {}
        self._captured_of: ModuleFingerprint | None = None
        self._settings: Any = None
        self._hooks: LayerHooks | None = None
        self._custom_code = ""
        self._lock, self._running = threading.RLock(), False

    @property
    def captured_shapes(self) -> int:
        """How many shapes are captured."""
        return sum(shape.replay is not None for shape in self._shapes.values())

    def begin_call(self) -> None:
        """Look at the module before a call of its pipeline: what was captured of another state is dropped."""
        if self._captured_of is None or not self._holds():
            self._observe()

    def forget(self) -> None:
        """Drop all graphs and the memory that they hold."""
        self._shapes.clear()

    def __call__(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the module's output, replayed where its shape is captured."""
        obstacle = self._find_obstacle()
        if obstacle is not None:
            self.status = obstacle or self.status
            return forward(*args, **kwargs)
        with self._lock:
            if self._running:  # a module that calls itself
                return forward(*args, **kwargs)
            self._running = True
            try:
                return self._run_or_replay(forward, args, kwargs)
            finally:
                self._running = False

    def _find_obstacle(self) -> str | None:
        """Return why this call must not be captured or replayed; empty where that is no news, None if nothing is."""
        module = self._module()
        if torch.is_grad_enabled() or is_autocast_enabled() or module is None:
            return ""
        if self._custom_code:
            return f"it contains {self._custom_code}, whose Python code a replay would not run"
        if self._hooks is not None and self._hooks.any():
            return "layers have hooks"
        if module.training:
            return "the model is in training mode"
        if count_dispatch_modes() or _has_foreign_modes():
            return "a torch mode is active"
        return None

    def _run_or_replay(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        if not self._holds():  # a callback or the pipeline itself changed the module
            self._observe()
        leaves, spec = tree_flatten((args, kwargs))
        shape = self._find(leaves, spec)
        if shape is None or shape.refused:
            return forward(*args, **kwargs)
        if shape.replay is not None:
            try:
                return self._replay(shape, _find_tensors(leaves))
            except RuntimeError as error:
                self._refuse(shape, error)
                return forward(*args, **kwargs)
        shape.runs += 1
        if shape.runs < self.recorder.warm:
            return forward(*args, **kwargs)
        if shape.runs == self.recorder.warm:
            return self._time(shape, forward, args, kwargs)
        return self._capture(shape, forward, leaves, spec)

    def _holds(self) -> bool:
        fingerprint = self._captured_of
        return fingerprint is not None and fingerprint.holds() and self._settings == self.recorder.read_settings()

    def _observe(self) -> None:
        """Forget all graphs, and take the module as it is now."""
        self.forget()
        module = self._module()
        if module is not None:
            self._captured_of = ModuleFingerprint(module)
            self._settings = self.recorder.read_settings()
            self._hooks = LayerHooks(module)
            foreign = self._hooks.has_foreign_forward()
            self._custom_code = "another library's hooks" if foreign else find_custom_code(module)

    def _find(self, leaves: list[Any], spec: Any) -> _Shape | None:
        try:
            key = (spec, tuple(_describe(leaf) for leaf in leaves))
            known = self._shapes.get(key)
        except (TypeError, RuntimeError):  # an argument that cannot be compared
            return None
        if known is None and len(self._shapes) < _MAX_SHAPES:
            known = self._shapes[key] = _Shape()
        return known

    def _time(self, shape: _Shape, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Run once, timed; a module that keeps state or writes to its inputs is not captured."""
        fingerprint, given = self._captured_of, tree_flatten((args, kwargs))[0]
        self.synchronize()
        start = time.perf_counter()
        output = forward(*args, **kwargs)
        launched = time.perf_counter()
        self.synchronize()
        done = time.perf_counter()
        if fingerprint is None or not fingerprint.holds():
            shape.refused = "the model keeps state between runs"
        elif not _are_same(given, tree_flatten((args, kwargs))[0]):
            shape.refused = "the model writes to its arguments"
        figures = f"launching takes {1e3 * (launched - start):.1f} of {1e3 * (done - start):.1f} ms"
        self.status = shape.refused or figures
        return output

    def _capture(self, shape: _Shape, forward: Forward, leaves: list[Any], spec: Any) -> Any:
        """Capture a shape, and keep the graph if it gives the eager result."""
        given = _find_tensors(leaves)
        eager = _run(forward, spec, leaves, given)
        with torch.inference_mode(False), torch.no_grad():  # buffers that can be written to in any mode
            shape.inputs = [tensor.clone() for tensor in given]
        kept = False
        try:
            shape.output, shape.replay = self.recorder.record(lambda: _run(forward, spec, leaves, shape.inputs))
            if not all(isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in tree_flatten(eager)[0]):
                raise RuntimeError("its output may hold tensors that are not visible")
            if not _is_close(self._replay(shape, given), eager, self.recorder.off):
                raise RuntimeError("a replay gave another result")
            kept = True
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._refuse(shape, error)
        finally:
            if not kept:  # also after Ctrl-C
                shape.drop()
        return _copy(eager)

    def _refuse(self, shape: _Shape, error: Exception) -> None:
        _LOG.debug("anyaccel: a graph cannot be captured: %r", error)
        self.status = shape.refused = f"it cannot be captured: {first_line(error)}"
        shape.drop()

    @staticmethod
    def _replay(shape: _Shape, given: list[torch.Tensor]) -> Any:
        for buffer, tensor in zip(shape.inputs, given, strict=True):
            buffer.copy_(tensor)
        assert shape.replay is not None
        shape.replay()
        return _copy(shape.output)


def _has_foreign_modes() -> bool:
    """Return whether a `TorchFunctionMode` other than ours is active: a replay would not run it."""
    if not count_function_modes():
        return False
    return any(not isinstance(mode, PipelineFunctionMode | ModelFunctionMode) for mode in read_function_modes())


def _run(forward: Forward, spec: Any, leaves: list[Any], tensors: list[torch.Tensor]) -> Any:
    """Run a forward with other tensors instead of those among its arguments."""
    following = iter(tensors)
    filled = [next(following) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(filled, spec)
    return forward(*args, **kwargs)


def _describe(leaf: Any) -> Any:
    """Return what a graph depends on: of a tensor shape, strides, dtype and device, of anything else its value."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    if not isinstance(leaf, _PLAIN):
        raise TypeError(f"{type(leaf).__name__} may hold tensors that are not visible")
    return type(leaf), leaf


def _are_same(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(leaves) == len(others) and all(map(is_, leaves, others))


def _copy(output: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, output)


def _find_tensors(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _is_close(replayed: Any, eager: Any, tolerance: float) -> bool:
    """Return whether a replay gives the eager result within a relative error of the norm; NaN matches NaN."""
    for one, other in zip(tree_flatten(replayed)[0], tree_flatten(eager)[0], strict=True):
        if not isinstance(one, torch.Tensor):
            continue
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return False
            continue
        error = (one.float() - other.float()).norm() / other.float().norm().clamp_min(1e-20)
        if not bool(error <= tolerance) and bool(torch.isfinite(other).all()):
            return False
    return True
