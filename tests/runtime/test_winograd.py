"""Convolutions by Winograd's algorithm: right in every shape, and none that it is not for."""

import pytest
import torch
from torch.nn import functional

from anyaccel.runtime.kernels import winograd


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
    assert tile(2, 192, 8, 8, out=192) == 2
    assert tile(2, 32, 8, 8, out=32) == 0
    assert tile(2, 4, 64, 64) == 0, "few channels"
    assert tile(1, 640, 15, 15, out=640) == 0
    assert tile(1, 320, 34, 34) == 2


@torch.no_grad()
def test_a_large_picture_is_done_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    picture, weight = torch.randn(2, 48, 20, 32), torch.randn(64, 48, 3, 3) / 20
    filters = winograd.transform_filters(weight, 4)
    whole = winograd.convolve(picture, filters, None, 4)
    monkeypatch.setattr(winograd, "_STRIP", 36 * 2 * 8 * 64 * 2)  # two rows of tiles, and one that is left
    torch.testing.assert_close(winograd.convolve(picture, filters, None, 4), whole, rtol=1e-5, atol=1e-5)
    assert whole.is_contiguous(memory_format=torch.channels_last)
