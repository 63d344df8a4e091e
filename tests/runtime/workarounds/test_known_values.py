"""Known values of small device tensors are those of the device, and reading them does not synchronize with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.runtime.workarounds.function_modes import PipelineFunctionMode
from anyaccel.runtime.workarounds.host_transfer import HostTransfer
from anyaccel.runtime.workarounds.known_values import KnownValues

Program = Callable[[torch.device], Any]


def make_mask(device: torch.device) -> torch.Tensor:
    mask = torch.zeros((4, 1), device=device)
    mask[0] = 1.0
    mask[1:2] = torch.ones_like(mask[:1])
    return mask


def write_by_mask(device: torch.device) -> Any:
    """JoyImage restores its reference images like this in every step."""
    values, target = torch.arange(4.0).reshape(1, 4).to(device).exp(), torch.zeros((1, 4), device=device).bool()
    target[0, :2] = torch.cat([torch.full((1,), True, device=device), torch.full((1,), False, device=device)])
    values[~target] = values.clone()[~target] * 2
    return target.tolist(), values


READS: dict[str, Program] = {
    "a literal": lambda d: bool(torch.tensor([0.001], device=d) >= torch.tensor([0.5, 1.0])[0]),
    "a sum": lambda d: bool((1.0 - make_mask(d)).to(torch.float16).sum() > 2),
    "a transposed mask": lambda d: make_mask(d).transpose(0, 1).tolist(),
    "an index": lambda d: "abcd"[torch.arange(4, device=d)[2]],
    "a copy to the CPU": lambda d: (torch.full((3,), 2, device=d) ** 2).cpu().tolist(),
    "a cast to the CPU": lambda d: torch.linspace(0, 1, 5, device=d).to("cpu", torch.float64).tolist(),
    "an array": lambda d: torch.ones(3, device=d).mul(3).cpu().numpy().tolist(),
    "elements": lambda d: [int(value) for value in torch.arange(3).to(d)],
    "nonzero": lambda d: torch.nonzero(make_mask(d)[:, 0] > 0).flatten().tolist(),
    "a full tensor": lambda d: torch.randn(2, 3).to(d).new_full((2,), 3).tolist(),
    "a minimum with its index": lambda d: [value.item() for value in torch.tensor([3.0, 1.0], device=d).min(dim=0)],
    "a mask in an index": lambda d: write_by_mask(d)[0],
}


def change(tensor: Any, index: Any, value: Any) -> Any:
    tensor[index] = value
    return tensor


def assign_data(tensor: torch.Tensor) -> torch.Tensor:
    tensor.data = torch.ones_like(tensor)
    return tensor


CHANGES: dict[str, Program] = {
    "an in-place operation": lambda d: make_mask(d).add_(1).sum().item(),
    "a write to a view": lambda d: [(mask := make_mask(d))[2:].fill_(7), mask.sum().item()][1],
    "a write by a view": lambda d: [change((mask := make_mask(d)).view(-1), 2, 7), mask.sum().item()][1],
    "a write through data": lambda d: [(mask := make_mask(d)).data.fill_(7), mask.sum().item()][1],
    "new data": lambda d: assign_data(make_mask(d)).sum().item(),
    "an output": lambda d: [mask := make_mask(d), torch.add(mask, 1, out=mask), mask.sum().item()][2],
    "a write of other values": lambda d: change(make_mask(d), 0, torch.tensor([2.0]).to(d).atan()).sum().item(),
}
# With the result on a device, to which values are always copied.
COPIES: dict[str, tuple[Program, float]] = {
    "an array that changes": (
        lambda d: [
            a := torch.zeros(3).numpy(),
            known := torch.as_tensor(a, device=d),
            change(a, 0, 5),
            known.sum().item(),
        ][3],
        0,
    ),
    "a CPU tensor that changes": (
        lambda d: [source := torch.zeros(3), known := source.to(d), source.add_(1), known.sum().item()][3],
        0,
    ),
    "a read copy that changes": (
        lambda d: [known := torch.ones(3, device=d), known.cpu().add_(1), known.sum().item()][2],
        3,
    ),
}


def run_in_mode(program: Program, accelerator: VirtualAccelerator) -> tuple[Any, int]:
    """Return the result of a program on the device, and how often it synchronized."""
    device = accelerator.device()
    mode = PipelineFunctionMode({}, HostTransfer(device, {}))
    mode.known_values = KnownValues(device)
    accelerator.ledger.clear()
    with mode:
        result = program(device)
    return result, sum(accelerator.ledger.round_trips().values())


@pytest.mark.parametrize("device", ["mps", "npu"])
def test_known_values_are_read_without_waiting(device: str) -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        for name, program in READS.items():
            assert run_in_mode(program, accelerator) == (program(torch.device("cpu")), 0), name

    run_forked(device, use)


@pytest.mark.parametrize("device", ["mps", "npu"])
def test_changed_values_are_never_stale(device: str) -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        for name, program in CHANGES.items():
            assert run_in_mode(program, accelerator)[0] == program(torch.device("cpu")), name
        for name, (program, expected) in COPIES.items():
            assert run_in_mode(program, accelerator)[0] == expected, name

    run_forked(device, use)


def test_elements_that_a_mask_selects_are_written() -> None:
    expected = write_by_mask(torch.device("cpu"))[1]

    def use(accelerator: VirtualAccelerator) -> None:
        (_, written), waits = run_in_mode(write_by_mask, accelerator)
        torch.testing.assert_close(written.cpu(), expected)
        assert waits == 0
        accelerator.ledger.assert_clean("error")

    run_forked("neuron", use)


def test_computed_values_are_not_known() -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        weights = torch.arange(3.0).to(accelerator.device())
        assert run_in_mode(lambda device: (weights * torch.ones(3, device=device)).sum().item(), accelerator) == (3, 1)

    run_forked("npu", use)


def test_tensors_are_forgotten_when_they_are_freed() -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        known_values = KnownValues(accelerator.device())
        mode = PipelineFunctionMode({}, HostTransfer(accelerator.device(), {}))
        mode.known_values = known_values
        with mode:
            for _ in range(3):
                torch.ones(3, device=accelerator.device()) + 1
        assert not known_values._entries

    run_forked("npu", use)
