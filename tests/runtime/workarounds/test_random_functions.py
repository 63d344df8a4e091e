"""Every random function of torch, in several forms of arguments, draws the values of the CPU on a virtual device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn import functional

from anyaccel.backends.device import open_device
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.planning import PipelineFacts, PlacementOptions, make_plan
from anyaccel.runtime.workarounds.function_modes import make_model_function_mode, make_pipeline_function_mode
from anyaccel.upstream.torch_random import RANDOM_FUNCTIONS

Tensor = torch.Tensor
# Gets the function, a tensor with elements between 0 and 1, and the generator as a keyword argument.
Form = Callable[[Any, Tensor, dict[str, Any]], Tensor]

SIZED: list[Form] = [
    lambda draw, x, g: draw(4, 6, device=x.device, **g),
    lambda draw, x, g: draw((4, 6), device=str(x.device), **g),
    lambda draw, x, g: draw([4, 6], device=x.device, dtype=torch.float64, **g),
    lambda draw, x, g: draw(size=x.shape, device=x.device, requires_grad=True, **g).detach(),
    lambda draw, x, g: draw((), device=x.device, **g),
    lambda draw, x, g: draw(x.shape, dtype=torch.float64, device="cpu", layout=torch.strided, **g),
    lambda draw, x, g: draw(x.shape, out=torch.empty_like(x), **g),
    lambda draw, x, g: draw(4, 6, out=torch.empty(6, 4).to(x.device).T, **g),
]
# `randn_like` accepts a generator only in recent versions of torch.
LIKE: list[Form] = [
    lambda draw, x, g: draw(x),
    lambda draw, x, g: draw(input=x),
    lambda draw, x, g: draw(x, dtype=torch.float64),
    lambda draw, x, g: draw(x, memory_format=torch.contiguous_format),
    lambda draw, x, g: draw(x, memory_format=torch.channels_last, requires_grad=True).detach(),
    lambda draw, x, g: draw(x, device="cpu"),
    lambda draw, x, g: draw(torch.zeros(4, 6).T, device=x.device),
    lambda draw, x, g: draw(x[:1].expand(3, -1, -1, -1)),
]
# Random tensors by the function and two numbers as parameters.
IN_PLACE: list[Form] = [
    lambda draw, x, g: draw(x.clone(), 1, 3, **g),
    lambda draw, x, g: draw(torch.empty_strided(x.shape, x.stride(), device=x.device), **g),
    lambda draw, x, g: fill_view(draw, x.repeat(1, 1, 1, 2), **g),
    lambda draw, x, g: draw(torch.zeros(4, 6).to(x.device).T, **g),
]
ONE_PARAMETER: list[Form] = [
    lambda draw, x, g: draw(x.clone(), 0.3, **g),
    lambda draw, x, g: fill_view(draw, x.repeat(1, 1, 1, 2), 0.6, **g),
]
NORMAL: list[Form] = [
    lambda draw, x, g: draw(x, 1.5, **g),
    lambda draw, x, g: draw(x, x, **g),
    lambda draw, x, g: draw(0.5, x, **g),
    lambda draw, x, g: draw(mean=x, std=1.5, **g),
    lambda draw, x, g: draw(mean=0.5, std=x, **g),
    lambda draw, x, g: draw(x, std=x.cpu(), **g),
    lambda draw, x, g: draw(mean=torch.zeros(1, dtype=torch.float64), std=x, **g),
    lambda draw, x, g: draw(mean=x, std=x, out=torch.empty_like(x), **g),
    lambda draw, x, g: draw(0.0, 1.0, (4, 6), device=x.device, **g),
    lambda draw, x, g: draw(mean=0.0, std=2.0, size=x.shape, device=x.device, dtype=torch.float64, **g),
    lambda draw, x, g: draw(0.0, 1.0, (4, 6), out=torch.empty(6, 4).to(x.device).T, **g),
]
MULTINOMIAL: list[Form] = [
    lambda draw, x, g: draw(x.flatten(1), 2, **g),
    lambda draw, x, g: draw(x.flatten(1), num_samples=2, replacement=True, **g),
    lambda draw, x, g: draw(x[0, 0, 0], 9, True, **g),
    lambda draw, x, g: draw(x.flatten(1), 2, out=torch.zeros(x.shape[0], 2, dtype=torch.int64).to(x.device), **g),
]
BERNOULLI: list[Form] = [
    lambda draw, x, g: draw(x, **g),
    lambda draw, x, g: draw(x, 0.3, **g),
    lambda draw, x, g: draw(x, p=0.3, **g),
]
# These have no generator argument.
DROPOUT: list[Form] = [
    lambda draw, x, g: draw(x, 0.3, True),
    lambda draw, x, g: draw(x, p=0.3, training=False),
    lambda draw, x, g: draw(input=x.clone(), p=0.3, training=True, inplace=True),
    lambda draw, x, g: draw(x.clone(), 0.3, True, True),
    lambda draw, x, g: draw(x.bfloat16(), 0.3, True).float(),
    lambda draw, x, g: draw(x, 0.0),
]
PLANES: list[Form] = [*DROPOUT[:4], DROPOUT[5]]
NATIVE_DROPOUT: list[Form] = [
    lambda draw, x, g: draw(x.clone(), 0.3, True),
    lambda draw, x, g: draw(x.clone(), 0.3, train=False),
]
POOL: list[Form] = [
    lambda draw, x, g: draw(x, (2, 2), output_size=(1, 1))[0],
    lambda draw, x, g: functional.fractional_max_pool2d(x, 2, output_size=(1, 1), return_indices=True)[1],
]
LOW_RANK: list[Form] = [
    lambda draw, x, g: draw(x.flatten(1).contiguous(), q=2)[1],
    lambda draw, x, g: draw(x.flatten(1).contiguous(), 2)[0],
]
FORMS: dict[Any, list[Form]] = {
    torch.randn: SIZED,
    torch.rand: SIZED,
    torch.randn_like: LIKE,
    torch.rand_like: LIKE,
    torch.randint_like: [
        lambda draw, x, g: draw(x, 50),
        lambda draw, x, g: draw(x, 5, 50),
        lambda draw, x, g: draw(x, 5, high=50),
        lambda draw, x, g: draw(input=x, high=50),
        lambda draw, x, g: draw(input=x, high=50, low=-5, dtype=torch.int64),
        lambda draw, x, g: draw((x * 9).long(), 0, 50),
        lambda draw, x, g: draw(x, high=50, memory_format=torch.contiguous_format, device="cpu"),
        lambda draw, x, g: draw(x.bfloat16(), 200).float(),
    ],
    torch.randint: [
        lambda draw, x, g: draw(50, (4, 6), device=x.device, **g),
        lambda draw, x, g: draw(-5, 50, (4, 6), device=x.device, **g),
        lambda draw, x, g: draw(50, size=[4, 6], device=x.device, dtype=torch.float64, **g),
        lambda draw, x, g: draw(low=5, high=50, size=x.shape, device=x.device, dtype=torch.int32, **g),
        lambda draw, x, g: draw(5, high=50, size=x.shape, device=x.device, dtype=torch.uint8, **g),
        lambda draw, x, g: draw(200, (64,), device=x.device, dtype=torch.bfloat16, **g).float(),
        lambda draw, x, g: draw(50, x.shape, out=torch.empty_like(x), **g),
    ],
    torch.randperm: [
        lambda draw, x, g: draw(30, device=x.device, **g),
        lambda draw, x, g: draw(n=30, device=x.device, dtype=torch.float32, **g),
        lambda draw, x, g: draw(30, out=torch.zeros(30, dtype=torch.int64).to(x.device), **g),
    ],
    Tensor.normal_: [*IN_PLACE, lambda draw, x, g: draw(x.clone(), std=2, mean=5, **g)],
    Tensor.uniform_: [*IN_PLACE, lambda draw, x, g: draw(x.clone(), -1, to=2, **g)],
    Tensor.log_normal_: [*IN_PLACE, lambda draw, x, g: draw(x.clone(), std=0.5, **g)],
    Tensor.cauchy_: [*IN_PLACE, lambda draw, x, g: draw(x.clone(), sigma=0.5, **g)],
    Tensor.random_: [
        *IN_PLACE,
        lambda draw, x, g: draw(x.clone(), 7, **g),
        lambda draw, x, g: draw(x.clone(), 2, to=7, **g),
        lambda draw, x, g: draw((x * 9).int(), **g),
        lambda draw, x, g: draw(x.bfloat16(), **g).float(),
    ],
    Tensor.exponential_: [*IN_PLACE[1:], *ONE_PARAMETER, lambda draw, x, g: draw(x.clone(), lambd=2, **g)],
    Tensor.geometric_: [*ONE_PARAMETER, lambda draw, x, g: draw((x * 9).int(), p=0.5, **g)],
    Tensor.bernoulli_: [
        *IN_PLACE[1:],
        *ONE_PARAMETER,
        lambda draw, x, g: draw(torch.zeros_like(x), x, **g),
        lambda draw, x, g: draw(torch.zeros_like(x), p=x, **g),
        lambda draw, x, g: draw(torch.zeros_like(x), p=x.cpu().double(), **g),
        lambda draw, x, g: draw(torch.zeros(x.shape), x, **g),
        lambda draw, x, g: draw((x * 9).int(), p=0.5, **g),
    ],
    torch.nn.init.uniform_: [*IN_PLACE, lambda draw, x, g: draw(tensor=x.clone(), b=3, **g)],
    torch.nn.init.normal_: [*IN_PLACE, lambda draw, x, g: draw(tensor=x.clone(), std=3, **g)],
    torch.nn.init.kaiming_uniform_: [*IN_PLACE[1:], lambda draw, x, g: draw(x.clone(), a=2, mode="fan_out", **g)],
    torch.multinomial: [*MULTINOMIAL, lambda draw, x, g: draw(input=x.flatten(1), num_samples=2, **g)],
    Tensor.multinomial: MULTINOMIAL[:3],
    torch.bernoulli: [
        *BERNOULLI,
        lambda draw, x, g: draw(input=x, **g),
        lambda draw, x, g: draw(x, out=torch.empty_like(x), **g),
        lambda draw, x, g: draw(x, out=torch.zeros(x.shape), **g),
    ],
    Tensor.bernoulli: BERNOULLI,
    torch.normal: NORMAL,
    torch.poisson: [
        lambda draw, x, g: draw(x * 9, **g),
        lambda draw, x, g: draw(input=x * 9, **g),
        lambda draw, x, g: draw(x * 9, *g.values()),
    ],
    torch.binomial: [
        lambda draw, x, g: draw((x * 9).round(), x, **g),
        lambda draw, x, g: draw(count=(x * 9).round(), prob=x, **g),
    ],
    torch._standard_gamma: [lambda draw, x, g: draw(x, **g), lambda draw, x, g: draw(x, *g.values())],
    torch._sample_dirichlet: [lambda draw, x, g: draw(x, **g)],
    functional.dropout: DROPOUT,
    functional.dropout1d: [lambda draw, x, g: draw(x[0], 0.3, True), lambda draw, x, g: draw(x[0], p=0.3)],
    functional.dropout2d: PLANES,
    functional.dropout3d: [lambda draw, x, g: draw(x[None], 0.3, True)],
    functional.alpha_dropout: DROPOUT,
    functional.feature_alpha_dropout: DROPOUT,
    functional.gumbel_softmax: [
        lambda draw, x, g: draw(x),
        lambda draw, x, g: draw(x, tau=0.5, hard=True, dim=1),
    ],
    functional.rrelu: [
        lambda draw, x, g: draw(x - 0.5, training=True),
        lambda draw, x, g: draw(x - 0.5, 0.1, 0.2, True, True),
        lambda draw, x, g: draw(x - 0.5),
    ],
    functional.fractional_max_pool2d: [
        lambda draw, x, g: functional.fractional_max_pool2d(x, 2, output_size=(1, 1)),
    ],
    functional.fractional_max_pool3d: [
        lambda draw, x, g: functional.fractional_max_pool3d(x, (1, 1, 2), output_size=(2, 2, 1)),
    ],
    functional.fractional_max_pool2d_with_indices: POOL,
    functional.fractional_max_pool3d_with_indices: [
        lambda draw, x, g: draw(x, (1, 1, 2), output_size=(2, 2, 1))[1],
    ],
    **dict.fromkeys((
        torch.dropout, torch.dropout_, torch.feature_dropout, torch.feature_dropout_, torch.alpha_dropout,
        torch.alpha_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
    ), NATIVE_DROPOUT),
    torch.native_dropout: [lambda draw, x, g: torch.stack(draw(x, 0.3, True))],
    torch.rrelu: [lambda draw, x, g: draw(x - 0.5, training=True)],
    torch.rrelu_: [lambda draw, x, g: draw(x - 0.5, training=True)],
    torch.svd_lowrank: LOW_RANK,
    torch.pca_lowrank: LOW_RANK,
    torch.lobpcg: [lambda draw, x, g: draw(x.flatten(1).T @ x.flatten(1), k=1)[0]],
}  # fmt: skip


def fill_view(draw: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Draw into every second column of a tensor, and return the whole tensor."""
    draw(tensor[..., ::2], *args, **kwargs)
    return tensor


def make_layouts() -> Iterator[tuple[str, Tensor]]:
    values = torch.linspace(0.05, 0.95, 2 * 3 * 4 * 6).reshape(2, 3, 4, 6)
    yield "contiguous", values
    yield "channels last", values.contiguous(memory_format=torch.channels_last)
    yield "permuted", values.permute(0, 3, 1, 2)
    yield "every second column", values[..., ::2]


def draw_all(device: torch.device | str, mode: Any) -> dict[str, list[Tensor]]:
    """Return the draws of each function, and the states of the default generator and the caller's after them."""
    results = {}
    for layout, values in make_layouts():
        x = values.to(device)
        if layout == "every second column":  # `to` makes such a tensor contiguous
            x = values.repeat_interleave(2, -1).to(device)[..., ::2]
        for func, forms in FORMS.items():
            torch.default_generator.manual_seed(3)
            generator = torch.Generator("cpu").manual_seed(4)
            with torch.no_grad(), mode:
                draws = [form(func, x, options) for form in forms for options in ({}, {"generator": generator})]
            states = [torch.default_generator.get_state(), generator.get_state()]
            results[f"{func.__name__}, {layout}"] = [*(drawn.cpu() for drawn in draws), *states]
    return results


def make_modes(accelerator: VirtualAccelerator) -> list[Any]:
    sheet = open_device(accelerator.name).sheet
    plan = make_plan(sheet, PipelineFacts(pipeline="Test"), PlacementOptions(), device=accelerator.name)
    makers: list[Any] = [make_pipeline_function_mode, make_model_function_mode][
        : 1 + ("noise" in plan.workarounds.value)
    ]
    return [make(plan, accelerator.device()) for make in makers]


@pytest.mark.parametrize("device", ["hpu", "mps", "neuron"])  # the others replace fewer functions and dtypes
def test_draws_and_generators_are_those_of_the_cpu(device: str) -> None:
    def use(accelerator: VirtualAccelerator) -> list[str]:
        expected = draw_all("cpu", nullcontext())
        return [
            f"{name}, result {index}"
            for mode in make_modes(accelerator)
            for name, actual in draw_all(accelerator.device(), mode).items()
            for index, (drawn, value) in enumerate(zip(actual, expected[name], strict=True))
            if not torch.equal(drawn, value.to(drawn.dtype))
        ]

    assert run_forked(device, use, strict=True) == []


def test_every_random_function_has_forms() -> None:
    assert set(FORMS) == RANDOM_FUNCTIONS
