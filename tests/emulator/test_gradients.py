"""Gradients on virtual devices equal those on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.activation import virtual
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import LimitError
from anyaccel.processes.forked_call import call_in_fork
from anyaccel.recipes import recipes
from tests.emulator.forked import DEVICES, OnEveryDevice

on_every_device = OnEveryDevice()
Tensor = torch.Tensor


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


# Whole models, called with tiny inputs.


def run_unet(pipe: Any, device: torch.device) -> Tensor:
    states = draw(2, 7, pipe.unet.config.cross_attention_dim).to(device)
    sample: Tensor = pipe.unet(draw(2, 4, 8, 8).to(device), torch.tensor([5, 9], device=device), states).sample
    return sample


def run_vae(pipe: Any, device: torch.device) -> Tensor:
    latents = pipe.vae.encode(draw(1, 3, 16, 16).to(device)).latent_dist.mode()
    sample: Tensor = pipe.vae.decode(latents).sample
    return sample


def run_transformer(pipe: Any, device: torch.device) -> Tensor:
    config = pipe.transformer.config
    image, text = draw(1, 16, config.in_channels), draw(1, 5, config.joint_attention_dim)
    sample: Tensor = pipe.transformer(
        hidden_states=image.to(device),
        encoder_hidden_states=text.to(device),
        pooled_projections=draw(1, config.pooled_projection_dim).to(device),
        timestep=torch.tensor([0.5], device=device),
        guidance=torch.tensor([3.5], device=device),
        img_ids=draw(16, 3).round().to(device),
        txt_ids=torch.zeros(5, 3, device=device),
    ).sample
    return sample


MODELS: dict[str, list[tuple[str, Callable[[Any, torch.device], Tensor]]]] = {
    "stable-diffusion": [("unet", run_unet), ("vae", run_vae)],
    "flux": [("transformer", run_transformer)],
}


@pytest.fixture(scope="module")
def stock_pipelines() -> dict[str, Any]:
    """The stock pipelines, made before the forks, so that libraries are imported only once."""
    pipelines = {name: recipes()[name].make() for name in MODELS}
    anyaccel.place(copy.deepcopy(pipelines["flux"]), "cpu")  # imports more of them
    return pipelines


@pytest.mark.parametrize("device", DEVICES)
def test_models_of_placed_pipelines(device: str, stock_pipelines: dict[str, Any]) -> None:
    def run_all(accelerator: VirtualAccelerator) -> None:
        for recipe, models in MODELS.items():
            stock = stock_pipelines[recipe]
            placed = anyaccel.place(copy.deepcopy(stock), accelerator.name, dtype="float32")
            for name, run in models:
                torch.autograd.backward(run(stock, torch.device("cpu")).square().sum())
                torch.autograd.backward(run(placed, placed.device).square().sum())
                compare_gradients(getattr(placed, name), getattr(stock, name))

    run_forked(device, run_all)


def compare_gradients(model: nn.Module, expected: nn.Module) -> None:
    gradients = {name: weight.grad for name, weight in expected.named_parameters()}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values() if gradient is not None)
    assert largest > 0
    for name, weight in model.named_parameters():
        gradient = gradients[name]
        assert (weight.grad is None) == (gradient is None), name
        if weight.grad is not None and gradient is not None:
            assert weight.grad.device == weight.device
            assert torch.allclose(weight.grad.cpu(), gradient, atol=1e-5 * largest), name


@on_every_device()
def test_gradients_and_optimizer_step(accelerator: VirtualAccelerator) -> None:
    device, inputs = accelerator.device(1), torch.randn(1, 2, 4, 4)
    cpu_model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.SiLU(), nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 3)
    )
    virtual_model = copy.deepcopy(cpu_model).to(device)
    for module, images in ((cpu_model, inputs), (virtual_model, inputs.to(device))):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        torch.autograd.backward(module(images).square().sum())
        optimizer.step()
    for actual, expected in zip(virtual_model.parameters(), cpu_model.parameters(), strict=True):
        assert actual.grad is not None
        assert expected.grad is not None
        assert actual.grad.device == device
        assert torch.allclose(actual.grad.cpu(), expected.grad, atol=1e-5)
        assert torch.allclose(actual.detach().cpu(), expected.detach(), atol=1e-5)


# Operations that have a kernel of their own on the device, although torch decomposes them.


def attend(query: Tensor, **options: Any) -> Tensor:
    return functional.scaled_dot_product_attention(query, query * 2, query.sin(), **options)


def attend_with_mask(query: Tensor) -> Tensor:
    return attend(query, attn_mask=torch.ones(3, 3, dtype=torch.bool, device=query.device).tril(), scale=0.3)


def attend_to_itself_twice(query: Tensor) -> Tensor:
    def run(values: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(values, values, values) + attend(values)

    recomputed: Tensor = checkpoint(run, query, use_reentrant=False)
    return recomputed


def differentiate_twice(inputs: Tensor) -> Tensor:
    loss = functional.group_norm(inputs, 2).pow(3).sum()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # on the CPU, only this one can
        loss = loss + functional.scaled_dot_product_attention(inputs, inputs, inputs).pow(3).sum()
    return torch.autograd.grad(loss, inputs, create_graph=True)[0]


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "group_norm": lambda x: functional.group_norm(x, 2),
    "group_norm with weights": lambda x: functional.group_norm(x, 2, x[0, :, 0, 0], x[0, :, 1, 1]),
    "attention": attend,
    "attention with a mask": attend_with_mask,
    "causal attention": lambda x: attend(x, is_causal=True),
    "checkpoint": attend_to_itself_twice,
    "second derivative": differentiate_twice,
    "conv_transpose3d": lambda x: functional.conv_transpose3d(x[:, :, None], x[0, :, None, None]),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "loss on the CPU": lambda x: (x * x).cpu() * 3,
}


def differentiate(operation: Callable[[Tensor], Tensor], device: torch.device | str) -> Tensor:
    inputs = draw(1, 2, 3, 4).to(device).requires_grad_()
    torch.autograd.backward(operation(inputs).square().sum())
    assert inputs.grad is not None
    return inputs.grad.cpu()


@on_every_device()
def test_optimizers_compute_as_on_the_cpu(accelerator: VirtualAccelerator) -> None:
    for optimizer in (torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam):
        on_cpu, on_device = (torch.nn.Parameter(torch.linspace(-1, 1, 8)) for _ in range(2))
        on_device = torch.nn.Parameter(on_device.detach().to(accelerator.device()))
        for weight in (on_cpu, on_device):
            step = optimizer([weight], lr=0.1)
            for _ in range(2):
                step.zero_grad()
                torch.autograd.backward((weight**2).sum())
                step.step()
        assert torch.allclose(on_device.detach().cpu(), on_cpu.detach(), atol=1e-6), optimizer


@on_every_device()
def test_operations(accelerator: VirtualAccelerator) -> None:
    for name, operation in OPERATIONS.items():
        expected = differentiate(operation, "cpu")
        for index in (0, 1):
            actual = differentiate(operation, accelerator.device(index))
            assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-4), name


@on_every_device()
def test_recurrent_modules(accelerator: VirtualAccelerator) -> None:
    for kind in (nn.LSTM, nn.GRU):
        for bias in (True, False):
            expected = kind(4, 3, 2, bias=bias, bidirectional=True)
            actual = copy.deepcopy(expected).to(accelerator.device())
            for module, device in ((expected, "cpu"), (actual, accelerator.name)):
                outputs, state = module(draw(5, 2, 4).to(device))
                states = state if isinstance(state, tuple) else (state,)
                torch.autograd.backward(outputs.square().sum() + sum(tensor.sin().sum() for tensor in states))
            compare_gradients(actual, expected)


@on_every_device()
def test_attention_with_dropout_uses_one_mask(accelerator: VirtualAccelerator) -> None:
    value = torch.ones(1, 1, 8, 8, device=accelerator.device(), requires_grad=True)
    query = torch.zeros(1, 1, 8, 8, device=accelerator.device())
    output = functional.scaled_dot_product_attention(query, query, value, dropout_p=0.5)
    torch.autograd.backward(output.sum())
    # With equal scores, both sums are 8 times the sum of the dropped-out scores.
    assert value.grad is not None
    assert torch.allclose(value.grad.sum(), output.sum(), rtol=1e-5)


@on_every_device()
def test_exception_in_a_backward_pass(accelerator: VirtualAccelerator) -> None:
    def reject(gradient: Tensor) -> None:
        raise ValueError("rejected")

    inputs = torch.ones(2, device=accelerator.device(), requires_grad=True)
    product = inputs * 2
    product.register_hook(reject)  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="rejected"):
        torch.autograd.backward(product.square().sum())
    torch.autograd.backward((inputs * 2).sum())
    assert inputs.grad is not None
    assert inputs.grad.tolist() == [2, 2]


@on_every_device()
def test_copy_of_a_tensor_with_a_gradient(accelerator: VirtualAccelerator) -> None:
    tensor = torch.ones(2, device=accelerator.device(), requires_grad=True)
    torch.autograd.backward(tensor.sum())
    copied = copy.deepcopy(tensor)
    assert copied.grad is not None
    assert copied.grad.tolist() == [1, 1]


@pytest.mark.parametrize("device", DEVICES)
def test_backward_before_activation(device: str) -> None:
    def run() -> list[float]:
        torch.autograd.backward(torch.ones(2, requires_grad=True).sum())  # the engine counts the devices now
        with virtual(device):
            inputs = torch.ones(2, device=device, requires_grad=True)
            torch.autograd.backward(inputs.square().sum())
            assert inputs.grad is not None
            values: list[float] = inputs.grad.tolist()
            return values

    assert call_in_fork(run) == [2, 2]


def test_limit_in_a_backward_pass_raises() -> None:
    def run() -> None:
        with virtual("mps", strict=True):
            inputs = torch.ones(2, device="mps", requires_grad=True)
            product = inputs * 2
            product.register_hook(lambda gradient: gradient.double().float())  # type: ignore[no-untyped-call]
            torch.autograd.backward(product.sum())

    with pytest.raises((LimitError, TypeError), match="float64"):
        call_in_fork(run)
