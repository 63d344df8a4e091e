"""State dicts, copies, pickles and saved files of tensors and modules on a virtual device."""

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
from tests.emulator.forked import DEVICES, OnEveryDevice

on_every_device = OnEveryDevice()
CPU = torch.device("cpu")


@on_every_device()
def test_state_dicts_between_devices(accelerator: VirtualAccelerator) -> None:
    device = accelerator.device(1)
    source, cpu_module, target = (nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(3))
    source.to(device)
    target.to(device)
    assert {tensor.device for tensor in source.state_dict().values()} == {device}
    cpu_module.load_state_dict(source.state_dict())
    target.load_state_dict(cpu_module.state_dict())
    weights = [module.get_parameter("0.weight") for module in (source, cpu_module, target)]
    assert [weight.device for weight in weights] == [device, CPU, device]
    assert weights[0].tolist() == weights[1].tolist() == weights[2].tolist()


def make_tensors(device: torch.device) -> dict[str, torch.Tensor]:
    return {
        "turned": torch.arange(6.0, device=device).reshape(2, 3).t(),
        "part": torch.arange(6, device=device)[2:4],
        "number": torch.tensor(True, device=device),
        "parameter": nn.Parameter(torch.ones(2, device=device)),
        "frozen": nn.Parameter(torch.ones(2, device=device), requires_grad=False),
        "bfloat16": torch.ones(2, device=device, dtype=torch.bfloat16),
    }


@on_every_device()
def test_copies_and_pickles_preserve_everything(accelerator: VirtualAccelerator) -> None:
    for name, tensor in make_tensors(accelerator.device(1)).items():
        for copied in (pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor), copy.copy(tensor)):
            assert torch.equal(copied, tensor), name
            for attribute in ("device", "dtype", "requires_grad"):
                assert getattr(copied, attribute) == getattr(tensor, attribute), name
            assert (type(copied), copied.stride()) == (type(tensor), tensor.stride())
            assert isinstance(copied, nn.Parameter) == isinstance(tensor, nn.Parameter), name
    module = nn.Linear(2, 2).to(accelerator.device(1))
    copied = copy.deepcopy(module)
    copied.weight.data.zero_()
    assert module.weight.abs().sum() > 0
    assert torch.equal(pickle.loads(pickle.dumps(module)).weight, module.weight)


@on_every_device(broken="tensors are copied one by one, so views do not share storage")
def test_copies_preserve_aliasing(accelerator: VirtualAccelerator) -> None:
    base = torch.zeros(4, device=accelerator.device())
    copied, part = copy.deepcopy((base, base[1:]))
    copied[1] = 1
    assert part[0] == 1


@on_every_device()
def test_saved_files_load(accelerator: VirtualAccelerator) -> None:
    device, file = accelerator.device(1), io.BytesIO()
    saved = make_tensors(device) | {"cpu": torch.ones(2)}
    torch.save(saved, file)
    for options, expected in (({}, device), ({"weights_only": False}, device), ({"map_location": "cpu"}, CPU)):
        file.seek(0)
        loaded = torch.load(file, **options)
        for name, tensor in saved.items():
            assert torch.equal(loaded[name].cpu(), tensor.cpu()), name
            assert loaded[name].device == (CPU if name == "cpu" else expected), name


@pytest.mark.parametrize("device", DEVICES)
def test_saved_files_load_to_the_device(device: str) -> None:
    def load(accelerator: VirtualAccelerator) -> list[float]:
        file = io.BytesIO()
        torch.save({"weight": torch.ones(2)}, file)
        file.seek(0)
        loaded: torch.Tensor = torch.load(file, map_location=accelerator.device())["weight"]
        assert loaded.device == accelerator.device()
        return [float(number) for number in loaded]

    assert run_forked(device, load) == [1.0, 1.0]


@on_every_device()
def test_safetensors(accelerator: VirtualAccelerator) -> None:
    device = accelerator.device(1)
    saved = {
        "a": torch.arange(6.0, device=device).reshape(2, 3),
        "b": torch.ones(2, dtype=torch.bfloat16, device=device),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        save_file(saved, path)
        for name, expected in ((str(device), device), (accelerator.name, accelerator.device(0)), ("cpu", CPU)):
            loaded = load_file(path, device=name)
            assert {tensor.device for tensor in loaded.values()} == {expected}
            assert loaded["b"].dtype is torch.bfloat16
            assert torch.equal(loaded["a"].cpu(), saved["a"].cpu())
