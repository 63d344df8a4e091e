"""Memory accounting of virtual devices, checked to the byte against hand-computed sizes."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from anyaccel.backends.claim import Unknown, Yes
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from tests.emulator.forked import DEVICES, OnEveryDevice

on_every_device = OnEveryDevice()
FLOAT32_BYTES = 4
"""Bytes per float32 element."""


def measure(accelerator: VirtualAccelerator, run: Callable[[], torch.Tensor]) -> tuple[int, int]:
    """Return the bytes of the result and the peak of the run, relative to the memory used before it."""
    memory = accelerator.memory
    before = memory.used(0)
    memory.reset_peak(0)
    with torch.no_grad():
        result = run()
    size, peak = memory.used(0) - before, memory.peak(0) - before
    assert result.untyped_storage().nbytes() == size
    del result
    assert memory.used(0) == before
    return size, peak


@on_every_device()
def test_linear_layers(accelerator: VirtualAccelerator) -> None:
    chain = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 32)).to(accelerator.device(0))
    weights = (64 * 256 + 256 + 256 * 32 + 32) * FLOAT32_BYTES
    assert accelerator.memory.used(0) == weights
    inputs = torch.ones(8, 64, device=accelerator.device(0))
    assert accelerator.memory.used(0) == weights + 8 * 64 * FLOAT32_BYTES
    hidden, output = 8 * 256 * FLOAT32_BYTES, 8 * 32 * FLOAT32_BYTES
    # Sequential frees each input after the next output exists: the peak is the input and output of ReLU.
    assert measure(accelerator, lambda: chain(inputs)) == (output, hidden + hidden)


class Attention(nn.Module):
    """Attention with one head and explicit intermediate tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.to_query, self.to_key, self.to_value = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.to_query(hidden), self.to_key(hidden), self.to_value(hidden)
        scores = torch.bmm(query, key.transpose(1, 2))
        weights = scores.softmax(-1)
        return torch.bmm(weights, value)


@on_every_device()
def test_attention(accelerator: VirtualAccelerator) -> None:
    batch, tokens, width = 2, 48, 16
    attention = Attention(width).to(accelerator.device(0))
    inputs = torch.ones(batch, tokens, width, device=accelerator.device(0))
    rows, scores = batch * tokens * width * FLOAT32_BYTES, batch * tokens * tokens * FLOAT32_BYTES
    # Locals live until forward returns: query, key, value, scores, weights and the output. The transpose is a view.
    assert measure(accelerator, lambda: attention(inputs)) == (rows, 3 * rows + 2 * scores + rows)
    fused = functional.scaled_dot_product_attention
    # Fused attention has no scores. A device without it holds two float32 copies.
    transient = 0 if isinstance(accelerator.sheet.fused_attention, Yes | Unknown) else 2 * scores
    assert measure(accelerator, lambda: fused(inputs, inputs, inputs)) == (rows, max(rows, transient))


class Residual(nn.Module):
    """A UNet block with named intermediate tensors."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = functional.silu(self.norm(images))
        hidden = self.first(hidden)
        hidden = self.second(functional.silu(hidden))
        output: torch.Tensor = images + hidden
        return output


@on_every_device()
def test_residual_block(accelerator: VirtualAccelerator) -> None:
    block = Residual(8).to(accelerator.device(0))
    inputs = torch.ones(1, 8, 16, 16, device=accelerator.device(0))
    image = 8 * 16 * 16 * FLOAT32_BYTES
    # Three tensors are alive in `self.second(silu(hidden))`: hidden, its silu, and the result.
    assert measure(accelerator, lambda: block(inputs)) == (image, 3 * image)


@on_every_device()
def test_views_count_once_and_the_last_view_frees_the_memory(accelerator: VirtualAccelerator) -> None:
    memory, before = accelerator.memory, accelerator.memory.used(1)
    base = torch.ones(100, 10, device=accelerator.device(1))
    views = [base.t(), base[3:], base.view(-1), base.expand(2, 100, 10), base.detach(), nn.Parameter(base)]
    views += base.chunk(2)
    assert memory.used(1) - before == 1000 * FLOAT32_BYTES
    assert accelerator.memory.used(0) == 0
    del base, views[1:]
    assert memory.used(1) - before == 1000 * FLOAT32_BYTES
    views.clear()
    assert memory.used(1) == before


@on_every_device()
def test_sizes_follow_dtypes_and_resizes(accelerator: VirtualAccelerator) -> None:
    memory, device, before = accelerator.memory, accelerator.device(1), accelerator.memory.used(1)
    tensor = torch.zeros(10, device=device, dtype=torch.bfloat16)
    assert memory.used(1) - before == 20
    tensor.add_(1)
    tensor[2:] = 3
    assert memory.used(1) - before == 20
    tensor = tensor.to(torch.float32)
    assert memory.used(1) - before == 40
    tensor.resize_(50)
    assert memory.used(1) - before == 200
    moved = tensor.cpu()
    del tensor
    assert (moved.numel(), memory.used(1)) == (50, before)


@on_every_device()
def test_moving_a_module_frees_its_memory(accelerator: VirtualAccelerator) -> None:
    before = accelerator.memory.used(1)
    module = nn.Linear(10, 10).to(accelerator.device(1))
    assert accelerator.memory.used(1) - before == 110 * FLOAT32_BYTES
    module.to(torch.bfloat16)
    assert accelerator.memory.used(1) - before == 110 * 2
    module.to("meta")
    assert accelerator.memory.used(1) == before


@on_every_device()
def test_unpickled_tensors_are_counted(accelerator: VirtualAccelerator) -> None:
    before = accelerator.memory.used(1)
    tensor = pickle.loads(pickle.dumps(torch.ones(25, device=accelerator.device(1))))
    assert accelerator.memory.used(1) - before == tensor.nbytes == 100


@pytest.mark.parametrize("device", DEVICES)
def test_out_of_memory_error_is_torchs_and_leaks_nothing(device: str) -> None:
    def fill(accelerator: VirtualAccelerator) -> tuple[str, list[int], int]:
        device, memory = accelerator.device(0), accelerator.memory
        tensor = torch.zeros(2**18, device=device)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.zeros(2**18, device=device) + torch.zeros(2**18, device=device)
        caught_text = str(caught.value)
        del caught
        gc.collect()
        used = [memory.used(0)]
        attempts: list[Callable[[], torch.Tensor]] = [
            lambda: tensor.repeat(4),
            lambda: torch.zeros(2**20).to(device),
            lambda: tensor.new_empty(2**20),
        ]
        for attempt in attempts:
            with pytest.raises(torch.OutOfMemoryError):
                attempt()
            gc.collect()
            used.append(memory.used(0))
        other = torch.zeros(2**19, device=accelerator.device(1))
        return caught_text, used, memory.used(1) - other.nbytes

    text, used, used_on_other_device = run_forked(device, fill, count=2, memory="3MiB")
    assert "Tried to allocate 1.00 MiB" in text
    assert "total capacity of 3.00 MiB" in text
    assert "0 bytes is free" in text
    assert "3.00 MiB is in use" in text
    assert used == [2**20] * 4
    assert used_on_other_device == 0


def test_product_name_sets_the_capacity() -> None:
    def read(accelerator: VirtualAccelerator) -> tuple[int | None, int]:
        return accelerator.capacity_bytes, torch.accelerator.get_memory_info()[1]

    assert run_forked("hpu", read, memory="gaudi1") == (32 * 10**9, 32 * 10**9)
    assert run_forked("neuron", read, memory="trn2") == (24 * 2**30, 24 * 2**30)
    assert run_forked("npu", read, memory="512MiB") == (2**29, 2**29)
