"""Where the weights of a pipeline are while it runs: all on the device, or a phase's, a model's or a layer's.

One model at a time is diffusers' own, and so is one layer at a time where a device has its own memory (`streaming`).
By phase and from disk is done here, as a hook of accelerate's, for devices that share the host's memory, where moving
to the host frees nothing.
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

_ROOM = "_anyaccel_room"


def set_residence(pipe: Any, residence: Residence, device: torch.device, opened: OpenDevice) -> None:
    """Bring a pipeline's weights to where a rule wants them, from the host."""
    with being_offloaded(pipe), torch.no_grad():
        if residence == "resident":
            pipe.to(device, silence_dtype_warnings=True, hpu_migration=False)
        elif residence == "component":
            pipe.enable_model_cpu_offload(device=device)
        elif residence == "layer" and not opened.sheet.unified_memory:
            _stream(pipe, device, use_stream=opened.driver.marks)
        else:
            _keep_on_disk(pipe, device, by_layer=residence == "layer")


def _stream(pipe: Any, device: torch.device, *, use_stream: bool) -> None:
    """Let layers come one by one; what diffusers says cannot be taken apart stays on the device whole."""
    models, kept = find_models(pipe), read_never_offloaded(pipe)
    weights = sum(tensor.nbytes for model in models.values() for tensor in model.parameters())
    # Pinned memory is had in powers of two: at worst the weights take twice their size.
    pin = use_stream and open_device("cpu").driver.memory(0).free_bytes > weights
    for name, model in models.items():
        if name in kept or not supports_streaming(model):
            model.to(device)
        else:
            start_streaming(model, device, use_stream=use_stream, pin=pin)


def has_unstreamed_weights(pipe: Any) -> bool:
    """Return whether a model got parameters since its layers are streamed, which would not come to the device."""
    return any(has_new_weights(model) for model in find_models(pipe).values())


def end_phase(pipe: Any, *, failed: bool = False) -> None:
    """Let go of the weights of the last phase, where they come from disk, and of layers that a call left behind."""
    room = vars(pipe).get(_ROOM)
    if isinstance(room, _PhaseOffloader):
        room.empty()
    for model in find_models(pipe).values():
        end_streaming_call(model, failed=failed)


def find_lost_change(pipe: Any) -> str | None:
    """The name of a model whose weights were changed where there are none: they lie on disk or on the host then."""
    for name, part in find_components(pipe).items():
        if not isinstance(part, torch.nn.Module):
            continue
        hook = find_hook(part)
        known = (
            {id(_get(places)) for places in hook.shelf.places.values()} if isinstance(hook, _LoadFromDiskHook) else None
        )
        for one in part.parameters():
            if one.is_meta and (read_version(one) or (known is not None and id(one) not in known)):
                return name
    return None


def make_lost_change_error(name: str) -> UsageError:
    """Return the error for weights that were changed where there are none."""
    return UsageError(
        f"the weights of {name} were changed while they waited on disk or on the host, and the change is lost",
        hint='pipe.to("cpu", memory="resident") brings them back as they were: change them there, and place again; '
        "an adapter that was added to a model directly must be deleted before, and loaded through the pipeline",
    )


def move_to_cpu(pipe: Any) -> None:
    """Bring every model to the host, whole and without the hooks of an earlier residence."""
    with being_offloaded(pipe):
        pipe.remove_all_hooks()
    for model in find_models(pipe).values():
        stop_streaming(model)
    room = vars(pipe).pop(_ROOM, None)
    if isinstance(room, _PhaseOffloader):
        room.remove_files()
    with being_offloaded(pipe):
        pipe.to("cpu", silence_dtype_warnings=True)


def _keep_on_disk(pipe: Any, device: torch.device, *, by_layer: bool) -> None:
    """Write every model's weights to files and let go of them; they come back when their turn comes."""
    room = _PhaseOffloader(pipe, device, read_facts(pipe).denoisers)
    vars(pipe)[_ROOM] = room
    models = {name: part for name, part in find_components(pipe).items() if isinstance(part, torch.nn.Module)}
    for name, model in models.items():
        if by_layer:
            # Buffers stay: pipelines read some of them, such as the statistics of an autoencoder.
            disk_offload(model, str(room.folder / name), execution_device=device)
        else:
            add_hook_to_module(model, _LoadFromDiskHook(room, name))


class _PhaseOffloader:
    """The part of the device that the models of one pipeline take in turns, and the folder that they come from."""

    def __init__(self, pipe: Any, device: torch.device, denoisers: Collection[str]) -> None:
        self.device, self.denoisers = device, denoisers
        self.folder, lock = make_weights_folder()
        self.inside: dict[str, _DiskWeights] = {}
        self.remove_files = weakref.finalize(pipe, remove_weights_folder, self.folder, lock)

    def enter(self, name: str, shelf: _DiskWeights) -> None:
        """Make room for a model, and read its weights: what denoises stays together, and so does what does not."""
        if name in self.inside:
            return
        for other in list(self.inside):
            if (other in self.denoisers) != (name in self.denoisers):
                self.inside.pop(other).let_go()
        self.inside[name] = shelf  # before it is read: what is cut short is let go of too
        shelf.read(self.device)

    def empty(self) -> None:
        """Let go of all."""
        while self.inside:
            self.inside.popitem()[1].let_go()


class _LoadFromDiskHook(ModelHook):  # type: ignore[misc]
    """A model whose weights lie in a file until its phase begins."""

    no_grad = True

    def __init__(self, room: _PhaseOffloader, name: str) -> None:
        self.room, self.name = room, name
        self.execution_device = room.device

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Write the weights, and let go of them."""
        self.shelf = _DiskWeights(self.room.folder / f"{self.name}.safetensors", module)
        self.shelf.write()
        self.shelf.let_go()
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Bring the weights of the model whose turn it is."""
        if self.shelf.has_lost_change():  # made in a callback, say: reading the file would hide it
            raise make_lost_change_error(self.name)
        self.room.enter(self.name, self.shelf)
        return args, kwargs

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Bring the weights back to the host."""
        self.room.inside.pop(self.name, None)
        self.shelf.let_go()
        self.shelf.read(torch.device("cpu"))
        return module


class _DiskWeights:
    """The weights of one model in a file, and the places in the model that each of them belongs to.

    Places are layers and not names: an adapter that is put around a layer gives it another name. What was added since,
    such as the adapter's own weights, is in no file, and goes between the host and the device.
    """

    def __init__(self, path: Path, model: torch.nn.Module) -> None:
        self.path, self.model = path, model
        self.places = _find_places(model)
        self.fresh: dict[str, tuple[torch.nn.Parameter, int]] = {}
        """The weights as they were read, each with its version; where one was written to since, all are kept."""

    def write(self) -> None:
        """Put the weights that the model has now into the file."""
        tensors = {first: _get(places).detach().to("cpu") for first, places in self.places.items()}
        save_file({first: tensor.contiguous() for first, tensor in tensors.items()}, self.path)

    def let_go(self) -> None:
        """Leave the shapes of the weights alone; buffers, and what is in no file, go to the host."""
        with torch.inference_mode(False), torch.no_grad():  # tensors made in inference mode count no versions
            if any(self._was_changed(first) for first in self.fresh):
                self.write()
            self.fresh = {}
            for places in self.places.values():
                before = _get(places)
                shape = torch.empty(before.shape, dtype=before.dtype, device="meta")
                _put(places, torch.nn.Parameter(shape, requires_grad=before.requires_grad))
            self._move_others(torch.device("cpu"))

    def has_lost_change(self) -> bool:
        """Return whether somebody wrote to weights that are not there."""
        weights = (_get(places) for places in self.places.values())
        return any(weight.is_meta and read_version(weight) > 0 for weight in weights)

    def _was_changed(self, first: str) -> bool:
        was, version = self.fresh[first]
        return _get(self.places[first]) is not was or read_version(was) != version

    def read(self, device: torch.device) -> None:
        """Bring the weights to a device."""
        with torch.inference_mode(False), torch.no_grad():  # as above
            self._read(device)

    def _read(self, device: torch.device) -> None:
        with safe_open(self.path, framework="pt") as file:
            for first, places in list(self.places.items()):
                before = _get(places)
                if before.is_meta:
                    made = torch.nn.Parameter(file.get_tensor(first).to(device), requires_grad=before.requires_grad)
                    _put(places, made)
                    self.fresh[first] = made, read_version(made)
                else:  # somebody put another one there since
                    del self.places[first]
        self._move_others(device)

    def _move_others(self, device: torch.device) -> None:
        for module in self.model.modules():
            buffers, parameters = read_buffer_table(module), read_parameter_table(module)
            for name, buffer in buffers.items():
                if buffer is not None:
                    buffers[name] = buffer.to(device)
            for name, parameter in parameters.items():
                if parameter is not None and not parameter.is_meta and parameter.device != device:
                    moved = parameter.detach().to(device)
                    parameters[name] = torch.nn.Parameter(moved, requires_grad=parameter.requires_grad)


def _find_places(model: torch.nn.Module) -> dict[str, list[tuple[torch.nn.Module, str]]]:
    """Where each weight is found, by its first name; one that is tied to others is found in several places."""
    firsts: dict[int, str] = {}
    found: dict[str, list[tuple[torch.nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in read_parameter_table(module).items():
            if parameter is not None:
                first = firsts.setdefault(id(parameter), f"{path}.{name}")
                found.setdefault(first, []).append((module, name))
    return found


def _get(places: list[tuple[torch.nn.Module, str]]) -> torch.nn.Parameter:
    module, name = places[0]
    parameter = read_parameter_table(module)[name]
    assert parameter is not None
    return parameter


def _put(places: list[tuple[torch.nn.Module, str]], parameter: torch.nn.Parameter) -> None:
    for module, name in places:
        read_parameter_table(module)[name] = parameter
