"""Copies of weights to the device in parts, through pinned memory."""

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
from anyaccel.runtime.placement import staged_copy
from anyaccel.runtime.placement.staged_copy import staging_copies

NAME = "xpu"


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weights of small models fill several buffers, on a virtual device that has no events."""
    monkeypatch.setattr(staged_copy, "_BUFFER_BYTES", 2**10)
    monkeypatch.setattr(staged_copy, "_SMALLEST_BYTES", 2**8)
    monkeypatch.setattr(Driver, "has_events", True)


def make_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(40, 60, generator=generator)
    return {
        "float32": values,
        "bfloat16": values.bfloat16(),
        "uint8": (values * 10).to(torch.uint8),
        "bool": values > 0,
        "complex64": torch.complex(values, values),
        "parameter": torch.nn.Parameter(values),
        "offset": values[3:, :],
        "expanded": values[:1].expand(40, 60),
        "transposed": values.t(),
        "channels_last": torch.randn(2, 8, 6, 6, generator=generator).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 5),
    }


def copy_tensors(_: VirtualAccelerator) -> tuple[list[str], int]:
    """Copy tensors of many kinds; return the wrong ones, and how many were copied in parts."""
    opened = anyaccel.open_device(NAME)
    wrong, copied, results = [], [], {}
    plain = staged_copy._StagedCopies._copy

    def count(self: Any, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        copied.append(tensor)
        return plain(self, tensor, device)

    staged_copy._StagedCopies._copy = count  # type: ignore[method-assign]
    with torch.no_grad(), staging_copies(opened):
        for name, tensor in make_tensors().items():
            results[name] = tensor.to(opened.torch_device)
    for name, tensor in make_tensors().items():
        with torch.no_grad():
            stock = tensor.to(opened.torch_device)
        result = results[name]
        same = torch.equal(result.cpu(), tensor) and result.stride() == stock.stride()
        if not same or result.device != stock.device or type(result) is not type(stock):
            wrong.append(name)
    return wrong, len(copied)


def test_tensors_of_every_kind_arrive_unchanged() -> None:
    wrong, copied = run_forked(NAME, copy_tensors)
    assert wrong == []
    assert copied >= 7


class Recorder(TorchFunctionMode):
    """A mode of the user that records the functions it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def move_in_mode(_: VirtualAccelerator) -> list[str]:
    with Recorder() as mode, staging_copies(anyaccel.open_device(NAME)):
        torch.nn.Linear(64, 64).to(NAME)
    return [name for name in mode.seen if name in ("to", "copy_")]


def test_modes_of_the_user_see_the_copy_as_it_is() -> None:
    assert run_forked(NAME, move_in_mode) == ["to", "to"]


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
