"""Where the weights of a pipeline are while it runs: all on the device, or a phase's, a model's or a layer's.

One model or one layer at a time is diffusers' and accelerate's own. By phase and from disk is done here, as a hook of
accelerate's, for devices that share the host's memory, where moving to the host frees nothing.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from accelerate import disk_offload
from accelerate.hooks import ModelHook, add_hook_to_module
from safetensors import safe_open
from safetensors.torch import save_file

from anyaccel.planning.memory import Residence
from anyaccel.runtime.placement import being_offloaded, find_components, read_facts

__all__ = ["bring_home", "end_phase", "set_residence"]

_ROOM = "_anyaccel_room"


def set_residence(pipe: Any, residence: Residence, device: torch.device, *, unified_memory: bool) -> None:
    """Bring a pipeline's weights to where a rule wants them, from the host."""
    with being_offloaded(pipe), torch.no_grad():
        if residence == "resident":
            pipe.to(device, silence_dtype_warnings=True, hpu_migration=False)
        elif residence == "component":
            pipe.enable_model_cpu_offload(device=device)
        elif residence == "layer" and not unified_memory:
            pipe.enable_sequential_cpu_offload(device=device)
        else:
            _keep_on_disk(pipe, device, by_layer=residence == "layer")


def end_phase(pipe: Any) -> None:
    """Let go of the weights of the last phase, where they come from disk."""
    room = vars(pipe).get(_ROOM)
    if isinstance(room, _Room):
        room.empty()


def bring_home(pipe: Any) -> None:
    """Bring every model to the host, whole and without the hooks of an earlier residence."""
    with being_offloaded(pipe):
        pipe.remove_all_hooks()
    room = vars(pipe).pop(_ROOM, None)
    if isinstance(room, _Room):
        room.remove_files()
    with being_offloaded(pipe):
        pipe.to("cpu", silence_dtype_warnings=True)
    gc.collect()


def _keep_on_disk(pipe: Any, device: torch.device, *, by_layer: bool) -> None:
    """Write every model's weights to files and let go of them; they come back when their turn comes."""
    room = _Room(pipe, device, read_facts(pipe).denoisers)
    vars(pipe)[_ROOM] = room
    models = {name: part for name, part in find_components(pipe).items() if isinstance(part, torch.nn.Module)}
    for name, model in models.items():
        if by_layer:
            # Buffers stay: pipelines read some of them, such as the statistics of an autoencoder.
            disk_offload(model, str(room.folder / name), execution_device=device)
        else:
            add_hook_to_module(model, _FromDisk(room, name))


class _Room:
    """The part of the device that the models of one pipeline take in turns, and the folder that they come from."""

    def __init__(self, pipe: Any, device: torch.device, denoisers: Collection[str]) -> None:
        self.device, self.denoisers = device, denoisers
        self.folder = Path(tempfile.mkdtemp(prefix="anyaccel-weights-"))
        self.inside: dict[str, torch.nn.Module] = {}
        self.remove_files = weakref.finalize(pipe, shutil.rmtree, self.folder, ignore_errors=True)

    def enter(self, name: str, model: torch.nn.Module) -> None:
        """Make room for a model, and read its weights: what denoises stays together, and so does what does not."""
        if name in self.inside:
            return
        for other in list(self.inside):
            if (other in self.denoisers) != (name in self.denoisers):
                _let_go(self.inside.pop(other))
        gc.collect()
        self.inside[name] = model  # before it is read: what is cut short is let go of too
        _read(self.folder / f"{name}.safetensors", model, self.device)

    def empty(self) -> None:
        """Let go of all."""
        while self.inside:
            _let_go(self.inside.popitem()[1])


class _FromDisk(ModelHook):  # type: ignore[misc]
    """A model whose weights lie in a file until its phase begins."""

    no_grad = True

    def __init__(self, room: _Room, name: str) -> None:
        self.room, self.name = room, name
        self.execution_device = room.device

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Write the weights, and let go of them."""
        _write(self.room.folder / f"{self.name}.safetensors", module)
        _let_go(module)
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Its turn has come."""
        self.room.enter(self.name, module)
        return args, kwargs

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Bring the weights back to the host."""
        self.room.inside.pop(self.name, None)
        _let_go(module)
        _read(self.room.folder / f"{self.name}.safetensors", module, torch.device("cpu"))
        return module


def _parameters(model: torch.nn.Module) -> dict[str, list[tuple[torch.nn.Module, str]]]:
    """Where each parameter is found, by its first name; one that is tied to others is found in several places."""
    places: dict[int, str] = {}
    found: dict[str, list[tuple[torch.nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                first = places.setdefault(id(parameter), f"{path}.{name}")
                found.setdefault(first, []).append((module, name))
    return found


def _write(path: Path, model: torch.nn.Module) -> None:
    found = {first: places[0][0]._parameters[places[0][1]] for first, places in _parameters(model).items()}
    save_file({first: tensor.detach().contiguous() for first, tensor in found.items() if tensor is not None}, path)


def _let_go(model: torch.nn.Module) -> None:
    """Leave the shapes of a model's parameters alone; its buffers go to the host."""
    for places in _parameters(model).values():
        before = places[0][0]._parameters[places[0][1]]
        assert before is not None
        shape = torch.empty(before.shape, dtype=before.dtype, device="meta")
        _put(places, torch.nn.Parameter(shape, requires_grad=False))
    _move_buffers(model, torch.device("cpu"))


def _read(path: Path, model: torch.nn.Module, device: torch.device) -> None:
    with safe_open(path, framework="pt") as file:
        for first, places in _parameters(model).items():
            _put(places, torch.nn.Parameter(file.get_tensor(first).to(device), requires_grad=False))
    _move_buffers(model, device)


def _put(places: list[tuple[torch.nn.Module, str]], parameter: torch.nn.Parameter) -> None:
    for module, name in places:
        module._parameters[name] = parameter


def _move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
