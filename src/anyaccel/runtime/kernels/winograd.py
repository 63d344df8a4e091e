"""Convolutions of 3 × 3 by Winograd's algorithm, out of torch's own matrix products.

A tile of the picture and the filter are transformed, multiplied number by number, and transformed back: for tiles of
2 × 2 that takes 4 products where a convolution takes 9, for 4 × 4 it takes 2.25. On a host whose convolutions are no
faster than its matrix products, that is what it saves. (A. Lavin and S. Gray, "Fast Algorithms for Convolutional Neural
Networks", 2016, has the matrices.)
"""

from __future__ import annotations

import functools
from types import MethodType

import torch
from torch.nn import functional

__all__ = ["choose_tile", "convolve", "install", "remove", "serves", "transform_filters"]

_FILTERS, _STATE = "_anyaccel_filters", "_anyaccel_filters_of"

_MANY_PIXELS = 512
_MANY_PRODUCTS = 100_000
_FEW_CHANNELS = 32


def choose_tile(shape: torch.Size, weight: torch.Size) -> int:
    """The side of the tiles for a picture and a filter; 0 where a plain convolution is faster.

    By the shapes alone, so that one call gives one picture on every machine: large tiles where there are many of them,
    small ones where filters are large enough to make up for the transforms.
    """
    images, channels, height, width = shape
    if min(channels, weight[0]) < _FEW_CHANNELS:
        return 0
    if images * height * width >= _MANY_PIXELS and not height % 4 and not width % 4:
        return 4
    return 2 if weight[0] * channels >= _MANY_PRODUCTS and not height % 2 and not width % 2 else 0


@functools.cache
def _matrices(tile: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What transforms tiles of the picture, filters, and tiles of the result, each as one matrix for both sides."""
    if tile == 2:
        picture = [[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]]
        filters = [[1, 0, 0], [1 / 2, 1 / 2, 1 / 2], [1 / 2, -1 / 2, 1 / 2], [0, 0, 1]]
        result = [[1, 1, 1, 0], [0, 1, -1, -1]]
    else:
        picture = [
            [4, 0, -5, 0, 1, 0], [0, -4, -4, 1, 1, 0], [0, 4, -4, -1, 1, 0],
            [0, -2, -1, 2, 1, 0], [0, 2, -1, -2, 1, 0], [0, 4, 0, -5, 0, 1],
        ]  # fmt: skip
        filters = [
            [1 / 4, 0, 0], [-1 / 6, -1 / 6, -1 / 6], [-1 / 6, 1 / 6, -1 / 6],
            [1 / 24, 1 / 12, 1 / 6], [1 / 24, -1 / 12, 1 / 6], [0, 0, 1],
        ]  # fmt: skip
        result = [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]]
    both = [torch.tensor(rows, dtype=torch.float64) for rows in (picture, filters, result)]
    made = [torch.kron(rows, rows).to(torch.float32) for rows in both]
    return made[0], made[1], made[2]


def transform_filters(weight: torch.Tensor, tile: int) -> torch.Tensor:
    """Filters (out, in, 3, 3) as one matrix (out, in) for each number of a tile."""
    out, channels = weight.shape[:2]
    flat = weight.detach().reshape(out * channels, 9)
    return (_matrices(tile)[1] @ flat.t()).view(-1, out, channels)


def convolve(picture: torch.Tensor, filters: torch.Tensor, bias: torch.Tensor | None, tile: int) -> torch.Tensor:
    """`conv2d` with a margin of 1, by filters that were transformed."""
    images, channels, height, width = picture.shape
    side, down, across, out = tile + 2, height // tile, width // tile, filters.shape[1]
    of_picture, _, of_result = _matrices(tile)
    tiles = functional.pad(picture, (1, 1, 1, 1)).unfold(2, side, tile).unfold(3, side, tile)
    numbers = tiles.permute(4, 5, 1, 0, 2, 3).reshape(side * side, -1)
    products = torch.bmm(filters, (of_picture @ numbers).view(side * side, channels, -1))
    made = (of_result @ products.view(side * side, -1)).view(tile, tile, out, images, down, across)
    result = made.permute(3, 2, 4, 0, 5, 1).reshape(images, out, height, width)
    return result if bias is None else result.add_(bias.view(1, -1, 1, 1))


def serves(module: torch.nn.Module) -> bool:
    """Whether a layer is a convolution that can be done so: 3 × 3, or 1 × 1, which is a matrix product as it is."""
    if type(module) is not torch.nn.Conv2d or module.groups != 1 or module.padding_mode != "zeros":
        return False
    if module.stride != (1, 1) or module.dilation != (1, 1):
        return False
    return (module.kernel_size, module.padding) in (((3, 3), (1, 1)), ((1, 1), (0, 0)))


def forward(self: torch.nn.Conv2d, picture: torch.Tensor) -> torch.Tensor:
    """The forward of a convolution; named so that what is pickled or copied finds the class's own again."""
    weight, bias = self.weight, self.bias
    if torch.is_grad_enabled() or picture.dtype != torch.float32 or weight.dtype != torch.float32 or picture.dim() != 4:
        return _convolve_plainly(self, picture)
    if self.kernel_size == (1, 1):
        flat = weight.reshape(1, weight.shape[0], -1).expand(picture.shape[0], -1, -1)
        made = torch.bmm(flat, picture.reshape(*picture.shape[:2], -1))
        made = made if bias is None else made + bias.view(1, -1, 1)
        return made.view(picture.shape[0], weight.shape[0], *picture.shape[2:])
    tile = choose_tile(picture.shape, weight.shape)
    if not tile:
        return _convolve_plainly(self, picture)
    filters: dict[int, torch.Tensor] = vars(self)[_FILTERS]
    if tile not in filters:
        filters[tile] = transform_filters(weight, tile)
    return convolve(picture, filters[tile], bias, tile)


def _convolve_plainly(layer: torch.nn.Conv2d, picture: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = layer._conv_forward(picture, layer.weight, layer.bias)
    return made


def install(module: torch.nn.Module) -> None:
    """Let every convolution of a model that can be done so be done so; filters that were changed are done again."""
    for part in module.modules():
        if not isinstance(part, torch.nn.Conv2d) or not serves(part):
            continue
        if "forward" in vars(part) and not is_installed(part):
            continue
        state = (part.weight.data_ptr(), part.weight._version)
        if not is_installed(part) or vars(part).get(_STATE) != state:
            vars(part)[_FILTERS], vars(part)[_STATE] = {}, state
            vars(part)["forward"] = MethodType(forward, part)


def is_installed(module: torch.nn.Module) -> bool:
    """Whether a layer is done so."""
    return getattr(vars(module).get("forward"), "__func__", None) is forward


def remove(module: torch.nn.Module) -> None:
    """Let all convolutions of a model be as torch does them."""
    for part in module.modules():
        if is_installed(part):
            for name in ("forward", _FILTERS, _STATE):
                del vars(part)[name]
