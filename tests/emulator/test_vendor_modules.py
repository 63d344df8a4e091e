"""Modules on a virtual device: moves, tied weights, autocast, threads."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from anyaccel.emulator.accelerator import VirtualAccelerator
from tests.emulator.forked import OnEveryDevice

on_every_device = OnEveryDevice()


def make_deprecated_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, but audio models still use it
        normed: nn.Module = nn.utils.weight_norm(nn.Conv1d(4, 3, 3))
    return normed


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(4, 3), (2, 4)),
    "Conv1d": (lambda: nn.Conv1d(4, 3, 3), (1, 4, 5)),
    "Conv2d": (lambda: nn.Conv2d(4, 3, 3, padding=1), (1, 4, 5, 5)),
    "Conv3d": (lambda: nn.Conv3d(4, 3, 3, padding="same"), (1, 4, 5, 5, 5)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 3, 2, 2), (1, 4, 5, 5)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3)),
    "LayerNorm": (lambda: nn.LayerNorm(4), (2, 4)),
    "RMSNorm": (lambda: nn.RMSNorm(4), (2, 4)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), (2, 4, 3, 3)),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (2, 5, 4)),
    "deprecated weight_norm": (make_deprecated_weight_norm, (1, 4, 5)),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 3, 3)), (1, 4, 5)),
    "spectral_norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), (2, 4)),
    "Upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (1, 4, 3, 3)),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), (1, 4, 3, 3)),
    "ReflectionPad2d": (lambda: nn.ReflectionPad2d(1), (1, 4, 5, 5)),
}
RECURRENT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LSTM": (lambda: nn.LSTM(4, 3, 2, bidirectional=True), (5, 2, 4)),
    "GRU": (lambda: nn.GRU(4, 3), (5, 2, 4)),
}


def first(output: Any) -> torch.Tensor:
    tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def compare(modules: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]], device: torch.device) -> None:
    torch.manual_seed(0)  # otherwise the weights would depend on earlier tests
    for name, (make, shape) in modules.items():
        module, inputs = make().eval(), torch.randn(shape)
        with torch.no_grad():
            expected = first(module(inputs))
            module.to(device)
            placed = [*module.parameters(), *module.buffers()]
            assert {tensor.device for tensor in placed} <= {device}, name
            assert all(isinstance(tensor, nn.Parameter) for tensor in module.parameters()), name
            actual = first(module(inputs.to(device)))
            half = first(module.to(torch.bfloat16)(inputs.to(device, torch.bfloat16)))
        assert actual.device == half.device == device, name
        assert torch.allclose(actual.cpu(), expected, atol=1e-6), name
        assert torch.allclose(half.cpu().float(), expected, atol=0.1, rtol=0.1), name


@on_every_device()
def test_modules_match_the_cpu(accelerator: VirtualAccelerator) -> None:
    compare(MODULES, accelerator.device(1))


@on_every_device(broken="torch selects fused cells by device type, and the CPU has none", on=("xpu",))
def test_recurrent_modules(accelerator: VirtualAccelerator) -> None:
    compare(RECURRENT, accelerator.device(1))


@on_every_device()
def test_embedding_and_multihead_attention(accelerator: VirtualAccelerator) -> None:
    device = accelerator.device(1)
    embedding, ids = nn.Embedding(5, 4, padding_idx=0), torch.tensor([1, 2])
    with torch.no_grad():
        expected = embedding(ids)
        assert torch.equal(embedding.to(device)(ids.to(device)).cpu(), expected)
        attention, inputs = nn.MultiheadAttention(4, 2, batch_first=True).eval(), torch.randn(2, 3, 4)
        expected, weights = attention(inputs, inputs, inputs)
        inputs = inputs.to(device)
        actual, found_weights = attention.to(device)(inputs, inputs, inputs)
        fast, _ = attention(inputs, inputs, inputs, need_weights=False)
    assert torch.allclose(actual.cpu(), expected, atol=1e-6)
    assert torch.allclose(fast.cpu(), expected, atol=1e-6)
    assert torch.allclose(found_weights.cpu(), weights, atol=1e-6)


@on_every_device()
def test_module_moves_back_to_the_cpu(accelerator: VirtualAccelerator) -> None:
    module, inputs = nn.Linear(2, 2), torch.ones(2)
    with torch.no_grad():
        expected = module(inputs)
        assert torch.equal(module.to(accelerator.device()).to("cpu")(inputs), expected)


@on_every_device()
def test_module_moves_while_a_graph_references_its_weights(accelerator: VirtualAccelerator) -> None:
    module, image = nn.Conv2d(1, 1, 1), torch.ones(1, 1, 2, 2)
    graph, weight, expected = module(image), module.weight, module.weight.item()
    for device in (accelerator.device(), torch.device("cpu")):
        assert module.to(device).weight is weight
        assert weight.device == device
        assert weight.item() == expected
        with pytest.raises(RuntimeError, match=r"moved to another device .* after the forward pass"):
            torch.autograd.backward(graph.sum(), retain_graph=True)
        graph = module(image.to(device))
        torch.autograd.backward(graph.sum(), retain_graph=True)
        assert weight.grad is not None
        assert weight.grad.item() == 4
        weight.grad = None


@on_every_device()
def test_modules_created_on_the_device(accelerator: VirtualAccelerator) -> None:
    device = accelerator.device(1)
    assert nn.Linear(2, 3, device=device, dtype=torch.bfloat16).weight.device == device
    with torch.device("meta"):
        empty, assigned = nn.Linear(2, 3), nn.Linear(2, 3)
    empty.to_empty(device=device).load_state_dict({"weight": torch.ones(3, 2), "bias": torch.ones(3)})
    state = {"weight": torch.ones(3, 2, device=device), "bias": torch.ones(3, device=device)}
    assigned.load_state_dict(state, assign=True)
    for module in (empty, assigned):
        assert module(torch.ones(2, device=device)).tolist() == [3, 3, 3]


def tie() -> nn.ModuleList:
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    return nn.ModuleList([embedding, head])


@on_every_device()
def test_tied_weights_stay_tied_and_count_once(accelerator: VirtualAccelerator) -> None:
    before, tied = accelerator.memory.used(1), tie()
    weight = tied[0].weight
    tied.to(accelerator.device(1))
    assert tied[0].weight is tied[1].weight is weight
    assert accelerator.memory.used(1) - before == 5 * 4 * 4
    tied.half()
    assert tied[0].weight is tied[1].weight


@on_every_device()
def test_tied_weights_stay_tied_when_moved_back(accelerator: VirtualAccelerator) -> None:
    tied = tie().to(accelerator.device(1)).to("cpu")
    assert tied[0].weight is tied[1].weight


@on_every_device()
def test_modes_without_gradients(accelerator: VirtualAccelerator) -> None:
    tensor = torch.ones(2, device=accelerator.device(), requires_grad=True)
    with torch.no_grad():
        assert not (tensor * 2).requires_grad
    with torch.inference_mode():
        result = torch.ones(2, device=accelerator.device()) * 2
        assert result.is_inference()
        result[:1].add_(1)
        assert result.unsqueeze_(0).tolist() == [[3, 2]]


@on_every_device()
def test_autocast_runs_products_in_low_precision(accelerator: VirtualAccelerator) -> None:
    module, inputs = nn.Linear(4, 4).to(accelerator.device()), torch.ones(2, 4, device=accelerator.device())
    image, kernel = inputs[None, None], inputs.new_ones(1, 1, 1, 1)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(accelerator.name, dtype=dtype):
            lowered = module(inputs), inputs @ inputs.t(), functional.conv2d(image, kernel)
            assert {tensor.dtype for tensor in lowered} == {dtype}
            assert (inputs + inputs).dtype is torch.float32
            with torch.autocast(accelerator.name, enabled=False):
                assert module(inputs).dtype is torch.float32
        assert module(inputs).dtype is torch.float32


@on_every_device()
def test_concurrent_threads(accelerator: VirtualAccelerator) -> None:
    gc.collect()  # garbage of earlier checks
    device, before, results = accelerator.device(1), accelerator.memory.used(1), {}

    def work(number: int) -> None:
        tensor = torch.full((16, 16), float(number), device=device)
        for _ in range(40):
            tensor = (tensor @ torch.eye(16, device=device)).t().contiguous()
            tensor[0, 0] += 1
        results[number] = tensor.cpu()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(6):
        expected = torch.full((16, 16), float(number))
        expected[0, 0] += 40
        assert torch.equal(results[number], expected)
    assert accelerator.memory.used(1) == before


@on_every_device()
def test_events_of_torch(accelerator: VirtualAccelerator) -> None:
    """Language models of transformers wait for an event in every step on MPS."""
    for event in (torch.Event(device=accelerator.device(), blocking=True), torch.Event()):
        event.record()
        event.synchronize()
        assert event.query()
