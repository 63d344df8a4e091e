"""Wrapper that runs concurrent pipeline calls on lightweight copies, which share the same models."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from anyaccel.backends.device_type_checks import is_host
from anyaccel.forward_overrides import Slot, get_override, remove_override, set_override
from anyaccel.runtime.introspection import find_models
from anyaccel.runtime.module_fingerprint import ModuleFingerprint
from anyaccel.runtime.placement_state import Placement, find_placement
from anyaccel.runtime.speed.graph_capture import GraphCapture
from anyaccel.runtime.workarounds.nan_check import RecordEvent
from anyaccel.server.batching.batched_args import CallArgs
from anyaccel.server.batching.batched_forward import BatchedForward
from anyaccel.server.batching.pipeline_copy import light_copy, must_run_alone
from anyaccel.server.batching.step_batcher import StepBatcher
from anyaccel.server.batching.turns import Turns

__all__ = ["SharedPipeline"]

_DEFAULT_MAX_CALLS = 8


class SharedPipeline:
    """Wrapper that lets several threads call one pipeline at the same time.

    Concurrent calls to a model are batched if its batched and unbatched results match. Calls of a pipeline that
    changes its models during a call, or an attribute that cannot be copied, run one after another.
    """

    def __init__(self, pipe: Any, *, max_calls: int = _DEFAULT_MAX_CALLS, max_wait_s: float | None = None) -> None:
        self.pipe = pipe
        self.serial = must_run_alone(light_copy(pipe))
        """Whether calls run one after another."""
        self._turns = Turns()
        placement = find_placement(pipe)
        exact = placement is not None and placement.opened.driver.has_events
        self.batcher = StepBatcher(max_calls=max_calls, max_wait_s=max_wait_s, mark=_find_mark(placement), exact=exact)
        denoisers = placement.denoisers if placement is not None else ()
        self.forwards = {name: self._install(module, name in denoisers) for name, module in _batchable_modules(pipe)}

    def run(self, call: Mapping[str, Any], pipe_copy: Any = None) -> Any:
        """Call the pipeline with the keyword arguments in `call` and return its output; thread-safe.

        The call runs on `pipe_copy`, a lightweight copy of this pipeline or of another pipeline with the
        same models. By default, a new copy is created.
        """
        # diffusers sets the scale of adapters on the models themselves (utils/peft_utils.py, `scale_lora_layers`).
        scales_adapters = any(name.endswith("attention_kwargs") and value for name, value in call.items())
        pipe_copy = light_copy(self.pipe) if pipe_copy is None else pipe_copy
        alone = self.serial or scales_adapters or must_run_alone(pipe_copy)
        with self._turns.take(alone=alone), self.batcher.participating():
            return pipe_copy(**call)

    def warm_up(self, first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, bool]:
        """Enable batching for each model if its batched and unbatched results match.

        The models are tested with the inputs that they receive in the pipeline calls `first` and `second`.
        If a model changes during a call, later calls run one after another. Returns a dict that maps each
        model's name to whether batching is enabled for it.
        """
        recorded: dict[str, list[CallArgs]] = {name: [] for name in self.forwards}
        with self._recording_args(recorded):
            self.run(first)
            # After the first call, in which models may compute values that they keep.
            for forward in self.forwards.values():
                forward.fingerprint = ModuleFingerprint(forward.module)
            self.run(second)
        self.serial |= any(forward.has_changed() for forward in self.forwards.values())
        placement = find_placement(self.pipe)
        # On devices that compute wrong results for batches, the plan limits a call to one image.
        reliable = not self.serial and (placement is None or placement.plan.images_per_call.value != 1)
        for name, forward in self.forwards.items():
            forward.enabled = reliable and forward.matches_unbatched(recorded[name])
            forward.example_args = recorded[name][0] if recorded[name] and forward.enabled else None
        return {name: forward.enabled for name, forward in self.forwards.items()}

    def enable(self, enabled: Mapping[str, bool]) -> None:
        """Enable or disable batching for each model; `enabled` maps each model's name to a boolean."""
        for name, forward in self.forwards.items():
            forward.enabled = enabled[name]

    def prepare_batch_sizes(self, calls: int) -> None:
        """Run each batched model in advance with batches of 1, 2, 4, ... calls, up to `calls` calls.

        Later batches are padded to one of these sizes. This is for devices that compile one graph per input
        shape.
        """
        sizes = [1]
        while sizes[-1] < calls:
            sizes.append(min(calls, 2 * sizes[-1]))
        for forward in self.forwards.values():
            if forward.example_args is not None:
                forward.prepare_batch_sizes(sizes)

    @contextmanager
    def _recording_args(self, recorded: dict[str, list[CallArgs]]) -> Iterator[None]:
        """Disable batching inside the `with` block, and record the arguments of model calls in `recorded`.

        For each pipeline call, only the first call to each model is recorded.
        """
        for name, forward in self.forwards.items():
            forward.enabled, forward.recorded_args = False, recorded[name]
        try:
            yield
        finally:
            for forward in self.forwards.values():
                forward.recorded_args = None

    def close(self) -> None:
        """Stop batching and restore each model's original forward method."""
        for forward in self.forwards.values():
            remove_override(forward.module, Slot.BATCHING)

    def drop_stale_captures(self) -> None:
        """Discard the captured device graphs of each model that has changed since the capture.

        Must not be called while a pipeline call is running.
        """
        for forward in self.forwards.values():
            capture = get_override(forward.module, Slot.CAPTURE)
            if isinstance(capture, GraphCapture):
                capture.begin_call()

    def _install(self, module: torch.nn.Module, is_denoiser: bool) -> BatchedForward:
        forward = BatchedForward(module, self.batcher, enabled=False, is_denoiser=is_denoiser)
        set_override(module, Slot.BATCHING, forward)
        return forward


def _find_mark(placement: Placement | None) -> RecordEvent | None:
    """Return a function that records a device event, or None if the pipeline is not on an accelerator."""
    if placement is None or is_host(placement.opened.torch_device):
        return None
    return functools.partial(placement.opened.driver.record_event, placement.opened.index)


def _batchable_modules(pipe: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, model in find_models(pipe).items():
        decoder = getattr(model, "decoder", None)
        if hasattr(model, "decode") and isinstance(decoder, torch.nn.Module):
            # Pipelines call `vae.decode`, never `vae.forward`: batch at the decoder inside it.
            yield f"{name}.decoder", decoder
        elif not hasattr(model, "generate"):  # a language model calls itself once per generated token
            yield name, model
