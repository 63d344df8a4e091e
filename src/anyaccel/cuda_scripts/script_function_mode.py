"""The `__torch_function__` mode for a whole script, which maps the device in every torch call.

A placed pipeline has its own mode while it runs. This mode covers the code around it: tensor factories, device moves
and hand-written denoising loops.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from anyaccel.backends.device_type_checks import is_host, is_on
from anyaccel.cuda_scripts.migration import Migration, is_device_aware_library
from anyaccel.emulator.torch_patch_registry import apply_patch, is_patched, replace_by
from anyaccel.runtime.workarounds import noise
from anyaccel.runtime.workarounds.function_modes import Handler, PipelineFunctionMode, make_pipeline_function_mode
from anyaccel.upstream.torch_internals import find_property, refresh_factories

__all__ = ["ScriptFunctionMode", "install_function_mode"]

Tensor = torch.Tensor
Kwargs = dict[str, Any]
# Functions that read `device` before a function mode runs; see their entries in `emulator/torch_patch_registry.py`.
_BUILDERS = ("tensor", "as_tensor", "asarray", "from_dlpack")


class ScriptFunctionMode(PipelineFunctionMode):
    """`__torch_function__` mode that maps `cuda` in torch calls, then applies the device's workarounds."""

    def __init__(self, migration: Migration, mode: PipelineFunctionMode) -> None:
        # Only the keys are used, to know which functions draw random values.
        draws = noise.make_handlers(migration.device, {})
        on_device = {func: _draw_on_device(handler) for func, handler in mode.handlers.items() if func in draws}
        super().__init__({**mode.handlers, **on_device}, mode.host_transfer)
        self.migration = migration
        self.translators: dict[Any, Callable[[Any, tuple[Any, ...], Kwargs], tuple[Any, tuple[Any, ...], Kwargs]]] = {
            Tensor.to: self._translate_to,
            getattr(Tensor, migration.source_type): self._translate_cuda,
            Tensor.new_tensor: self._translate_keyword,
        }
        self.replacements: dict[Any, Callable[[Any, tuple[Any, ...], Kwargs], Any]] = {
            Tensor.pin_memory: self._pin,
        }
        self.is_cuda_getter = find_property(f"is_{migration.source_type}")

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Map `cuda` in a torch call to the actual device, then run the call."""
        # Before the handlers of the pipeline mode, which expect the actual device.
        translator = self.translators.get(func)
        if translator is not None:
            func, args, kwargs = translator(func, args, kwargs or {})
        elif kwargs and kwargs.get("device") is not None:
            func, args, kwargs = self._translate_keyword(func, args, kwargs)
        # `==` instead of `is`: every access to a getter creates a new method wrapper.
        elif func == self.is_cuda_getter:
            return self._is_on_accelerator(args[0], sys._getframe(1))
        elif func in self.replacements:
            return self.replacements[func](func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)

    def _translate_keyword(
        self, func: Any, args: tuple[Any, ...], kwargs: Kwargs
    ) -> tuple[Any, tuple[Any, ...], Kwargs]:
        """Map the `device` keyword argument of a call, as in `torch.zeros(…, device=…)`."""
        device = self.migration.translate(kwargs.get("device"), getattr(func, "__name__", "device="))
        return func, args, {**kwargs, "device": device}

    def _translate_to(self, func: Any, args: tuple[Any, ...], kwargs: Kwargs) -> tuple[Any, tuple[Any, ...], Kwargs]:
        """Map the device in `tensor.to(…)`, which is the first argument or a keyword argument."""
        if len(args) > 1:
            args = (args[0], self.migration.translate(args[1], "to"), *args[2:])
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self.migration.translate(kwargs["device"], "to")}
        return func, args, kwargs

    def _translate_cuda(self, func: Any, args: tuple[Any, ...], kwargs: Kwargs) -> tuple[Any, tuple[Any, ...], Kwargs]:
        """Convert `tensor.cuda(…)` to `tensor.to(…)` with the actual device."""
        kwargs = dict(kwargs)
        requested = args[1] if len(args) > 1 else kwargs.pop("device", None)
        name = f"{self.migration.source_type}()"
        device = self.migration.translate(self.migration.source_type if requested is None else requested, name)
        kwargs.pop("device", None)
        if len(args) > 2:
            kwargs["non_blocking"] = args[2]  # a second positional argument of Tensor.to would be the dtype
        return Tensor.to, (args[0], device), kwargs

    def _is_on_accelerator(self, tensor: Any, frame: Any) -> bool:
        """Return the value of `tensor.is_cuda` for the caller's stack frame.

        For a script, it is whether the tensor is on the actual device. For a library, it is always False.
        """
        return not is_device_aware_library(frame) and is_on(tensor.device, self.migration.device.type)

    def _pin(self, func: Any, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """Pin the tensor's memory, or return the tensor unchanged if the device does not support pinning."""
        try:
            return func(*args[:1])
        except (RuntimeError, NotImplementedError):
            self.migration.note("pin_memory is ignored: the device does not support pinned memory")
            return args[0]


def install_function_mode(migration: Migration) -> ScriptFunctionMode:
    """Enter a `ScriptFunctionMode` in this thread and in every thread that is started later."""
    mode = make_pipeline_function_mode(migration.make_plan(), migration.device)
    # `with torch.device(…)` compares functions with the originals, which torch reads at the first use. The emulator has
    # already made it read them.
    if not any(is_patched(f"torch.{name}") for name in _BUILDERS):
        refresh_factories()
    for name in _BUILDERS:
        apply_patch(f"torch.{name}", lambda build: _translate_builder(build, migration), "scripts")
    apply_patch("torch.Tensor.record_stream", replace_by(_ignore_stream), "scripts")

    # Function modes are thread-local: https://github.com/pytorch/pytorch/issues/115917.
    def enter_in_thread(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        @functools.wraps(start)
        def start_inside(self: threading.Thread) -> None:
            run = self.run

            def run_inside() -> None:
                with ScriptFunctionMode(migration, mode):
                    run()

            self.run = run_inside  # type: ignore[method-assign]
            start(self)

        return start_inside

    apply_patch("threading.Thread.start", enter_in_thread, "scripts")
    entered = ScriptFunctionMode(migration, mode)
    entered.__enter__()
    return entered


def _draw_on_device(handler: Handler) -> Handler:
    """Return a handler that applies `handler` only to random functions on the device, not on the CPU."""

    def draw(func: Any, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        device = kwargs.get("device") or next((tensor.device for tensor in tensors), None)
        on_cpu = is_host(torch.device(device or torch.get_default_device()))
        return func(*args, **kwargs) if on_cpu else handler(func, args, kwargs)

    return draw


def _ignore_stream(self: Tensor, stream: Any) -> None:
    """Do nothing instead of `Tensor.record_stream`, because the device has only one stream."""


def _translate_builder(build: Callable[..., Any], migration: Migration) -> Callable[..., Any]:
    """Return a version of `torch.tensor` or a similar function that maps its `device` argument.

    These functions read the device before a `__torch_function__` mode runs.
    """

    @functools.wraps(build)
    def build_on_device(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = migration.translate(kwargs["device"], build.__name__)
        return build(*args, **kwargs)

    return build_on_device
