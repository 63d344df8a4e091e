"""Convolutions by Winograd's algorithm: right in every shape, and none that it is not for."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.nn import functional

from anyaccel.recipes import recipes, run
from anyaccel.runtime.kernels import winograd
from anyaccel.runtime.pipeline import place


@torch.no_grad()
@pytest.mark.parametrize("tile", [2, 4])
@pytest.mark.parametrize("shape", [(1, 3, 8, 8), (2, 40, 16, 24), (3, 64, 4, 32)])
@pytest.mark.parametrize("biased", [True, False])
def test_it_is_the_convolution(tile: int, shape: tuple[int, ...], biased: bool) -> None:
    torch.manual_seed(0)
    picture, weight = torch.randn(shape), torch.randn(24, shape[1], 3, 3) / (9 * shape[1]) ** 0.5
    bias = torch.randn(24) if biased else None
    exact = functional.conv2d(picture.double(), weight.double(), None if bias is None else bias.double(), padding=1)
    made = winograd.convolve(picture, winograd.transform_filters(weight, tile), bias, tile)
    assert (made - exact).abs().max() < (1e-5 if tile == 2 else 1e-4)


def test_tiles_are_chosen_by_shapes_alone() -> None:
    def tile(*shape: int, out: int = 320) -> int:
        return winograd.choose_tile(torch.Size(shape), torch.Size((out, shape[1], 3, 3)))

    assert tile(2, 320, 32, 32) == 4
    assert tile(2, 1280, 8, 8, out=1280) == 2
    assert tile(2, 32, 8, 8, out=32) == 0
    assert tile(2, 4, 64, 64) == 0, "few channels"
    assert tile(1, 640, 15, 15, out=640) == 0
    assert tile(1, 320, 34, 34) == 2


def convolution(**options: Any) -> torch.nn.Conv2d:
    return torch.nn.Conv2d(64, 64, **{"kernel_size": 3, "padding": 1, **options})


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (convolution(), True),
        (convolution(kernel_size=1, padding=0), True),
        (convolution(stride=2), False),
        (convolution(padding=0), False),
        (convolution(groups=2), False),
        (convolution(dilation=2, padding=2), False),
        (convolution(padding_mode="reflect"), False),
        (torch.nn.Linear(3, 3), False),
    ],
)
def test_which_layers_it_is_for(module: torch.nn.Module, expected: bool) -> None:
    assert winograd.serves(module) is expected


@torch.no_grad()
@pytest.mark.parametrize("kernel", [1, 3])
def test_a_layer_stays_a_layer(kernel: int) -> None:
    layer = convolution(kernel_size=kernel, padding=kernel // 2)
    picture = torch.randn(2, 64, 32, 32)
    plain = layer(picture)
    winograd.install(layer)
    torch.testing.assert_close(layer(picture), plain, rtol=1e-4, atol=1e-4)
    layer.weight.mul_(2)
    winograd.install(layer)
    doubled = functional.conv2d(picture, layer.weight, layer.bias, padding=kernel // 2)
    torch.testing.assert_close(layer(picture), doubled, rtol=1e-4, atol=1e-4)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(other(picture), layer(picture), rtol=1e-4, atol=1e-4)
        other.weight.zero_()
        winograd.install(other)
        assert layer.bias is not None
        assert (other(picture) - layer.bias.view(1, -1, 1, 1)).abs().max() < 1e-5, "its own weight, not the first one's"
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert half(picture.to(torch.bfloat16)).dtype is torch.bfloat16
    winograd.remove(layer)
    assert not set(vars(layer)) & {"forward", "_anyaccel_filters"}


def test_gradients_go_the_usual_way() -> None:
    layer = convolution()
    winograd.install(layer)
    layer(torch.randn(2, 64, 32, 32)).sum().backward()
    assert layer.weight.grad is not None


def test_a_pipeline_makes_the_same_picture() -> None:
    recipe = recipes()["stable-diffusion"]
    expected = run(recipe, recipe.make())
    pipe = place(recipe.make(), "cpu", dtype="float32", winograd=True)
    assert abs(run(recipe, pipe) - expected).max() < 1e-4
    assert pipe.plan.winograd.value
    assert any(winograd.is_installed(part) for part in pipe.unet.modules())
    pipe.to("cpu", winograd=False)
    assert not any(winograd.is_installed(part) for part in pipe.unet.modules())
