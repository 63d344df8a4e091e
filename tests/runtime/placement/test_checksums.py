"""Checksums of weights, which must change with every kind of edit."""

import math
from collections.abc import Callable

import pytest
import torch

from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.runtime.placement.checksums import choose_chunk_size
from anyaccel.runtime.placement.checksums import compute_checksums as compute_in_chunks

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
SHAPES = ((64, 64), (1024,), (7, 3), (2,), (1,), (64, 65))


def compute_checksums(tensors: list[torch.Tensor], chunk_size: int = 1000) -> list[list[int]]:
    return compute_in_chunks(tensors, chunk_size)


def _swap_halves(value: torch.Tensor) -> None:
    half = value.numel() // 2
    flat = value.view(-1)
    flat[: 2 * half] = torch.cat((flat[half : 2 * half], flat[:half]))


EDITS: dict[str, Callable[[torch.Tensor], object]] = {
    "negate": torch.Tensor.neg_,
    "double": lambda value: value.mul_(2),
    "halve": lambda value: value.mul_(0.5),
    "multiply by 1024": lambda value: value.mul_(1024),
    "reverse": lambda value: value.copy_(value.flip(0).clone()),
    "reverse the first half": lambda value: value[: len(value) // 2].copy_(value[: len(value) // 2].flip(0).clone()),
    "swap halves": _swap_halves,
    "swap two elements": lambda value: value.view(-1)[:2].copy_(value.view(-1)[:2].flip(0).clone()),
    "negate two elements": lambda value: value.view(-1)[:2].neg_(),
    "zero": torch.Tensor.zero_,
    "add to one element": lambda value: value.view(-1)[-1:].add_(1e-3),
}


def _check_edits(tensor: torch.Tensor, *, bits: torch.dtype | None = None) -> None:
    """Check that the checksum of a tensor changes with its bits."""
    before = compute_checksums([tensor])
    assert compute_checksums([tensor.clone()]) == before
    for name, edit in EDITS.items():
        edited = tensor.clone()
        if bits is None:
            edit(edited)
        else:  # torch has few operations on 8-bit floats
            value = edited.float()
            edit(value)
            edited = value.to(tensor.dtype)
        views = [value.cpu().contiguous().view(torch.uint8) for value in (tensor, edited)]
        unchanged = torch.equal(*views)
        assert (compute_checksums([edited]) == before) == unchanged, (name, tensor.dtype, tuple(tensor.shape))


def test_every_edit_changes_the_checksum() -> None:
    generator = torch.Generator().manual_seed(1)
    for shape in SHAPES:
        values = torch.randn(shape, generator=generator)
        for dtype in FLOATS:
            _check_edits(values.to(dtype))
        for dtype in EIGHT_BITS:
            _check_edits((values * 20).to(dtype), bits=dtype)
        _check_edits(torch.ones(shape))  # equal values


@pytest.mark.parametrize("device", ["mps", "hpu", "neuron"])
def test_every_edit_changes_the_checksum_on_a_device(device: str) -> None:
    def run(accelerator: VirtualAccelerator) -> None:
        with torch.no_grad():
            for shape in SHAPES:
                for dtype in (torch.float32, torch.bfloat16):
                    _check_edits(torch.randn(shape).to(dtype).to(torch.device(device, 0)))

    run_forked(device, run)


def test_tensors_of_several_chunks() -> None:
    tensors = [torch.randn(64, 64), torch.randn(3), torch.randn(5, 11, dtype=torch.float64)]
    before = compute_checksums(tensors, 32)
    assert [len(sums) for sums in before] == [2 * math.ceil(tensor.nbytes / 2 / 32) for tensor in tensors]
    tensors[0].view(-1)[:32] = tensors[0].view(-1)[:32].view(2, 16).flip(0).flatten()  # swaps two chunks
    after = compute_checksums(tensors, 32)
    assert after[0][:2] == before[0][2:4]
    assert after[0][2:4] == before[0][:2]
    assert after[0] != before[0]
    assert after[1:] == before[1:]


def test_checksums_need_little_memory_compared_with_the_model() -> None:
    for total_bytes in (2**16, 2**20, 2**30, 2**40):
        bytes_needed = 16 * choose_chunk_size(total_bytes)
        assert bytes_needed <= min(total_bytes / 16, 2**25)


def test_unusual_tensors() -> None:
    tensors = [
        torch.zeros(0), torch.tensor(3), torch.tensor(True), torch.arange(3, dtype=torch.int8),
        torch.randn(3, dtype=torch.complex64), torch.randn(4, 6).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ]  # fmt: skip
    before = compute_checksums(tensors)
    assert compute_checksums([]) == []
    assert compute_checksums(tensors) == before
    for index, tensor in enumerate(tensors[1:], start=1):
        torch.logical_not(tensor, out=tensor) if tensor.dtype == torch.bool else tensor.neg_()
        after = compute_checksums(tensors)
        assert [row for row, (old, new) in enumerate(zip(before, after, strict=True)) if old != new] == [index]
        before = after
