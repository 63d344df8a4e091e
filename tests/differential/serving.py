"""Pipeline calls through step batching, each together with a concurrent call, as in `anyaccel serve`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from anyaccel.forward_overrides import Slot, remove_override, set_override
from anyaccel.runtime.placement_state import find_placement
from anyaccel.server.batching.shared_pipeline import SharedPipeline

__all__ = ["ServedPipeline", "make_companion"]

_CALLBACKS = ("callback", "callback_steps", "callback_on_step_end", "callback_on_step_end_tensor_inputs")
_WAIT_S = 60.0


def make_companion(arguments: dict[str, Any], seed: int = 100) -> dict[str, Any]:
    """Return the arguments of another request of the same kind: other seeds, no callbacks."""
    generator = arguments.get("generator")
    count = len(generator) if isinstance(generator, list) else 1
    generators = [torch.Generator().manual_seed(seed + index) for index in range(count)]
    others = {name: value for name, value in arguments.items() if name not in _CALLBACKS}
    return {**others, "generator": generators if isinstance(generator, list) else generators[0]}


class ServedPipeline:
    """Runs each call of a pipeline together with a second request.

    As the server does, each call runs on a light copy of the pipeline, and each model is batched only if its batched
    results match. The denoiser's first calls of both requests wait for each other.
    """

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.calls = 0
        self.largest_batch = 0

    def call(self, arguments: dict[str, Any]) -> Any:
        """Call the pipeline in this thread, together with a companion in another one; return its output."""
        self.calls += 1
        with torch.random.fork_rng(devices=[]):
            shared = SharedPipeline(self.pipe, max_wait_s=_WAIT_S)
            try:
                shared.warm_up(make_companion(arguments, 200), make_companion(arguments, 300))
            except Exception:  # noqa: BLE001 - the call itself raises the same error
                shared.close()
                shared = SharedPipeline(self.pipe, max_wait_s=_WAIT_S)
        barrier = threading.Barrier(2)
        denoisers = self._hold_first_calls(shared, barrier)
        companion = threading.Thread(target=self._run_companion, args=(shared, make_companion(arguments), barrier))
        companion.start()
        try:
            return shared.run(arguments)
        finally:
            barrier.abort()
            companion.join(_WAIT_S)
            sizes = [forward.stats.largest for forward in shared.forwards.values()]
            self.largest_batch = max(self.largest_batch, *sizes)
            for module in denoisers:
                remove_override(module, Slot.RECORDING)
            shared.close()

    @staticmethod
    def _run_companion(shared: SharedPipeline, arguments: dict[str, Any], barrier: threading.Barrier) -> None:
        try:
            shared.run(arguments)
        except Exception:  # noqa: BLE001 - the request of the usage raises the same error
            pass
        finally:
            barrier.abort()

    @staticmethod
    def _hold_first_calls(shared: SharedPipeline, barrier: threading.Barrier) -> list[torch.nn.Module]:
        """Make the first denoiser calls of both requests wait for each other; return the denoisers."""
        placement = find_placement(shared.pipe)
        denoisers = placement.denoisers if placement is not None else ()
        started: set[int] = set()
        batcher = shared.batcher

        def make_wait(batched: Any) -> Callable[..., Any]:
            def wait(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                thread_id = threading.get_ident()
                if thread_id not in started and batcher.is_participating():
                    started.add(thread_id)
                    with batcher.changed:
                        batcher.active_calls[thread_id] = batched  # from now on the other request waits for this one
                        batcher.changed.notify_all()
                    with suppress(threading.BrokenBarrierError):  # the other request has ended
                        barrier.wait(_WAIT_S)
                return forward(*args, **kwargs)

            return wait

        forwards = [shared.forwards[name] for name in denoisers if name in shared.forwards]
        for batched in forwards:
            set_override(batched.module, Slot.RECORDING, make_wait(batched))
        return [batched.module for batched in forwards]
