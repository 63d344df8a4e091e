"""Overrides of models' `forward` methods that move inputs to the device in a supported dtype.

An override also switches from the pipeline's torch function mode to the model's, and records the
output for the NaN check.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch

from anyaccel.backends.device_type_checks import is_host, is_on
from anyaccel.forward_overrides import (
    Slot,
    find_replaced_forward,
    get_override,
    refresh_overrides,
    remove_override,
    set_override,
)
from anyaccel.planning.plan import Plan
from anyaccel.runtime.introspection import list_forward_arguments
from anyaccel.runtime.workarounds.function_modes import (
    ModelFunctionMode,
    enter_model_mode,
    exit_model_mode,
    make_host_transfer,
    make_model_function_mode,
)
from anyaccel.runtime.workarounds.host_transfer import HostTransfer, copy_or_fill
from anyaccel.runtime.workarounds.nan_check import record_output
from anyaccel.tracing.meta_module import map_tensors
from anyaccel.upstream import accelerate_internals, diffusers_internals
from anyaccel.upstream.torch_compile_internals import (
    find_compiled_call,
    is_compiled,
    restore_compiled_call,
    unwrap_compiled,
)

__all__ = ["InputAdapter", "drop_stale_casts", "find_input_adapters", "set_input_adapters"]

_TIMESTEP_ARGUMENTS = ("timestep", "timesteps")
# Their models accept timesteps of any dtype.
_LIBRARIES = ("diffusers.", "transformers.", "torch.", "peft.", "anyaccel.")


class InputAdapter:
    """The `forward` override of one model, or of one submodule of an autoencoder."""

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        plan: Plan,
        device: torch.device,
        function_mode: ModelFunctionMode | None,
    ) -> None:
        self.name = name
        self.module = weakref.ref(module)
        self.function_mode = function_mode
        self.device = device
        self.plan_key = _make_plan_key(plan)
        self.dtype = getattr(torch, plan.dtype.value)
        self.host_transfer: HostTransfer = make_host_transfer(plan, device)
        self.timestep_position = _find_timestep_argument(module)
        self.float_timesteps = torch.int64 in self.host_transfer.replacements and not _embeds_timestep_index(module)
        self.compiled = get_override(module, Slot.COMPILE)
        self.cast_to: torch.dtype | None = None
        """The dtype of floating-point inputs, if the model's dtype differs from the pipeline's."""

    def matches(self, module: torch.nn.Module, plan: Plan, device: torch.device) -> bool:
        """Return whether the adapter can be reused for this module, plan and device."""
        return (
            self.plan_key == _make_plan_key(plan)
            and self.device == device
            and self.compiled is get_override(module, Slot.COMPILE)
        )

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model with its inputs moved to the device and cast to supported dtypes."""
        device = self._find_device()
        if device.type != self.device.type:
            return self._run_elsewhere(device, forward, args, kwargs)
        # A compiled model has its workarounds in the graph (compiled_model_workarounds.py). Dynamo breaks the graph too
        # often when it traces inside a function mode: https://github.com/pytorch/pytorch/issues/130104
        modes = enter_model_mode(None if self._runs_compiled() else self.function_mode)
        try:
            args, kwargs = self._adapt(args, kwargs)
            output = forward(*args, **kwargs)
        finally:
            exit_model_mode(*modes)
        record_output(self.name, output)
        return output if self.cast_to is None else map_tensors(output, self._cast_back)

    def _runs_compiled(self) -> bool:
        """Return whether the model runs compiled code; after a compilation failure, it runs eagerly."""
        module = self.module()
        if module is not None and isinstance(find_compiled_call(module), _CompiledCall):
            return True
        return self.compiled is not None and not getattr(self.compiled, "failure", "")

    def _find_device(self) -> torch.device:
        """Return the device of the model's weights, which the user may have moved.

        The current device of weights with accelerate or diffusers hooks is ignored, because these weights
        move at every forward.
        """
        module: torch.nn.Module | None = unwrap_compiled(self.module())
        if module is None or is_host(self.device):
            return self.device
        for layer in module.modules():
            for weight in layer.parameters(recurse=False):
                if weight.is_meta or is_on(weight.device, self.device.type) or _has_hook(module) or _has_hook(layer):
                    return self.device
                device: torch.device = weight.device
                return device
        return self.device

    def _run_elsewhere(
        self, device: torch.device, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a model on the device to which the user moved it, without workarounds."""
        modes = enter_model_mode(None)
        try:
            args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor.to(device))
            return forward(*args, **kwargs)
        finally:
            exit_model_mode(*modes)

    def _cast_back(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def _adapt(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        position, name = self.timestep_position
        adapted_args = [self._move(value) for value in args]
        adapted_kwargs = {key: self._move(value) for key, value in kwargs.items()}
        if position is not None and position < len(adapted_args):
            adapted_args[position] = self._convert_timestep(adapted_args[position])
        elif name in adapted_kwargs:
            adapted_kwargs[name] = self._convert_timestep(adapted_kwargs[name])
        return tuple(adapted_args), adapted_kwargs

    def _move(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if is_host(value.device) and not is_host(self.device):
                value = self.host_transfer.to_device(value)
                # to_device leaves 0-dim tensors on the CPU, but a model may index or stack its inputs.
                value = copy_or_fill(value, self.device) if is_host(value.device) else value
            elif value.dtype in self.host_transfer.replacements and is_on(value.device, self.device.type):
                value = value.to(self.host_transfer.replacements[value.dtype])
            return value if self.cast_to is None or not value.is_floating_point() else value.to(self.cast_to)
        # Pass the same list or dict on unless an item moved: the Wan VAE writes to the list it is called with.
        if isinstance(value, dict):
            moved = {key: self._move(item) for key, item in value.items()}
            if all(moved[key] is item for key, item in value.items()):
                return value
            copied = copy.copy(value)  # of the same class
            for key, item in moved.items():  # outputs of models have no `update`
                copied[key] = item
            return copied
        if type(value) in (list, tuple):
            items = [self._move(item) for item in value]
            return type(value)(items) if any(new is not old for new, old in zip(items, value, strict=True)) else value
        return value

    def _convert_timestep(self, timestep: Any) -> Any:
        """Convert a timestep to a float32 tensor on the device if the device does not support int64."""
        module = unwrap_compiled(self.module())
        if not self.float_timesteps or (module is not None and _may_need_integer(module)):
            return timestep
        if isinstance(timestep, int | float) and not isinstance(timestep, bool):
            # A compiler would specialize the graph on every value of a Python number.
            return torch.tensor([timestep], dtype=torch.float32).to(self.device)
        is_integer = isinstance(timestep, torch.Tensor) and timestep.dtype in (torch.int32, torch.int64)
        return timestep.to(torch.float32) if is_integer else timestep


class _CompiledCall:
    """The call of a model that the user compiled with `model.compile()`; the input adapter runs around it.

    Otherwise, the adapter would be a part of the compiled code, which Dynamo traces inside the pipeline's
    function mode.
    """

    def __init__(self, module: torch.nn.Module, compiled: Callable[..., Any]) -> None:
        self.module, self.compiled = weakref.ref(module), compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        adapter = get_override(self.module(), Slot.INPUTS)
        if not isinstance(adapter, InputAdapter):
            return self.compiled(*args, **kwargs)
        return adapter(self.compiled, args, kwargs)


def _make_plan_key(plan: Plan) -> tuple[Any, ...]:
    """Return the plan's decisions that an input adapter depends on, such as dtype and attention."""
    return plan.dtype.value, plan.replacements.value, plan.workarounds.value, plan.attention.value


def set_input_adapters(components: dict[str, Any], plan: Plan, device: torch.device) -> None:
    """Set an input adapter on every model that has none for this plan and device.

    This includes models that the user has replaced.
    """
    function_mode: ModelFunctionMode | None = None
    for name, component in components.items():
        if not isinstance(component, torch.nn.Module):
            continue
        for module in _find_entry_modules(component):
            if is_compiled(module):  # the user compiled it meanwhile: the adapter must be outside the compiled code
                remove_override(unwrap_compiled(module), Slot.INPUTS)
            compiled_call = find_compiled_call(module)
            if compiled_call is not None and not isinstance(compiled_call, _CompiledCall):
                restore_compiled_call(module, _CompiledCall(module, compiled_call))
            earlier = get_override(module, Slot.INPUTS)
            if isinstance(earlier, InputAdapter) and earlier.matches(module, plan, device):
                refresh_overrides(module)
                continue
            function_mode = function_mode or make_model_function_mode(plan, device)
            adapter = InputAdapter(name, module, plan, device, None if is_compiled(module) else function_mode)
            if isinstance(earlier, InputAdapter):
                adapter.cast_to = earlier.cast_to
            set_override(module, Slot.INPUTS, adapter)


def drop_stale_casts(components: dict[str, Any]) -> None:
    """Stop casting inputs to a dtype that the model no longer has."""
    for component in components.values():
        for adapter in find_input_adapters(component) if isinstance(component, torch.nn.Module) else ():
            dtypes = {weight.dtype for weight in component.parameters() if weight.is_floating_point()}
            if adapter.cast_to is not None and adapter.cast_to not in dtypes:
                adapter.cast_to = None


def find_input_adapters(component: torch.nn.Module) -> list[InputAdapter]:
    """Return the input adapters of a model and, for an autoencoder, of its submodules."""
    overrides = [get_override(module, Slot.INPUTS) for module in _find_entry_modules(component)]
    return [override for override in overrides if isinstance(override, InputAdapter)]


def _find_entry_modules(component: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that a pipeline calls: the model, and the children of an autoencoder.

    Pipelines call `vae.encode` and `vae.decode`, which call the children and never `vae.forward`.
    """
    modules = [component]
    if hasattr(component, "decode") and not hasattr(component, "generate"):
        modules += component.children()
    # The forward of a ScriptModule is TorchScript and cannot be overridden.
    return [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]


def _find_timestep_argument(module: torch.nn.Module) -> tuple[int | None, str]:
    """Return the position and the name of a model's timestep argument; `(None, "")` if it has none."""
    names = list_forward_arguments(unwrap_compiled(module))
    timestep = next((name for name in names if name in _TIMESTEP_ARGUMENTS), "")
    return (names.index(timestep), timestep) if timestep else (None, "")


def _embeds_timestep_index(module: torch.nn.Module) -> bool:
    """Return whether the timestep is an index into an embedding table and must therefore stay an integer."""
    config = getattr(module, "config", {})
    return bool(getattr(config, "num_embeds_ada_norm", None))


def _may_need_integer(module: torch.nn.Module) -> bool:
    """Return whether code of the user, or an embedding table, may use the timestep as an integer."""
    forward = find_replaced_forward(module)
    # A hook that offloads the model calls its own forward.
    function = type(module).forward if forward is None or _has_hook(module) else forward
    function = getattr(function, "__func__", function)
    # By its globals: `functools.wraps` copies `__module__`.
    source = getattr(function, "__globals__", {}).get("__name__", "")
    if not source.startswith(_LIBRARIES):
        return True
    children = list(module.children())
    return any(isinstance(child, torch.nn.Embedding) for child in children) or not all(
        type(child).__module__.startswith(_LIBRARIES) for child in children
    )


def _has_hook(module: torch.nn.Module) -> bool:
    """Return whether a module has an accelerate or diffusers hook, which may move its weights."""
    return accelerate_internals.has_hook(vars(module)) or diffusers_internals.has_hook(vars(module))
