"""Memory modes: keep all weights on the device, or only those of one phase, model or layer.

`component` is diffusers' model CPU offload. `layer` is diffusers' group offloading on devices with
their own memory (`group_offload`). On devices that share memory with the CPU, moving weights to the
CPU frees no memory, so `phase` and `layer` read weights from disk: `phase` with the hook in this
module, `layer` with accelerate's `disk_offload`.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from accelerate import disk_offload
from accelerate.hooks import ModelHook, add_hook_to_module
from safetensors import safe_open
from safetensors.torch import save_file

from anyaccel.backends.device import OpenDevice, open_device
from anyaccel.errors import UsageError
from anyaccel.planning.memory import Residence
from anyaccel.runtime.introspection import find_components, find_models, read_facts
from anyaccel.runtime.placement.group_offload import (
    end_streaming_call,
    has_new_weights,
    start_streaming,
    stop_streaming,
)
from anyaccel.runtime.placement.temp_weights import make_weights_folder, remove_weights_folder
from anyaccel.runtime.placement_state import being_offloaded
from anyaccel.tracing.footprint_measurement import supports_streaming
from anyaccel.upstream.accelerate_internals import find_hook
from anyaccel.upstream.diffusers_internals import read_never_offloaded
from anyaccel.upstream.torch_internals import read_buffer_table, read_parameter_table, read_version

__all__ = [
    "end_phase",
    "find_lost_change",
    "has_unstreamed_weights",
    "make_lost_change_error",
    "move_to_cpu",
    "set_residence",
]

# Key of the `_PhaseOffloader` in the pipeline's `__dict__`.
_OFFLOADER = "_anyaccel_offloader"


def set_residence(pipe: Any, residence: Residence, device: torch.device, opened: OpenDevice) -> None:
    """Apply a memory mode to a pipeline; all of its weights must be on the CPU."""
    with being_offloaded(pipe), torch.no_grad():
        if residence == "resident":
            pipe.to(device, silence_dtype_warnings=True, hpu_migration=False)
        elif residence == "component":
            pipe.enable_model_cpu_offload(device=device)
        elif residence == "layer" and not opened.sheet.unified_memory:
            _stream(pipe, device, use_stream=opened.driver.has_events)
        else:
            _offload_to_disk(pipe, device, by_layer=residence == "layer")


def _stream(pipe: Any, device: torch.device, *, use_stream: bool) -> None:
    """Stream the layers of all models that support it; move the other models to the device."""
    models, never_offloaded = find_models(pipe), read_never_offloaded(pipe)
    weights = sum(tensor.nbytes for model in models.values() for tensor in model.parameters())
    # Pinned weights can need twice their size: torch rounds pinned allocations up to powers of two,
    # https://github.com/pytorch/pytorch/issues/150517
    pin = use_stream and open_device("cpu").driver.memory(0).free_bytes > weights
    for name, model in models.items():
        if name in never_offloaded or not supports_streaming(model):
            model.to(device)
        else:
            start_streaming(model, device, use_stream=use_stream, pin=pin)


def has_unstreamed_weights(pipe: Any) -> bool:
    """Return whether a streamed model has new parameters, which have no hooks and would stay on the CPU."""
    return any(has_new_weights(model) for model in find_models(pipe).values())


def end_phase(pipe: Any, *, failed: bool = False) -> None:
    """At the end of a call, release the weights loaded from disk and any layers left on the device."""
    offloader = vars(pipe).get(_OFFLOADER)
    if isinstance(offloader, _PhaseOffloader):
        offloader.release_all()
    for model in find_models(pipe).values():
        end_streaming_call(model, failed=failed)


def find_lost_change(pipe: Any) -> str | None:
    """Return the name of a model with changes to offloaded weights that would be lost, or None."""
    for name, component in find_components(pipe).items():
        if not isinstance(component, torch.nn.Module):
            continue
        hook = find_hook(component)
        placeholders = (
            {id(_get(owners)) for owners in hook.weights.owners.values()}
            if isinstance(hook, _LoadFromDiskHook)
            else None
        )
        for parameter in component.parameters():
            # Offloaded weights are meta tensors. Their version counter is 0 until something writes to them.
            if parameter.is_meta and (
                read_version(parameter) or (placeholders is not None and id(parameter) not in placeholders)
            ):
                return name
    return None


def make_lost_change_error(name: str) -> UsageError:
    """Return the error for a model with weights that were changed while they were offloaded."""
    return UsageError(
        f"the weights of {name} were changed while they were offloaded, and the change is lost",
        hint='call pipe.to("cpu", memory="resident"), change the weights again, then place the pipeline on the device; '
        "if an adapter was added directly to the model, delete it and load it through the pipeline",
    )


def move_to_cpu(pipe: Any) -> None:
    """Move all weights to the CPU and remove the hooks of the current memory mode."""
    with being_offloaded(pipe):
        pipe.remove_all_hooks()
    for model in find_models(pipe).values():
        stop_streaming(model)
    # Only now: removing the hooks has read the weights from these files.
    offloader = vars(pipe).pop(_OFFLOADER, None)
    if isinstance(offloader, _PhaseOffloader):
        offloader.remove_files()
    with being_offloaded(pipe):
        pipe.to("cpu", silence_dtype_warnings=True)


def _offload_to_disk(pipe: Any, device: torch.device, *, by_layer: bool) -> None:
    """Write all weights to disk and release them; each model or layer loads its weights when it runs."""
    offloader = _PhaseOffloader(device, read_facts(pipe).denoisers)
    vars(pipe)[_OFFLOADER] = offloader
    models = {
        name: component for name, component in find_components(pipe).items() if isinstance(component, torch.nn.Module)
    }
    for name, model in models.items():
        if by_layer:
            # Without offload_buffers: pipelines read some buffers, such as the statistics of an autoencoder.
            disk_offload(model, str(offloader.folder / name), execution_device=device)
            vars(model)[_OFFLOADER] = offloader  # keeps the files
        else:
            add_hook_to_module(model, _LoadFromDiskHook(offloader, name))


class _PhaseOffloader:
    """A manager that loads a pipeline's models from disk and releases them after each phase.

    There are two phases: one for the denoisers and one for all other models.
    """

    def __init__(self, device: torch.device, denoisers: Collection[str]) -> None:
        self.device, self.denoisers = device, denoisers
        self.folder, lock = make_weights_folder()
        self.loaded: dict[str, _DiskWeights] = {}
        # This object, and not the pipeline: other pipelines may share the models, whose hooks hold it.
        self.remove_files = weakref.finalize(self, remove_weights_folder, self.folder, lock)

    def load(self, name: str, weights: _DiskWeights) -> None:
        """Load a model's weights from disk, after releasing the models of the other phase."""
        if name in self.loaded:
            return
        for other in list(self.loaded):
            if (other in self.denoisers) != (name in self.denoisers):
                self.loaded.pop(other).release()
        self.loaded[name] = weights  # before reading, so an interrupted read is released too
        weights.read(self.device)

    def release_all(self) -> None:
        """Release the weights of all loaded models."""
        while self.loaded:
            self.loaded.popitem()[1].release()


class _LoadFromDiskHook(ModelHook):  # type: ignore[misc]
    """An accelerate hook that loads a model's weights from disk when its phase begins."""

    no_grad = True

    def __init__(self, offloader: _PhaseOffloader, name: str) -> None:
        self.offloader, self.name = offloader, name
        self.execution_device = offloader.device

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Write the model's weights to disk and replace them with meta tensors."""
        self.weights = _DiskWeights(self.offloader.folder / f"{self.name}.safetensors", module)
        self.weights.write()
        self.weights.release()
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Load the model's weights from disk; raise if they were changed while they were offloaded."""
        if self.weights.has_lost_change():  # for example in a callback; reading the file would hide it
            raise make_lost_change_error(self.name)
        self.offloader.load(self.name, self.weights)
        return args, kwargs

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Load the model's weights from disk onto the CPU when the hook is removed."""
        self.offloader.loaded.pop(self.name, None)
        self.weights.release()
        self.weights.read(torch.device("cpu"))
        return module


class _DiskWeights:
    """A model's weights in a file, and the modules that own each weight.

    Owners are stored as modules, not names, because an adapter that wraps a layer changes the layer's
    name. Weights that are added later, such as adapter weights, are not in the file. They move between
    the CPU and the device.
    """

    def __init__(self, path: Path, model: torch.nn.Module) -> None:
        self.path, self.model = path, model
        self.owners = _find_owners(model)
        self.read_weights: dict[str, tuple[torch.nn.Parameter, int]] = {}
        """The parameters as they were read, each with its version counter."""
        self.checksums: list[float] = []
        """Checksums of the parameters as they were read."""

    def write(self) -> None:
        """Write the current weights to the file."""
        tensors = {key: _get(owners).detach().to("cpu") for key, owners in self.owners.items()}
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, self.path)

    def release(self) -> None:
        """Replace the weights with meta tensors, after saving any changes to the file.

        Buffers, and weights that are not in the file, move to the CPU.
        """
        # Inference tensors have no version counter: https://github.com/pytorch/pytorch/pull/54403
        with torch.inference_mode(False), torch.no_grad():
            if any(self._was_changed(key) for key in self.read_weights) or self._compute_checksums() != self.checksums:
                self.write()
            self.read_weights, self.checksums = {}, []
            for owners in self.owners.values():
                before = _get(owners)
                shape = torch.empty(before.shape, dtype=before.dtype, device="meta")
                _set(owners, torch.nn.Parameter(shape, requires_grad=before.requires_grad))
            self._move_others(torch.device("cpu"))

    def has_lost_change(self) -> bool:
        """Return whether weights were modified after their release, in which case the change is lost."""
        weights = (_get(owners) for owners in self.owners.values())
        return any(weight.is_meta and read_version(weight) > 0 for weight in weights)

    def _was_changed(self, key: str) -> bool:
        original, version = self.read_weights[key]
        return _get(self.owners[key]) is not original or read_version(original) != version

    def _compute_checksums(self) -> list[float]:
        """Return sums over each parameter and over its first half.

        Changes through `.data` do not increment the version counter, so the values are compared.
        """
        values = [weight.detach().flatten() for weight, _ in self.read_weights.values()]
        sums = [
            part.sum(dtype=torch.float32) for value in values for part in (value, value[: (value.numel() + 1) // 2])
        ]
        return torch.stack(sums).tolist() if sums else []

    def read(self, device: torch.device) -> None:
        """Load the weights from the file onto a device."""
        with torch.inference_mode(False), torch.no_grad():  # as in `release`
            self._read(device)

    def _read(self, device: torch.device) -> None:
        with safe_open(self.path, framework="pt") as file:
            for key, owners in list(self.owners.items()):
                before = _get(owners)
                if before.is_meta:
                    loaded = torch.nn.Parameter(file.get_tensor(key).to(device), requires_grad=before.requires_grad)
                    _set(owners, loaded)
                    self.read_weights[key] = loaded, read_version(loaded)
                else:  # the user replaced the parameter; from now on it moves like an added weight
                    del self.owners[key]
        self.checksums = self._compute_checksums()
        self._move_others(device)

    def _move_others(self, device: torch.device) -> None:
        """Move buffers, and parameters that are not in the file, to a device."""
        for module in self.model.modules():
            buffers, parameters = read_buffer_table(module), read_parameter_table(module)
            for name, buffer in buffers.items():
                if buffer is not None:
                    buffers[name] = buffer.to(device)
            for name, parameter in parameters.items():
                if parameter is not None and not parameter.is_meta and parameter.device != device:
                    moved = parameter.detach().to(device)
                    parameters[name] = torch.nn.Parameter(moved, requires_grad=parameter.requires_grad)


def _find_owners(model: torch.nn.Module) -> dict[str, list[tuple[torch.nn.Module, str]]]:
    """Map each weight's name to its owners, which are pairs of a module and an attribute name.

    A tied weight has several owners. Its key is the first of its names.
    """
    keys: dict[int, str] = {}
    owners: dict[str, list[tuple[torch.nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in read_parameter_table(module).items():
            if parameter is not None:
                key = keys.setdefault(id(parameter), f"{path}.{name}")
                owners.setdefault(key, []).append((module, name))
    return owners


def _get(owners: list[tuple[torch.nn.Module, str]]) -> torch.nn.Parameter:
    module, name = owners[0]
    parameter = read_parameter_table(module)[name]
    assert parameter is not None
    return parameter


def _set(owners: list[tuple[torch.nn.Module, str]], parameter: torch.nn.Parameter) -> None:
    for module, name in owners:
        read_parameter_table(module)[name] = parameter
