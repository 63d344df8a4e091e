"""The module boundary: what goes into a model lies on the device, in a dtype that the device supports.

An override of each model's forward. It also replaces the torch function mode around the models by the one inside, and
passes the output to the NaN check.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch

from anyaccel.backends.torch_device import is_host, is_on
from anyaccel.forward_overrides import Slot, get_override, refresh_overrides, remove_override, set_override
from anyaccel.planning.plan import Plan
from anyaccel.runtime.workarounds.function_modes import (
    ModelFunctionMode,
    enter_model,
    leave_model,
    make_host_transfer,
    make_model_function_mode,
)
from anyaccel.runtime.workarounds.host_transfer import HostTransfer, send
from anyaccel.runtime.workarounds.nan_check import note_output
from anyaccel.tracing.meta_module import map_tensors
from anyaccel.upstream import accelerate_internals, diffusers_internals
from anyaccel.upstream.torch_internals import is_compiled, unwrap_compiled

__all__ = ["InputAdapter", "drop_stale_casts", "find_input_adapters", "set_input_adapters"]

_TIMESTEPS = ("timestep", "timesteps")


class InputAdapter:
    """The override of one model."""

    def __init__(
        self, name: str, module: torch.nn.Module, plan: Plan, device: torch.device, seam: ModelFunctionMode | None
    ) -> None:
        self.name = name
        self.module = weakref.ref(module)
        self.seam = seam
        self.device = device
        self.needs = _read_needs(plan)
        self.dtype = getattr(torch, plan.dtype.value)
        self.meeting: HostTransfer = make_host_transfer(plan, device)
        self.timestep_position = _find_timestep(module)
        self.float_timesteps = torch.int64 in self.meeting.replacements and not _looks_timesteps_up(module)
        self.compiled = get_override(module, Slot.COMPILE)
        self.cast_to: torch.dtype | None = None
        """The dtype of floating inputs where the model runs in another one than the pipeline."""

    def serves(self, module: torch.nn.Module, plan: Plan, device: torch.device) -> bool:
        """Return whether it does what a plan needs at the boundary."""
        return (
            self.needs == _read_needs(plan)
            and self.device == device
            and self.compiled is get_override(module, Slot.COMPILE)
        )

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model on adapted inputs."""
        device = self._find_device()
        if device.type != self.device.type:
            return self._run_elsewhere(device, forward, args, kwargs)
        # The graph of a compiled model has its repairs (graph_repairs.py): tracing inside a mode breaks too often.
        modes = enter_model(None if self._runs_compiled() else self.seam)
        try:
            args, kwargs = self._adapt(args, kwargs)
            output = forward(*args, **kwargs)
        finally:
            leave_model(*modes)
        note_output(self.name, output)
        return output if self.cast_to is None else map_tensors(output, self._cast_back)

    def _runs_compiled(self) -> bool:
        """Return whether the model runs compiled code: a compiled forward that failed runs eagerly ever after."""
        return self.compiled is not None and not getattr(self.compiled, "failure", "")

    def _find_device(self) -> torch.device:
        """Return where the model is: somebody may have moved it by itself, with hooks that bring weights apart."""
        module: torch.nn.Module | None = unwrap_compiled(self.module())
        if module is None or is_host(self.device):
            return self.device
        for layer in module.modules():
            for weight in layer.parameters(recurse=False):
                if weight.is_meta or is_on(weight.device, self.device.type) or _has_hook(module) or _has_hook(layer):
                    return self.device
                place: torch.device = weight.device
                return place
        return self.device

    def _run_elsewhere(
        self, device: torch.device, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a model that was moved off the pipeline's device as it is, on inputs that come to it."""
        modes = enter_model(None)
        try:
            args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor.to(device))
            return forward(*args, **kwargs)
        finally:
            leave_model(*modes)

    def _cast_back(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def _adapt(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        position, name = self.timestep_position
        moved = [self._bring(value) for value in args]
        named = {key: self._bring(value) for key, value in kwargs.items()}
        if position is not None and position < len(moved):
            moved[position] = self._settle_timestep(moved[position])
        elif name in named:
            named[name] = self._settle_timestep(named[name])
        return tuple(moved), named

    def _bring(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if is_host(value.device) and not is_host(self.device):
                value = self.meeting.bring(value)
                value = send(value, self.device) if is_host(value.device) else value
            elif value.dtype in self.meeting.replacements and is_on(value.device, self.device.type):
                value = value.to(self.meeting.replacements[value.dtype])
            return value if self.cast_to is None or not value.is_floating_point() else value.to(self.cast_to)
        # A list or dictionary stays the same object unless something in it moves: some models write to theirs.
        if type(value) is dict:
            moved = {key: self._bring(item) for key, item in value.items()}
            return moved if any(moved[key] is not item for key, item in value.items()) else value
        if type(value) in (list, tuple):
            brought = [self._bring(item) for item in value]
            return type(value)(brought) if any(a is not b for a, b in zip(brought, value, strict=True)) else value
        return value

    def _settle_timestep(self, timestep: Any) -> Any:
        """Return the timestep as a floating tensor of the device, where the device has trouble with int64.

        A Python number becomes a tensor too: a compiler would make one graph per value.
        """
        if not self.float_timesteps:
            return timestep
        if isinstance(timestep, int | float) and not isinstance(timestep, bool):
            return torch.tensor([timestep], dtype=torch.float32).to(self.device)
        whole = isinstance(timestep, torch.Tensor) and timestep.dtype in (torch.int32, torch.int64)
        return timestep.to(torch.float32) if whole else timestep


def _read_needs(plan: Plan) -> tuple[Any, ...]:
    """Return the decisions of a plan that matter at the boundary."""
    return plan.dtype.value, plan.replacements.value, plan.workarounds.value, plan.attention.value


def set_input_adapters(components: dict[str, Any], plan: Plan, device: torch.device) -> None:
    """Put a boundary on every model that has none for this plan, also on models that were replaced since."""
    seam: ModelFunctionMode | None = None
    for name, component in components.items():
        if not isinstance(component, torch.nn.Module):
            continue
        for part in _entrances(component):
            if is_compiled(part):  # by the user since: the boundary goes around that
                remove_override(unwrap_compiled(part), Slot.INPUTS)
            earlier = get_override(part, Slot.INPUTS)
            if isinstance(earlier, InputAdapter) and earlier.serves(part, plan, device):
                refresh_overrides(part)
                continue
            seam = seam or make_model_function_mode(plan, device)
            boundary = InputAdapter(name, part, plan, device, None if is_compiled(part) else seam)
            if isinstance(earlier, InputAdapter):
                boundary.cast_to = earlier.cast_to
            set_override(part, Slot.INPUTS, boundary)


def drop_stale_casts(components: dict[str, Any]) -> None:
    """Stop casting inputs to a dtype that a model does not have any more."""
    for component in components.values():
        for boundary in find_input_adapters(component) if isinstance(component, torch.nn.Module) else ():
            dtypes = {weight.dtype for weight in component.parameters() if weight.is_floating_point()}
            if boundary.cast_to is not None and boundary.cast_to not in dtypes:
                boundary.cast_to = None


def find_input_adapters(component: torch.nn.Module) -> list[InputAdapter]:
    """Return the boundaries of one model."""
    overrides = [get_override(part, Slot.INPUTS) for part in _entrances(component)]
    return [override for override in overrides if isinstance(override, InputAdapter)]


def _entrances(component: torch.nn.Module) -> list[torch.nn.Module]:
    """Where a pipeline enters a model: the model itself, or the parts of one that is called by other names."""
    parts = [component]
    if hasattr(component, "decode") and not hasattr(component, "generate"):
        parts += component.children()
    return [part for part in parts if not isinstance(part, torch.jit.ScriptModule)]  # its forward is TorchScript


def _find_timestep(module: torch.nn.Module) -> tuple[int | None, str]:
    """Where a model takes its timestep: the position and the name."""
    names = list(inspect.signature(unwrap_compiled(module).forward).parameters)
    found = next((name for name in names if name in _TIMESTEPS), "")
    return (names.index(found), found) if found else (None, "")


def _looks_timesteps_up(module: torch.nn.Module) -> bool:
    """Whether a timestep is an index into a table there, and so must stay a whole number."""
    config = getattr(module, "config", {})
    return bool(getattr(config, "num_embeds_ada_norm", None))


def _has_hook(module: torch.nn.Module) -> bool:
    """Return whether accelerate or diffusers moves weights of a module themselves."""
    return accelerate_internals.has_hook(vars(module)) or diffusers_internals.has_hook(vars(module))
