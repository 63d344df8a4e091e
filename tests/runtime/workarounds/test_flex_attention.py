"""Flex attention on devices gives the result of the CPU, also without keys for a query, and is restored afterwards."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as module

from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.runtime.workarounds.flex_attention import use_dense_masks

LENGTH = 24
BLOCK = 8

Mask = Callable[[Any, Any, Any, Any], Any]


def is_near(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query - key).abs() < 3


def is_after(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key > query  # none for the last query


def draw() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, LENGTH, 16, generator=generator) for _ in range(3)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("mask", [None, is_near, is_after])
def test_attention_is_that_of_the_cpu(mask: Mask | None) -> None:
    def attend(device: torch.device) -> torch.Tensor:
        blocks = mask and module.create_block_mask(
            mask, None, None, LENGTH, LENGTH, device=str(device), BLOCK_SIZE=BLOCK
        )
        query, key, value = (tensor.to(device) for tensor in draw())
        return module.flex_attention(query, key, value, block_mask=blocks or None, scale=0.3).cpu()

    expected = attend(torch.device("cpu"))

    def use(accelerator: VirtualAccelerator) -> None:
        with use_dense_masks(accelerator.device()):
            torch.testing.assert_close(attend(accelerator.device()), expected)

    run_forked("neuron", use)


def test_blocks_that_a_mask_leaves_out_are_not_attended() -> None:
    """Kandinsky 6 chooses blocks without a `mask_mod`."""
    counts, indices = torch.ones(1, 1, 3, dtype=torch.int32), torch.tensor([[[[2, 0, 1]] * 3]], dtype=torch.int32)

    def use(accelerator: VirtualAccelerator) -> None:
        device = accelerator.device()
        blocks = module.BlockMask.from_kv_blocks(counts.to(device), indices.to(device), BLOCK_SIZE=BLOCK)
        query, key, value = draw()
        expected = torch.nn.functional.scaled_dot_product_attention(query, key[..., -BLOCK:, :], value[..., -BLOCK:, :])
        with use_dense_masks(accelerator.device()):
            actual: Any = module.flex_attention(query.to(device), key.to(device), value.to(device), block_mask=blocks)
        torch.testing.assert_close(actual.cpu(), expected)

    run_forked("neuron", use)


def test_the_function_is_restored_after_the_last_block() -> None:
    original = module.flex_attention
    started, finish = threading.Event(), threading.Event()

    def overlap() -> None:
        with use_dense_masks(torch.device("meta")):
            started.set()
            finish.wait(10)

    thread = threading.Thread(target=overlap)
    with use_dense_masks(torch.device("meta")):
        thread.start()
        assert started.wait(10)
    assert module.flex_attention is not original
    finish.set()
    thread.join()
    assert module.flex_attention is original


def test_devices_with_a_kernel_keep_the_function_of_torch() -> None:
    original = module.flex_attention
    with use_dense_masks(torch.device("cpu")):
        assert module.flex_attention is original
