"""Copies of weights to the device in parts, through pinned memory."""

import copy
import platform
import subprocess
import sys
from typing import Any

import diffusers
import pytest
import torch
from torch.overrides import TorchFunctionMode

import anyaccel
from anyaccel.backends.driver import Driver
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.recipes import recipes
from anyaccel.runtime.placement import weight_moves
from anyaccel.runtime.placement.weight_moves import stage_weights

NAME = "xpu"


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weights of small models fill several buffers, on a virtual device that has no events."""
    monkeypatch.setattr(weight_moves, "_BUFFER_BYTES", 2**10)
    monkeypatch.setattr(weight_moves, "_SMALLEST_BYTES", 2**8)
    monkeypatch.setattr(Driver, "has_events", True)


class Model(torch.nn.Module):
    """A model with weights of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(40, 60, generator=generator)
        buffers = {
            "bfloat16": values.bfloat16(),
            "uint8": (values * 10).to(torch.uint8),
            "bool": values > 0,
            "complex64": torch.complex(values, values),
            "offset": values[3:, :],
            "expanded": values[:1].expand(40, 60),
            "transposed": values.t(),
            "scalar": torch.tensor(2.5),
            "empty": torch.empty(0, 5),
        }
        for name, tensor in buffers.items():
            self.register_buffer(f"{name}_values", tensor)
        self.weight, self.frozen = torch.nn.Parameter(values), torch.nn.Parameter(values + 1, requires_grad=False)
        self.tied = self.weight
        self.convolution = torch.nn.Conv2d(8, 8, 3)
        self.convolution.weight.data = self.convolution.weight.data.to(memory_format=torch.channels_last)
        self.trained = torch.nn.Linear(60, 60)
        self.trained(values).sum().backward()


def count_on_device(model: torch.nn.Module) -> int:
    return sum(tensor.device.type == NAME for tensor in model.state_dict().values())


def compare_with_stock(_: VirtualAccelerator) -> tuple[list[str], int]:
    """Return the weights that differ after both moves, and how many were moved in parts."""
    opened = anyaccel.open_device(NAME)
    model = Model()
    stock = copy.deepcopy(model).to(opened.torch_device)
    parameters = dict(model.named_parameters())
    stage_weights([model], opened)
    staged = count_on_device(model)
    model.to(opened.torch_device)
    wrong = [name for name, parameter in model.named_parameters() if parameters[name] is not parameter]
    for name, weight in stock.state_dict().items():
        other = model.state_dict()[name]
        same = torch.equal(other.cpu(), weight.cpu()) and other.stride() == weight.stride()
        if not same or other.device != weight.device or type(other) is not type(weight):
            wrong.append(name)
    grad = model.trained.weight.grad
    if grad is None or grad.device.type != NAME or model.tied is not model.weight:
        wrong.append("grad")
    return wrong, staged


def test_weights_of_every_kind_are_moved_as_by_stock() -> None:
    wrong, staged = run_forked(NAME, compare_with_stock)
    assert wrong == []
    assert staged >= 7


class Recorder(TorchFunctionMode):
    """A mode of the user that records the functions it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


class OwnMove(torch.nn.Linear):
    """A layer of the user that stays on the CPU."""

    def _apply(self, fn: Any, recurse: bool = True) -> "OwnMove":
        return self


def move_users_code(_: VirtualAccelerator) -> list[int]:
    opened = anyaccel.open_device(NAME)
    observed, own, patched = torch.nn.Linear(64, 64), OwnMove(64, 64), torch.nn.Linear(64, 64)
    patched.to = lambda *args, **kwargs: patched  # type: ignore[method-assign]
    with Recorder() as mode:
        stage_weights([observed], opened)
    stage_weights([torch.nn.Sequential(own, patched)], opened)
    return [*(count_on_device(model) for model in (observed, own, patched)), mode.seen.count("copy_")]


def test_weights_are_left_to_code_and_modes_of_the_user() -> None:
    assert run_forked(NAME, move_users_code) == [0, 0, 0, 0]


def place_and_load(folder: str) -> list[str]:
    """Return the weights that differ from those of the files, after loading and after placing."""
    stock: Any = diffusers.DiffusionPipeline
    reference = stock.from_pretrained(folder)
    placed = anyaccel.place(stock.from_pretrained(folder), NAME, dtype="float32")
    loaded = anyaccel.DiffusionPipeline.from_pretrained(folder, device=NAME, dtype="float32")
    different = []
    for component in ("unet", "vae", "text_encoder"):
        for key, weight in getattr(reference, component).state_dict().items():
            for pipe in (placed, loaded):
                other = getattr(pipe, component).state_dict()[key]
                if other.device.type != NAME or not torch.equal(other.cpu(), weight):
                    different.append(f"{component}.{key}")
    return different


def test_weights_of_placed_and_loaded_pipelines_are_those_of_the_files(tmp_path: Any) -> None:
    made: Any = recipes()["stable-diffusion"].make()
    made.save_pretrained(tmp_path)
    assert run_forked(NAME, lambda _: place_and_load(str(tmp_path))) == []


FREED_BLOCKS = """
import torch
from benchmarks.host_memory import read_status
from anyaccel.runtime.placement.weight_moves import release_freed_memory

first = torch.ones(2**24, dtype=torch.uint8)
del first  # from now on, glibc takes blocks of this size from its heap
blocks = [torch.ones(2**20, dtype=torch.uint8) for _ in range(300)]
del blocks[:-1]  # the last one is at the top of the heap, which glibc therefore does not shrink
before = read_status()["RssAnon"]
release_freed_memory()
print(before - read_status()["RssAnon"])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has malloc_trim")
def test_freed_memory_is_returned_to_the_operating_system() -> None:
    done = subprocess.run([sys.executable, "-c", FREED_BLOCKS], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 200 * 2**20
