"""Translation: torch's own function seam over a whole script, with the device's name mapped in every call.

A pipeline that is placed has a seam of its own while it runs. This one is for everything around it: factories, moves,
and denoising loops that are written by hand.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from anyaccel.backends.torch_device import is_host, is_on
from anyaccel.cuda_scripts.migration import Migration, is_device_aware_library
from anyaccel.emulator.torch_patches import apply_patch, replace_by
from anyaccel.runtime.workarounds import noise
from anyaccel.runtime.workarounds.function_modes import Handler, PipelineFunctionMode, make_pipeline_function_mode
from anyaccel.upstream.torch_internals import find_property

__all__ = ["ScriptFunctionMode", "install_function_mode"]

Tensor = torch.Tensor
Named = dict[str, Any]
_BUILDERS = ("tensor", "as_tensor", "asarray", "from_dlpack")


class ScriptFunctionMode(PipelineFunctionMode):
    """What a script calls of torch's: the device is mapped first, then it is repaired as in any pipeline."""

    def __init__(self, migration: Migration, seam: PipelineFunctionMode) -> None:
        draws = noise.make_handlers(migration.device, {})
        behind = {func: _draw_there(handler) for func, handler in seam.handlers.items() if func in draws}
        super().__init__({**seam.handlers, **behind}, seam.meeting)
        self.migration = migration
        self.spellings: dict[Any, Callable[[Any, tuple[Any, ...], Named], tuple[Any, tuple[Any, ...], Named]]] = {
            Tensor.to: self._move,
            getattr(Tensor, migration.foreign): self._move_there,
            Tensor.new_tensor: self._make,
        }
        self.answers: dict[Any, Callable[[Any, tuple[Any, ...], Named], Any]] = {
            Tensor.pin_memory: self._pin,
        }
        self.question = find_property(f"is_{migration.foreign}")

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One call of torch's."""
        spelling = self.spellings.get(func)
        if spelling is not None:
            func, args, kwargs = spelling(func, args, kwargs or {})
        elif kwargs and kwargs.get("device") is not None:
            func, args, kwargs = self._make(func, args, kwargs)
        elif func == self.question:
            return self._is_there(args[0], sys._getframe(1))
        elif func in self.answers:
            return self.answers[func](func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)

    def _make(self, func: Any, args: tuple[Any, ...], kwargs: Named) -> tuple[Any, tuple[Any, ...], Named]:
        """`torch.zeros(…, device=…)`, and whatever else names a device by keyword."""
        place = self.migration.translate(kwargs.get("device"), getattr(func, "__name__", "device="))
        return func, args, {**kwargs, "device": place}

    def _move(self, func: Any, args: tuple[Any, ...], kwargs: Named) -> tuple[Any, tuple[Any, ...], Named]:
        """`tensor.to(…)`: the device comes first, if it is not named."""
        if len(args) > 1:
            args = (args[0], self.migration.translate(args[1], "to"), *args[2:])
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self.migration.translate(kwargs["device"], "to")}
        return func, args, kwargs

    def _move_there(self, func: Any, args: tuple[Any, ...], kwargs: Named) -> tuple[Any, tuple[Any, ...], Named]:
        """The method that is named after the device."""
        kwargs = dict(kwargs)
        asked = args[1] if len(args) > 1 else kwargs.pop("device", None)
        name = f"{self.migration.foreign}()"
        place = self.migration.translate(self.migration.foreign if asked is None else asked, name)
        kwargs.pop("device", None)
        if len(args) > 2:
            kwargs["non_blocking"] = args[2]
        return Tensor.to, (args[0], place), kwargs

    def _is_there(self, tensor: Any, frame: Any) -> bool:
        """Whether a tensor lies on the accelerator, which a script asks by the name that it knows."""
        return not is_device_aware_library(frame) and is_on(tensor.device, self.migration.device.type)

    def _pin(self, func: Any, args: tuple[Any, ...], kwargs: Named) -> Any:
        """Memory that is pinned is copied sooner; where a device has none, the tensor itself does."""
        try:
            return func(*args[:1])
        except (RuntimeError, NotImplementedError):
            self.migration.note("memory of the host is not pinned here")
            return args[0]


def install_function_mode(migration: Migration) -> ScriptFunctionMode:
    """Enter the seam for this thread, and for every thread that is started from now on."""
    seam = make_pipeline_function_mode(migration.make_plan(), migration.device)
    for name in _BUILDERS:
        apply_patch(f"torch.{name}", lambda build: _build(build, migration), "scripts")
    apply_patch("torch.Tensor.record_stream", replace_by(_stay_on_stream), "scripts")

    def start_with_seam(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        @functools.wraps(start)
        def start_inside(self: threading.Thread) -> None:
            run = self.run

            def run_inside() -> None:
                with ScriptFunctionMode(migration, seam):
                    run()

            self.run = run_inside  # type: ignore[method-assign]
            start(self)

        return start_inside

    apply_patch("threading.Thread.start", start_with_seam, "scripts")
    entered = ScriptFunctionMode(migration, seam)
    entered.__enter__()
    return entered


def _draw_there(handler: Handler) -> Handler:
    """A draw for the device is made as the seam makes it; one for the host may be a pipeline's own, and stays whole."""

    def draw(func: Any, args: tuple[Any, ...], kwargs: Named) -> Any:
        place = kwargs.get("device") or next((value.device for value in args if isinstance(value, Tensor)), None)
        on_host = is_host(torch.device(place or torch.get_default_device()))
        return func(*args, **kwargs) if on_host else handler(func, args, kwargs)

    return draw


def _stay_on_stream(self: Tensor, stream: Any) -> None:
    """There is one stream, and no memory is given away before its work is done; torch would look at its type first."""


def _build(build: Callable[..., Any], migration: Migration) -> Callable[..., Any]:
    """`torch.tensor([1], device=…)`: a virtual device answers it before any seam does."""

    @functools.wraps(build)
    def build_there(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = migration.translate(kwargs["device"], build.__name__)
        return build(*args, **kwargs)

    return build_there
