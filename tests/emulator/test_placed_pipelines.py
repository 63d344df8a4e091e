"""Where tensors lie: what may not meet, default devices, the current device, numbers of devices that are not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from anyaccel.emulator.accelerator import VirtualAccelerator
from tests.emulator.forked import Everywhere

everywhere = Everywhere()
HOST = torch.device("cpu")


def attend(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(query, key, query)


MIXTURES: dict[str, Callable[[torch.device, torch.device], Any]] = {
    "add": lambda d, e: torch.ones(2, device=d) + torch.ones(2, device=e),
    "add one element": lambda d, e: torch.ones(2, device=d) + torch.ones(1, device=e),
    "add in place": lambda d, e: torch.ones(2, device=d).add_(torch.ones(2, device=e)),
    "cat": lambda d, e: torch.cat([torch.ones(2, device=d), torch.ones(2, device=e)]),
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


def refuse(mixture: Callable[..., Any], *devices: torch.device) -> None:
    with pytest.raises(RuntimeError, match=r"same device|indices should be"):
        mixture(*devices)


@everywhere()
def test_the_device_and_the_host_do_not_mix(accelerator: VirtualAccelerator) -> None:
    for mixture in MIXTURES.values():
        refuse(mixture, accelerator.device(0), HOST)


@everywhere()
def test_two_devices_do_not_mix(accelerator: VirtualAccelerator) -> None:
    for mixture in MIXTURES.values():
        refuse(mixture, accelerator.device(0), accelerator.device(1))
        refuse(mixture, accelerator.device(1), accelerator.device(0))


@everywhere()
def test_a_number_of_the_host_mixes(accelerator: VirtualAccelerator) -> None:
    there = accelerator.device(1)
    tensor = torch.ones(2, device=there)
    for mixed in (tensor + torch.tensor(2.0), torch.tensor(2.0) * tensor, torch.tensor(2.0) * tensor[0]):
        assert mixed.device == there
    assert tensor.add_(torch.tensor(2.0)).tolist() == [3, 3]
    assert torch.where(tensor > 0, tensor, torch.tensor(0.0)).device == there


@everywhere()
def test_a_number_of_another_device_does_not_mix(accelerator: VirtualAccelerator) -> None:
    refuse(
        lambda d, e: torch.ones(2, device=d) + torch.ones((), device=e), accelerator.device(0), accelerator.device(1)
    )


@everywhere()
def test_the_host_is_not_indexed_by_the_device(accelerator: VirtualAccelerator) -> None:
    refuse(lambda d: torch.ones(3)[torch.tensor([1], device=d)], accelerator.device())


@everywhere()
def test_a_device_is_not_indexed_by_another(accelerator: VirtualAccelerator) -> None:
    devices = (accelerator.device(0), accelerator.device(1))
    refuse(lambda d, e: torch.ones(3, device=d)[torch.tensor([1], device=e)], *devices)


@everywhere()
def test_values_of_the_host_are_not_put_into_the_device(accelerator: VirtualAccelerator) -> None:
    def put(d: torch.device) -> None:
        torch.ones(3, device=d)[torch.tensor([0, 1], device=d)] = torch.ones(2)

    refuse(put, accelerator.device())


@everywhere()
def test_copies_cross(accelerator: VirtualAccelerator) -> None:
    first, second = accelerator.device(0), accelerator.device(1)
    target = torch.zeros(2, device=first)
    assert target.copy_(torch.ones(2)).device == first
    assert target.copy_(torch.full((2,), 2.0, device=second)).tolist() == [2, 2]
    assert target.to(second).device == second
    host = torch.zeros(2)
    host.copy_(target)
    assert host.device == HOST
    assert host.tolist() == [2, 2]
    target[:1] = torch.tensor([5.0])
    assert target.tolist() == [5, 2]


@everywhere()
def test_with_a_device(accelerator: VirtualAccelerator) -> None:
    there = accelerator.device(1)
    with there:
        made = [
            torch.ones(2), torch.arange(3), torch.randn(2), torch.rand(2), torch.randint(0, 3, (2,)), torch.eye(2),
            torch.nn.Linear(2, 2).weight, torch.ones(2)[[0, 1]], torch.linspace(0, 1, 3),
        ]  # fmt: skip
        assert torch.ones(2, device="cpu").device == torch.tensor(2, device="cpu").device == HOST
    assert {tensor.device for tensor in made} == {there}
    assert torch.ones(2).device == torch.tensor([1]).device == HOST


@everywhere()
def test_data_with_a_device(accelerator: VirtualAccelerator) -> None:
    with accelerator.device(1):
        made = torch.tensor([1.0]), torch.as_tensor([1]), torch.asarray([1])
    assert {tensor.device for tensor in made} == {accelerator.device(1)}


@everywhere()
def test_with_a_device_by_its_name_alone(accelerator: VirtualAccelerator) -> None:
    with torch.device(accelerator.name):
        assert torch.ones(2).device == torch.tensor([1]).device == accelerator.device(0)


@everywhere()
def test_default_device_and_type(accelerator: VirtualAccelerator) -> None:
    torch.set_default_device(accelerator.device(1))
    assert torch.get_default_device() == torch.ones(2).device == torch.tensor([2.0]).device == accelerator.device(1)
    torch.set_default_device(None)
    assert torch.ones(2).device == HOST
    torch.set_default_dtype(torch.bfloat16)
    made = torch.ones(2, device=accelerator.device()), torch.tensor([1.0], device=accelerator.device())
    assert {tensor.dtype for tensor in made} == {torch.bfloat16}


@everywhere()
def test_torch_accelerator_speaks_of_the_device(accelerator: VirtualAccelerator) -> None:
    current = torch.accelerator.current_accelerator()
    assert current is not None
    assert current.type == accelerator.name
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 2
    assert torch.accelerator.current_device_index() == 0
    kept = torch.ones(256, device=accelerator.device(0))
    assert torch.accelerator.memory_allocated() == accelerator.memory.used(0) >= kept.nbytes
    assert torch.accelerator.max_memory_allocated() == accelerator.memory.peak(0)
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == accelerator.memory.used(0)
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    torch.accelerator.set_device_index(1)
    assert torch.accelerator.current_device_index() == torch.get_device_module(accelerator.name).current_device() == 1


@everywhere(broken="C++ fills in the number 0, whatever the current device is")
def test_a_name_alone_is_the_current_device(accelerator: VirtualAccelerator) -> None:
    torch.accelerator.set_device_index(1)
    name = accelerator.name
    made = torch.ones(1, device=name), torch.tensor([1], device=name), torch.ones(1).to(name)
    assert [tensor.device for tensor in made] == [accelerator.device(1)] * 3


@everywhere()
def test_device_index_is_a_context(accelerator: VirtualAccelerator) -> None:
    with torch.accelerator.device_index(1):
        assert torch.accelerator.current_device_index() == 1
    assert torch.accelerator.current_device_index() == 0


@everywhere()
def test_a_device_that_is_not_there(accelerator: VirtualAccelerator) -> None:
    with pytest.raises(RuntimeError):
        torch.ones(1, device=f"{accelerator.name}:7")
    with pytest.raises(RuntimeError):
        torch.accelerator.set_device_index(7)
