"""Tensors and modules of a virtual device leave it and come back: state dicts, copies, pickles and files."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from tests.emulator.forked import DEVICES, Everywhere

everywhere = Everywhere()
HOST = torch.device("cpu")


@everywhere()
def test_state_dicts_cross(accelerator: VirtualAccelerator) -> None:
    there = accelerator.device(1)
    source, host, target = (nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(3))
    source.to(there)
    target.to(there)
    assert {tensor.device for tensor in source.state_dict().values()} == {there}
    host.load_state_dict(source.state_dict())
    target.load_state_dict(host.state_dict())
    weights = [module.get_parameter("0.weight") for module in (source, host, target)]
    assert [weight.device for weight in weights] == [there, HOST, there]
    assert weights[0].tolist() == weights[1].tolist() == weights[2].tolist()


def make_tensors(there: torch.device) -> dict[str, torch.Tensor]:
    return {
        "turned": torch.arange(6.0, device=there).reshape(2, 3).t(),
        "part": torch.arange(6, device=there)[2:4],
        "number": torch.tensor(True, device=there),
        "parameter": nn.Parameter(torch.ones(2, device=there)),
        "frozen": nn.Parameter(torch.ones(2, device=there), requires_grad=False),
        "bfloat16": torch.ones(2, device=there, dtype=torch.bfloat16),
    }


@everywhere()
def test_copies_and_pickles_keep_all(accelerator: VirtualAccelerator) -> None:
    for name, tensor in make_tensors(accelerator.device(1)).items():
        for again in (pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor), copy.copy(tensor)):
            assert torch.equal(again, tensor), name
            for attribute in ("device", "dtype", "requires_grad"):
                assert getattr(again, attribute) == getattr(tensor, attribute), name
            assert (type(again), again.stride()) == (type(tensor), tensor.stride())
            assert isinstance(again, nn.Parameter) == isinstance(tensor, nn.Parameter), name
    module = nn.Linear(2, 2).to(accelerator.device(1))
    again = copy.deepcopy(module)
    again.weight.data.zero_()
    assert module.weight.abs().sum() > 0
    assert torch.equal(pickle.loads(pickle.dumps(module)).weight, module.weight)


@everywhere(broken="each tensor is copied by itself, not its storage")
def test_copies_keep_aliases(accelerator: VirtualAccelerator) -> None:
    base = torch.zeros(4, device=accelerator.device())
    again, part = copy.deepcopy((base, base[1:]))
    again[1] = 1
    assert part[0] == 1


@everywhere()
def test_saved_files_load(accelerator: VirtualAccelerator) -> None:
    there, file = accelerator.device(1), io.BytesIO()
    saved = make_tensors(there) | {"host": torch.ones(2)}
    torch.save(saved, file)
    for options, place in (({}, there), ({"weights_only": False}, there), ({"map_location": "cpu"}, HOST)):
        file.seek(0)
        loaded = torch.load(file, **options)
        for name, tensor in saved.items():
            assert torch.equal(loaded[name].cpu(), tensor.cpu()), name
            assert loaded[name].device == (HOST if name == "host" else place), name


@pytest.mark.parametrize("device", DEVICES)
def test_saved_files_load_onto_the_device(device: str) -> None:
    def load(accelerator: VirtualAccelerator) -> list[float]:
        file = io.BytesIO()
        torch.save({"weight": torch.ones(2)}, file)
        file.seek(0)
        loaded: torch.Tensor = torch.load(file, map_location=accelerator.device())["weight"]
        assert loaded.device == accelerator.device()
        return [float(number) for number in loaded]

    assert run_forked(device, load) == [1.0, 1.0]


@everywhere()
def test_safetensors(accelerator: VirtualAccelerator) -> None:
    there = accelerator.device(1)
    saved = {"a": torch.arange(6.0, device=there).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16, device=there)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        save_file(saved, path)
        for device, place in ((str(there), there), (accelerator.name, accelerator.device(0)), ("cpu", HOST)):
            loaded = load_file(path, device=device)
            assert {tensor.device for tensor in loaded.values()} == {place}
            assert loaded["b"].dtype is torch.bfloat16
            assert torch.equal(loaded["a"].cpu(), saved["a"].cpu())
