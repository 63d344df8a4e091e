"""Device selection for tensors: mixed devices, default devices, the current device, invalid device indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from anyaccel.emulator.accelerator import VirtualAccelerator
from tests.emulator.forked import OnEveryDevice

on_every_device = OnEveryDevice()
CPU = torch.device("cpu")


def attend(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(query, key, query)


MIXTURES: dict[str, Callable[[torch.device, torch.device], Any]] = {
    "add": lambda d, e: torch.ones(2, device=d) + torch.ones(2, device=e),
    "add one element": lambda d, e: torch.ones(2, device=d) + torch.ones(1, device=e),
    "add in place": lambda d, e: torch.ones(2, device=d).add_(torch.ones(2, device=e)),
    "cat": lambda d, e: torch.cat([torch.ones(2, device=d), torch.ones(2, device=e)]),
    "stack scalars": lambda d, e: torch.stack([torch.ones((), device=d), torch.ones((), device=e)]),
    "matmul": lambda d, e: torch.ones(2, 2, device=e) @ torch.ones(2, 2, device=d),
    "linear": lambda d, e: torch.nn.Linear(2, 2, device=e)(torch.ones(2, device=d)),
    "convolution": lambda d, e: torch.nn.Conv2d(1, 1, 1, device=e)(torch.ones(1, 1, 2, 2, device=d)),
    "embedding": lambda d, e: functional.embedding(torch.tensor([1], device=e), torch.ones(3, 3, device=d)),
    "where": lambda d, e: torch.where(torch.tensor([True, False], device=e), torch.ones(2, device=d), 0.0),
    "gather": lambda d, e: torch.gather(torch.ones(3, device=d), 0, torch.tensor([1], device=e)),
    "index_select": lambda d, e: torch.index_select(torch.ones(3, device=d), 0, torch.tensor([1], device=e)),
    "masked_fill": lambda d, e: torch.ones(2, device=d).masked_fill(torch.tensor([True, False], device=e), 1.0),
    "equal": lambda d, e: torch.equal(torch.ones(2, device=d), torch.ones(2, device=e)),
    "attention": lambda d, e: attend(torch.ones(1, 1, 2, 2, device=d), torch.ones(1, 1, 2, 2, device=e)),
}


def check_rejected(mixture: Callable[..., Any], *devices: torch.device) -> None:
    with pytest.raises(RuntimeError, match=r"same device|indices should be"):
        mixture(*devices)


@on_every_device()
def test_cpu_and_device_tensors_do_not_mix(accelerator: VirtualAccelerator) -> None:
    for mixture in MIXTURES.values():
        check_rejected(mixture, accelerator.device(0), CPU)


@on_every_device()
def test_two_devices_do_not_mix(accelerator: VirtualAccelerator) -> None:
    for mixture in MIXTURES.values():
        check_rejected(mixture, accelerator.device(0), accelerator.device(1))
        check_rejected(mixture, accelerator.device(1), accelerator.device(0))


@on_every_device()
def test_cpu_scalar_mixes_with_device_tensors(accelerator: VirtualAccelerator) -> None:
    device = accelerator.device(1)
    tensor = torch.ones(2, device=device)
    for mixed in (tensor + torch.tensor(2.0), torch.tensor(2.0) * tensor, torch.tensor(2.0) * tensor[0]):
        assert mixed.device == device
    assert tensor.add_(torch.tensor(2.0)).tolist() == [3, 3]
    assert torch.where(tensor > 0, tensor, torch.tensor(0.0)).device == device


@on_every_device()
def test_scalar_of_another_device_does_not_mix(accelerator: VirtualAccelerator) -> None:
    check_rejected(
        lambda d, e: torch.ones(2, device=d) + torch.ones((), device=e), accelerator.device(0), accelerator.device(1)
    )


@on_every_device()
def test_cpu_tensor_cannot_be_indexed_by_a_device_tensor(accelerator: VirtualAccelerator) -> None:
    check_rejected(lambda d: torch.ones(3)[torch.tensor([1], device=d)], accelerator.device())


@on_every_device()
def test_device_tensor_cannot_be_indexed_by_another_device(accelerator: VirtualAccelerator) -> None:
    devices = (accelerator.device(0), accelerator.device(1))
    check_rejected(lambda d, e: torch.ones(3, device=d)[torch.tensor([1], device=e)], *devices)


@on_every_device()
def test_cpu_values_cannot_be_assigned_by_index(accelerator: VirtualAccelerator) -> None:
    def put(d: torch.device) -> None:
        torch.ones(3, device=d)[torch.tensor([0, 1], device=d)] = torch.ones(2)

    check_rejected(put, accelerator.device())


@on_every_device()
def test_copies_between_devices(accelerator: VirtualAccelerator) -> None:
    first, second = accelerator.device(0), accelerator.device(1)
    target = torch.zeros(2, device=first)
    assert target.copy_(torch.ones(2)).device == first
    assert target.copy_(torch.full((2,), 2.0, device=second)).tolist() == [2, 2]
    assert target.to(second).device == second
    cpu_tensor = torch.zeros(2)
    cpu_tensor.copy_(target)
    assert cpu_tensor.device == CPU
    assert cpu_tensor.tolist() == [2, 2]
    target[:1] = torch.tensor([5.0])
    assert target.tolist() == [5, 2]


@on_every_device()
def test_device_as_context(accelerator: VirtualAccelerator) -> None:
    device = accelerator.device(1)
    with device:
        tensors = [
            torch.ones(2), torch.arange(3), torch.randn(2), torch.rand(2), torch.randint(0, 3, (2,)), torch.eye(2),
            torch.nn.Linear(2, 2).weight, torch.ones(2)[[0, 1]], torch.linspace(0, 1, 3),
        ]  # fmt: skip
        assert torch.ones(2, device="cpu").device == torch.tensor(2, device="cpu").device == CPU
    assert {tensor.device for tensor in tensors} == {device}
    assert torch.ones(2).device == torch.tensor([1]).device == CPU


@on_every_device()
def test_data_factories_in_a_device_context(accelerator: VirtualAccelerator) -> None:
    with accelerator.device(1):
        tensors = torch.tensor([1.0]), torch.as_tensor([1]), torch.asarray([1])
    assert {tensor.device for tensor in tensors} == {accelerator.device(1)}


@on_every_device()
def test_device_context_without_index(accelerator: VirtualAccelerator) -> None:
    with torch.device(accelerator.name):
        assert torch.ones(2).device == torch.tensor([1]).device == accelerator.device(0)


@on_every_device()
def test_default_device_and_dtype(accelerator: VirtualAccelerator) -> None:
    torch.set_default_device(accelerator.device(1))
    assert torch.get_default_device() == torch.ones(2).device == torch.tensor([2.0]).device == accelerator.device(1)
    torch.set_default_device(None)
    assert torch.ones(2).device == CPU
    torch.set_default_dtype(torch.bfloat16)
    tensors = torch.ones(2, device=accelerator.device()), torch.tensor([1.0], device=accelerator.device())
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}


@on_every_device()
def test_torch_accelerator_reports_the_device(accelerator: VirtualAccelerator) -> None:
    current = torch.accelerator.current_accelerator()
    assert current is not None
    assert current.type == accelerator.name
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 2
    assert torch.accelerator.current_device_index() == 0
    tensor = torch.ones(256, device=accelerator.device(0))
    assert torch.accelerator.memory_allocated() == accelerator.memory.used(0) >= tensor.nbytes
    assert torch.accelerator.max_memory_allocated() == accelerator.memory.peak(0)
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == accelerator.memory.used(0)
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    torch.accelerator.set_device_index(1)
    assert torch.accelerator.current_device_index() == torch.get_device_module(accelerator.name).current_device() == 1


@on_every_device(broken="C++ uses index 0 regardless of the current device")
def test_device_name_without_index_is_the_current_device(accelerator: VirtualAccelerator) -> None:
    torch.accelerator.set_device_index(1)
    name = accelerator.name
    tensors = torch.ones(1, device=name), torch.tensor([1], device=name), torch.ones(1).to(name)
    assert [tensor.device for tensor in tensors] == [accelerator.device(1)] * 3


@on_every_device()
def test_device_index_context(accelerator: VirtualAccelerator) -> None:
    with torch.accelerator.device_index(1):
        assert torch.accelerator.current_device_index() == 1
    assert torch.accelerator.current_device_index() == 0


@on_every_device()
def test_invalid_device_index_raises(accelerator: VirtualAccelerator) -> None:
    with pytest.raises(RuntimeError):
        torch.ones(1, device=f"{accelerator.name}:7")
    with pytest.raises(RuntimeError):
        torch.accelerator.set_device_index(7)
