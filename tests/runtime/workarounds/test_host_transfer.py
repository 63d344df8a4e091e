"""CPU tensors that are used together with device tensors: what a function writes is never lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from anyaccel.backends.device import open_device
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.planning import PipelineFacts, PlacementOptions, make_plan
from anyaccel.runtime.workarounds.function_modes import PipelineFunctionMode, make_pipeline_function_mode
from tests.emulator.forked import DEVICES

Tensor = torch.Tensor
# Gets the tensor that the function writes into and another tensor with positive elements, both of shape (2, 3).
Program = Callable[[Tensor, Tensor], object]


def add_in_place(target: Tensor, other: Tensor) -> None:
    before = target
    target += other
    assert target is before


def rows(other: Tensor) -> Tensor:
    """Return the indices 1 and 0, on the device of `other`."""
    return torch.tensor([1, 0]).to(other.device)


WRITES: dict[str, Program] = {
    "+=": add_in_place,
    "**=": lambda target, other: target.__ipow__(other),
    "|=": lambda target, other: target.copy_(target.bool().__ior__(other > 1)),
    "add_": lambda target, other: target.add_(other, alpha=2),
    "add_, by name": lambda target, other: target.add_(other=other),
    "add_ of a scalar": lambda target, other: target[0, 0].add_(other.sum()),
    "lerp_": lambda target, other: target.lerp_(other, 0.3),
    "addcmul_": lambda target, other: target.addcmul_(other, target.clone(), value=0.5),
    "masked_fill_": lambda target, other: target.masked_fill_(other > 1, 7.0),
    "masked_scatter_": lambda target, other: target.masked_scatter_(other > 1, other),
    "copy_": lambda target, other: target.copy_(other),
    "index_put_": lambda target, other: target.index_put_((rows(other),), other, accumulate=True),
    "index_add_": lambda target, other: target.index_add_(0, rows(other), other),
    "index_copy_": lambda target, other: target.index_copy_(0, rows(other), other),
    "scatter_": lambda target, other: target.scatter_(0, rows(other).expand(3, 2).T, other),
    "scatter_add_": lambda target, other: target.scatter_add_(0, index=rows(other).expand(3, 2).T, src=other),
    "batch_norm": lambda target, other: functional.batch_norm(other, target[0], target[1], training=True),
    "clamp_": lambda target, other: target.clamp_(min=other),
    "baddbmm_": lambda target, other: target[None].baddbmm_(other[None], torch.ones(1, 3, 3).to(other.device)),
    "a slice": lambda target, other: target.__setitem__((0, slice(None)), other[1]),
    "a mask": lambda target, other: target.__setitem__(other > 1, other[other > 1]),
    "indices": lambda target, other: target.__setitem__((rows(other), slice(0, 2)), other[:, :2]),
    "a list of indices": lambda target, other: target.__setitem__([1, 0], other),
    "_foreach_add_": lambda target, other: torch._foreach_add_([target, target], [other, other]),
    "torch.relu_": lambda target, other: torch.relu_(target.sub_(other)),
    "inplace=True": lambda target, other: torch.nn.functional.relu(target.sub_(other), inplace=True),
    "out=": lambda target, other: torch.mul(other, 2, out=target),
    "out= of a method": lambda target, other: torch.add(target, other, out=target),
    "out= with two tensors": lambda target, other: torch.aminmax(other, dim=0, out=(target[0], target[1])),
    "baddbmm(out=)": lambda target, other: torch.baddbmm(
        target[None], other[None], torch.ones(1, 3, 3).to(other.device), out=target[None]
    ),
    "baddbmm(out=), beta=0": lambda target, other: torch.baddbmm(
        target[None], other[None], torch.ones(1, 3, 3).to(other.device), beta=0, out=target[None]
    ),
    "matmul(out=)": lambda target, other: torch.matmul(other, torch.ones(3, 3).to(other.device), out=target),
    "cat(out=)": lambda target, other: torch.cat([other[:1], target[1:].clone()], out=target),
    "masked_select(out=)": lambda target, other: torch.masked_select(other, other > 0, out=target.flatten()),
    "fft(out=)": lambda target, other: target.copy_(
        torch.fft.fft(other, out=torch.ones(2, 3, dtype=torch.complex64).to(target.device)).abs()
    ),
    "complex(out=)": lambda target, other: target.copy_(
        torch.complex(other, other, out=torch.ones(2, 3, dtype=torch.complex64).to(target.device)).abs()
    ),
    "histc(out=)": lambda target, other: torch.histc(other, 3, 0, 5, out=target[1]),
}


def make_tensors() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 2, 6).reshape(2, 3), torch.linspace(0.5, 4, 6).reshape(2, 3)


def make_mode(accelerator: VirtualAccelerator) -> PipelineFunctionMode:
    sheet = open_device(accelerator.name).sheet
    plan = make_plan(sheet, PipelineFacts(pipeline="Test"), PlacementOptions(), device=accelerator.name)
    return make_pipeline_function_mode(plan, accelerator.device())


@pytest.mark.parametrize("device", DEVICES)
def test_writes_are_those_of_the_cpu(device: str) -> None:
    """The written tensor is on the CPU, the device, or both tensors are on the device."""

    def use(accelerator: VirtualAccelerator) -> list[str]:
        wrong = []
        for name, write in WRITES.items():
            expected, other = make_tensors()
            write(expected, other)
            for target_device, other_device in (("cpu", device), (device, "cpu"), (device, device)):
                target, other = make_tensors()
                target, other = target.to(target_device), other.to(other_device)
                with torch.no_grad(), make_mode(accelerator):
                    write(target, other)
                if not torch.allclose(target.cpu(), expected, equal_nan=True):
                    wrong.append(f"{name} into {target_device}")
        return wrong

    assert run_forked(device, use, strict=True) == []


def test_writes_into_tensors_of_both_devices_raise() -> None:
    def use(accelerator: VirtualAccelerator) -> str:
        on_cpu, on_device = torch.zeros(3), torch.zeros(3).to(accelerator.device())
        with make_mode(accelerator), pytest.raises(RuntimeError, match="two devices") as caught:
            torch._foreach_add_([on_cpu, on_device], [on_device, on_cpu])
        return str(caught.value)

    assert "hpu" in run_forked("hpu", use, strict=True)
