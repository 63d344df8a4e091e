"""Device graphs, which capture a denoiser's forward once per input shape and replay it.

As with CUDA graphs, a captured graph reads its inputs from fixed buffers and writes its outputs to
fixed buffers, so inputs are copied in and outputs are copied out. A graph is replayed only if its
first replay matched the eager result, and only while the module, the torch modes and the numeric
settings are the same as during capture. Otherwise, the eager forward runs.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any

import torch

from anyaccel.backends.device_type_checks import is_host
from anyaccel.backends.driver import Recorder
from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.errors import first_line
from anyaccel.runtime.library_code import find_user_code_in_model
from anyaccel.runtime.module_fingerprint import LayerHooks, ModuleFingerprint
from anyaccel.runtime.workarounds.function_modes import has_foreign_modes
from anyaccel.upstream.torch_internals import (
    find_default_device,
    is_autocast_enabled,
    tree_flatten,
    tree_map,
    tree_unflatten,
)

__all__ = ["GraphCapture"]

_LOG = logging.getLogger(__name__)

Forward = Callable[..., Any]
# Shapes captured per module. Each holds its own buffers; a pipeline with many shapes runs the others eagerly.
_MAX_SHAPES = 8
_PLAIN_TYPES = (str, int, float, bool, type(None), torch.dtype, torch.device)


@dataclass
class _CapturedShape:
    """The capture state for one input shape: the number of warmup runs, and the graph or a failure."""

    runs: int = 0
    failure: str = ""
    """Why the shape is not captured."""
    inputs: list[torch.Tensor] = field(default_factory=list)
    output: Any = None
    replay: Callable[[], None] | None = None

    def drop(self) -> None:
        """Release the graph with its input and output buffers."""
        self.replay, self.output, self.inputs = None, None, []


class GraphCapture:
    """A `forward` override that captures device graphs and replays them."""

    def __init__(self, module: torch.nn.Module, recorder: Recorder, synchronize: Callable[[], None]) -> None:
        self.recorder, self.synchronize = recorder, synchronize
        self.status = ""
        """The outcome, for the run report."""
        self._module = weakref.ref(module)
        self._shapes: dict[Any, _CapturedShape] = {}
        self._fingerprint: ModuleFingerprint | None = None
        self._settings: Any = None
        self._hooks: LayerHooks | None = None
        self._obstacle = ""
        self._lock, self._running = threading.RLock(), False

    @property
    def captured_shapes(self) -> int:
        """The number of input shapes that have a captured graph."""
        return sum(shape.replay is not None for shape in self._shapes.values())

    @property
    def failed(self) -> bool:
        """Whether some input shape cannot be captured."""
        return any(shape.failure for shape in self._shapes.values())

    def begin_call(self) -> None:
        """Drop all graphs if the module has changed; called at the start of each pipeline call."""
        if self._fingerprint is None or not self._is_unchanged():
            self._reset()

    def forget(self) -> None:
        """Release all captured graphs and their memory."""
        self._shapes.clear()

    def __call__(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replay the graph for the input shape; if there is none, run the forward, capturing it if possible."""
        obstacle = self._find_obstacle()
        if obstacle is not None:
            self.status = obstacle or self.status
            return forward(*args, **kwargs)
        with self._lock:  # a graph has one set of buffers, so threads must take turns
            if self._running:  # a module that calls itself: captures cannot be nested
                return forward(*args, **kwargs)
            self._running = True
            try:
                return self._run_or_replay(forward, args, kwargs)
            finally:
                self._running = False

    def _find_obstacle(self) -> str | None:
        """Return the reason why this call must run eagerly, or None; an empty reason is not reported."""
        module = self._module()
        if torch.is_grad_enabled() or is_autocast_enabled() or module is None:
            return ""
        if self._obstacle:
            return self._obstacle
        if self._hooks is not None and self._hooks.any():
            return "some layers have hooks"
        if module.training:
            return "the model is in training mode"
        if has_foreign_modes():
            return "another torch function or dispatch mode is active"
        return None

    def _run_or_replay(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        shape = self._find_shape(leaves, spec)
        if shape is None or shape.failure:
            return forward(*args, **kwargs)
        if shape.replay is not None and self._fingerprint is not None and self._fingerprint.holds_memory():
            try:
                output = self._replay(shape, _find_tensors(leaves))
            except RuntimeError as error:
                self._give_up(shape, error)
                return forward(*args, **kwargs)
            # Compared while the device runs the graph, which writes only to its own buffers: a comparison before the
            # replay would let the device wait after schedulers that synchronize at every step, such as UniPC.
            if self._is_unchanged():
                return output
        if not self._is_unchanged():  # a callback or the pipeline itself changed the module
            self._reset()
            shape = self._find_shape(leaves, spec)
            if shape is None:
                return forward(*args, **kwargs)
        # The first runs are eager: libraries choose kernels and allocate workspaces in them, which a capture cannot.
        shape.runs += 1
        if shape.runs < self.recorder.warmup_runs:
            return forward(*args, **kwargs)
        if shape.runs == self.recorder.warmup_runs:
            return self._time(shape, forward, args, kwargs)
        return self._capture(shape, forward, leaves, spec)

    def _is_unchanged(self) -> bool:
        fingerprint = self._fingerprint
        return fingerprint is not None and fingerprint.holds() and self._settings == self._read_settings()

    def _read_settings(self) -> Any:
        return find_default_device(), self.recorder.read_settings()

    def _reset(self) -> None:
        """Release all graphs and take a new fingerprint of the module."""
        self.forget()
        module = self._module()
        if module is not None:
            self._fingerprint = ModuleFingerprint(module)
            self._settings = self._read_settings()
            self._hooks = LayerHooks(module)
            self._obstacle = self._check_model(module, self._hooks)

    def _check_model(self, module: torch.nn.Module, hooks: LayerHooks) -> str:
        """Return the reason why a model cannot be captured, or an empty string."""
        if not all(self._is_captured(weight) for weight in chain(module.parameters(), module.buffers())):
            return "some weights are on another device"
        custom_code = "another library's hooks" if hooks.has_foreign_forward() else find_user_code_in_model(module)
        return f"the model contains {custom_code}, and a replay does not run Python code" if custom_code else ""

    def _is_captured(self, tensor: torch.Tensor) -> bool:
        """Return whether operations on a tensor are captured; the values of CPU tensors would become constants."""
        return self.recorder.device_type in ("", tensor.device.type)

    def _find_shape(self, leaves: list[Any], spec: Any) -> _CapturedShape | None:
        tensors = _find_tensors(leaves)
        try:
            key = (spec, tuple(_make_leaf_key(leaf) for leaf in leaves), _find_repeated(tensors))
            shape = self._shapes.get(key)
        except (TypeError, RuntimeError):  # an argument that cannot be compared
            return None
        if shape is None and len(self._shapes) < _MAX_SHAPES and all(map(self._is_captured, tensors)):
            shape = self._shapes[key] = _CapturedShape()
        return shape

    def _time(self, shape: _CapturedShape, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Run the forward and time it, and check whether it can be captured.

        A module that keeps state between runs, modifies its inputs or draws random numbers is not captured.
        """
        fingerprint, leaves = self._fingerprint, tree_flatten((args, kwargs))[0]
        tensors = _find_tensors(leaves)
        values, random_states = [tensor.clone() for tensor in tensors], _read_random_states(tensors)
        self.synchronize()
        start = time.perf_counter()
        output = forward(*args, **kwargs)
        launched = time.perf_counter()
        self.synchronize()
        done = time.perf_counter()
        if fingerprint is None or not fingerprint.holds():
            shape.failure = "the model keeps state between runs"
        elif not _are_same(leaves, tree_flatten((args, kwargs))[0]) or not all(map(_is_equal, tensors, values)):
            shape.failure = "the model modifies its arguments"
        elif not all(map(torch.equal, random_states, _read_random_states(tensors))):
            # A capture runs the model twice more, so later random numbers would differ.
            shape.failure = "the model draws random numbers"
        # A large share of launch time means that replaying will help.
        timing = f"kernel launches take {1e3 * (launched - start):.1f} of the {1e3 * (done - start):.1f} ms of a run"
        self.status = shape.failure or timing
        return output

    def _capture(self, shape: _CapturedShape, forward: Forward, leaves: list[Any], spec: Any) -> Any:
        """Capture a graph, keep it if its first replay matches the eager result, and return that result."""
        tensors = _find_tensors(leaves)
        eager = _run(forward, spec, leaves, tensors)
        # Inference tensors cannot be written to outside of inference mode, where a later call may run.
        with torch.inference_mode(False), torch.no_grad():
            buffers = {id(tensor): tensor.clone() for tensor in tensors}
            shape.inputs = [buffers[id(tensor)] for tensor in tensors]
        captured = False
        try:
            shape.output, shape.replay = self.recorder.record(lambda: _run(forward, spec, leaves, shape.inputs))
            for leaf in tree_flatten(eager)[0]:
                if not isinstance(leaf, (torch.Tensor, *_PLAIN_TYPES)):
                    raise RuntimeError(f"the output has the type {type(leaf).__name__}, which may contain tensors")
            if not _is_close(self._replay(shape, tensors), eager, self.recorder.tolerance):
                raise RuntimeError("the replay does not match the eager result")
            captured = True
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._give_up(shape, error)
        finally:
            if not captured:  # also after Ctrl-C: a half-captured shape must not be replayed
                shape.drop()
        return _copy(eager)

    def _give_up(self, shape: _CapturedShape, error: Exception) -> None:
        _LOG.debug("anyaccel: graph capture failed: %r", error)
        self.status = shape.failure = f"capture failed: {first_line(error)}"
        shape.drop()

    @staticmethod
    def _replay(shape: _CapturedShape, tensors: list[torch.Tensor]) -> Any:
        for buffer, tensor in zip(shape.inputs, tensors, strict=True):
            buffer.copy_(tensor)
        assert shape.replay is not None
        shape.replay()
        return _copy(shape.output)  # the next replay overwrites the output buffers


def _run(forward: Forward, spec: Any, leaves: list[Any], tensors: list[torch.Tensor]) -> Any:
    """Run a forward with its tensor arguments replaced by the given tensors."""
    remaining = iter(tensors)
    replaced = [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(replaced, spec)
    return forward(*args, **kwargs)


def _make_leaf_key(leaf: Any) -> Any:
    """Return a hashable key for an argument; for a tensor, its shape, strides, dtype and device.

    Raise `TypeError` for an argument of another type that may contain tensors.
    """
    if isinstance(leaf, torch.Tensor):
        return type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    if not isinstance(leaf, _PLAIN_TYPES):
        raise TypeError(f"cannot compare an argument of type {type(leaf).__name__}, which may contain tensors")
    return type(leaf), leaf


def _find_repeated(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """Return the position at which each tensor is first passed: models may compare their arguments with `is`."""
    identities = [id(tensor) for tensor in tensors]
    return tuple(map(identities.index, identities))


def _read_random_states(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the states of the default generators of the CPU and of the tensors' devices."""
    devices = {tensor.device for tensor in tensors if not is_host(tensor.device)}
    return [
        torch.get_rng_state(),
        *(torch.get_device_module(device).get_rng_state(device) for device in sorted(devices, key=str)),
    ]


def _is_equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same values, counting NaN as equal to NaN."""
    if torch.equal(tensor, other):
        return True
    return tensor.is_floating_point() and torch.allclose(tensor, other, rtol=0, atol=0, equal_nan=True)


def _are_same(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(leaves) == len(others) and all(map(is_, leaves, others))


def _copy(output: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, output)


def _find_tensors(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _is_close(replayed: Any, eager: Any, tolerance: float) -> bool:
    """Return whether a replay matches the eager result within a relative tolerance.

    An eager result with NaN or Inf always counts as a match, because the NaN check reports it.
    """
    for actual, expected in zip(tree_flatten(replayed)[0], tree_flatten(eager)[0], strict=True):
        if not isinstance(actual, torch.Tensor):
            continue
        if not actual.is_floating_point():
            if not torch.equal(actual, expected):
                return False
            continue
        error = (actual.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-20)
        if not bool(error <= tolerance) and bool(torch.isfinite(expected).all()):
            return False
    return True
