"""Modules on a virtual device: moving, weights that are shared, gradients, autocast, threads."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anyaccel.emulator.accelerator import VirtualAccelerator
from tests.emulator.forked import KNOWN_TO_TORCH, Everywhere

everywhere = Everywhere()


def make_old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, and still in the audio models
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
    "weight_norm of old": (make_old_weight_norm, (1, 4, 5)),
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


def compare(modules: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]], there: torch.device) -> None:
    torch.manual_seed(0)  # what it would be else depends on the tests before
    for name, (make, shape) in modules.items():
        module, given = make().eval(), torch.randn(shape)
        with torch.no_grad():
            expected = first(module(given))
            module.to(there)
            placed = [*module.parameters(), *module.buffers()]
            assert {tensor.device for tensor in placed} <= {there}, name
            assert all(isinstance(tensor, nn.Parameter) for tensor in module.parameters()), name
            found = first(module(given.to(there)))
            half = first(module.to(torch.bfloat16)(given.to(there, torch.bfloat16)))
        assert found.device == half.device == there, name
        assert torch.allclose(found.cpu(), expected, atol=1e-6), name
        assert torch.allclose(half.cpu().float(), expected, atol=0.1, rtol=0.1), name


@everywhere()
def test_modules_compute_what_the_host_computes(accelerator: VirtualAccelerator) -> None:
    compare(MODULES, accelerator.device(1))


@everywhere(broken="torch picks fused cells by the device, and the CPU has none", on=("xpu",))
def test_recurrent_modules(accelerator: VirtualAccelerator) -> None:
    compare(RECURRENT, accelerator.device(1))


@everywhere()
def test_embedding_and_multihead_attention(accelerator: VirtualAccelerator) -> None:
    there = accelerator.device(1)
    embedding, ids = nn.Embedding(5, 4, padding_idx=0), torch.tensor([1, 2])
    with torch.no_grad():
        expected = embedding(ids)
        assert torch.equal(embedding.to(there)(ids.to(there)).cpu(), expected)
        attention, given = nn.MultiheadAttention(4, 2, batch_first=True).eval(), torch.randn(2, 3, 4)
        mixed, weights = attention(given, given, given)
        given = given.to(there)
        found, found_weights = attention.to(there)(given, given, given)
        fast, _ = attention(given, given, given, need_weights=False)
    assert torch.allclose(found.cpu(), mixed, atol=1e-6)
    assert torch.allclose(fast.cpu(), mixed, atol=1e-6)
    assert torch.allclose(found_weights.cpu(), weights, atol=1e-6)


@everywhere()
def test_a_module_comes_back_to_the_host(accelerator: VirtualAccelerator) -> None:
    module, given = nn.Linear(2, 2), torch.ones(2)
    with torch.no_grad():
        expected = module(given)
        assert torch.equal(module.to(accelerator.device()).to("cpu")(given), expected)


@everywhere(broken="torch swaps the tensors of a module, which cannot be done while a graph holds them")
def test_a_module_moves_while_a_graph_holds_its_weights(accelerator: VirtualAccelerator) -> None:
    module = nn.Conv2d(1, 1, 1)
    graph = module(torch.ones(1, 1, 2, 2, requires_grad=True))
    assert module.to(accelerator.device()).weight.device == accelerator.device()
    assert graph.requires_grad


@everywhere()
def test_modules_made_on_the_device(accelerator: VirtualAccelerator) -> None:
    there = accelerator.device(1)
    assert nn.Linear(2, 3, device=there, dtype=torch.bfloat16).weight.device == there
    with torch.device("meta"):
        empty, assigned = nn.Linear(2, 3), nn.Linear(2, 3)
    empty.to_empty(device=there).load_state_dict({"weight": torch.ones(3, 2), "bias": torch.ones(3)})
    state = {"weight": torch.ones(3, 2, device=there), "bias": torch.ones(3, device=there)}
    assigned.load_state_dict(state, assign=True)
    for module in (empty, assigned):
        assert module(torch.ones(2, device=there)).tolist() == [3, 3, 3]


def tie() -> nn.ModuleList:
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    return nn.ModuleList([embedding, head])


@everywhere()
def test_tied_weights_stay_tied_and_count_once(accelerator: VirtualAccelerator) -> None:
    before, tied = accelerator.memory.used(1), tie()
    weight = tied[0].weight
    tied.to(accelerator.device(1))
    assert tied[0].weight is tied[1].weight is weight
    assert accelerator.memory.used(1) - before == 5 * 4 * 4
    tied.half()
    assert tied[0].weight is tied[1].weight


@everywhere()
def test_tied_weights_stay_tied_on_the_way_back(accelerator: VirtualAccelerator) -> None:
    tied = tie().to(accelerator.device(1)).to("cpu")
    assert tied[0].weight is tied[1].weight


@everywhere()
def test_modes_without_gradients(accelerator: VirtualAccelerator) -> None:
    tensor = torch.ones(2, device=accelerator.device(), requires_grad=True)
    with torch.no_grad():
        assert not (tensor * 2).requires_grad
    with torch.inference_mode():
        made = torch.ones(2, device=accelerator.device()) * 2
        assert made.is_inference()
        made[:1].add_(1)
        assert made.unsqueeze_(0).tolist() == [[3, 2]]


@everywhere(broken="the autograd engine asks C++ for an accelerator that it was built for", on=KNOWN_TO_TORCH)
def test_gradients_and_a_step(accelerator: VirtualAccelerator) -> None:
    there, given = accelerator.device(), torch.randn(1, 2, 4, 4)
    host = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.SiLU(), nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 3))
    virtual = copy.deepcopy(host).to(there)
    for module, images in ((host, given), (virtual, given.to(there))):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(images).square().sum().backward()
        optimizer.step()
    for found, expected in zip(virtual.parameters(), host.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        assert found.grad.device == there
        assert torch.allclose(found.grad.cpu(), expected.grad, atol=1e-5)
        assert torch.allclose(found.detach().cpu(), expected.detach(), atol=1e-5)


@everywhere(broken="the device's kernel of its own has no derivative")
def test_gradients_through_group_norm(accelerator: VirtualAccelerator) -> None:
    given = torch.randn(1, 4, 3, device=accelerator.device(), requires_grad=True)
    functional.group_norm(given, 2).square().sum().backward()  # type: ignore[no-untyped-call]
    assert given.grad is not None


@everywhere(broken="attention has a kernel of its own on the device, and no derivative")
def test_gradients_through_attention(accelerator: VirtualAccelerator) -> None:
    query = torch.randn(1, 2, 3, 4, device=accelerator.device(), requires_grad=True)
    functional.scaled_dot_product_attention(query, query, query).sum().backward()  # type: ignore[no-untyped-call]
    assert query.grad is not None


@everywhere()
def test_autocast_lowers_products(accelerator: VirtualAccelerator) -> None:
    module, given = nn.Linear(4, 4).to(accelerator.device()), torch.ones(2, 4, device=accelerator.device())
    image, kernel = given[None, None], given.new_ones(1, 1, 1, 1)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(accelerator.name, dtype=dtype):
            lowered = module(given), given @ given.t(), functional.conv2d(image, kernel)
            assert {tensor.dtype for tensor in lowered} == {dtype}
            assert (given + given).dtype is torch.float32
            with torch.autocast(accelerator.name, enabled=False):
                assert module(given).dtype is torch.float32
        assert module(given).dtype is torch.float32


@everywhere()
def test_threads_work_side_by_side(accelerator: VirtualAccelerator) -> None:
    there, before, results = accelerator.device(1), accelerator.memory.used(1), {}

    def work(number: int) -> None:
        tensor = torch.full((16, 16), float(number), device=there)
        for _ in range(40):
            tensor = (tensor @ torch.eye(16, device=there)).t().contiguous()
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
