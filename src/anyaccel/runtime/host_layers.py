"""Layers as the host does them fastest: the same numbers, in the order in which its matrix products read them.

Convolutions of 3 × 3 are done by Winograd's algorithm, those of 1 × 1 are matrix products, and the weights of all other
convolutions, and of products where that pays, lie in memory so that nothing is turned around at every call. What an
encoded prompt is projected to is kept for all steps. Models keep their layers, shapes and names.
"""

from __future__ import annotations

import functools
import math
import platform
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import psutil
import torch
from torch.nn import functional

from anyaccel.backends.cache_folder import keep_fact, read_fact
from anyaccel.runtime import host_blocks
from anyaccel.runtime.fast_forward import is_as_written, is_free
from anyaccel.runtime.kernels.winograd import choose_tile, convolve, transform_filters
from anyaccel.runtime.tensor_state import TensorState, fingerprint, read_state

__all__ = ["install", "is_installed", "measure_gain", "remove", "serves"]


@dataclass
class _Filters:
    """The second form of one layer's filters: beside the layer, so that no copy and no pickle carries it."""

    state: TensorState
    held: torch.UntypedStorage
    """The weight's memory, so that another weight cannot come to lie there unseen."""
    mark: torch.Tensor
    """Of the weight: what writes past torch's count of writes changes it too."""
    tiles: dict[int, torch.Tensor] = field(default_factory=dict)
    packed: dict[torch.Size, torch.Tensor] = field(default_factory=dict)
    """As oneDNN's convolutions read them, for each shape of a picture."""


_FILTERS: weakref.WeakKeyDictionary[torch.nn.Module, _Filters] = weakref.WeakKeyDictionary()
_PROJECTED: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, Any, torch.Tensor, Any]] = weakref.WeakKeyDictionary()
_OF_PROMPTS = ("attn2.to_k", "attn2.to_v")
"""What diffusers calls the layers that an encoded prompt goes through at every step."""
_ROUNDS, _LOOK_S, _BUSY = 8, 0.05, 40.0
"""How often a trial is repeated, how long the host is looked at before, and the share of it in percent that others have
where a trial would tell of them."""
_MOST_SHAPES = 4
"""Of pictures, for which one layer keeps its weight."""
_TURNING_PAYS = 1.05
"""It takes the time of a step, and is not done for less."""
_PRODUCTS = ((512, 160, 1280), (512, 160, 160), (128, 768, 192), (128, 192, 192))
"""Rows, columns, and columns of the result, as denoisers have them."""
_FEW_CHANNELS = 32
"""Of pictures, latents and their moments; blocks have more."""
_FACTS = "host_layers.json"
_SMALL = 64
"""A matrix with a side shorter than this is left as it is."""


def serves(module: torch.nn.Module) -> bool:
    """Whether a layer is a convolution that can be done so: 3 × 3, or 1 × 1, which is a matrix product as it is."""
    if not isinstance(module, torch.nn.Conv2d) or not _is_plain(module):
        return False
    if module.stride != (1, 1) or module.dilation != (1, 1):
        return False
    return (module.kernel_size, module.padding) in (((3, 3), (1, 1)), ((1, 1), (0, 0)))


def forward(self: torch.nn.Conv2d, picture: torch.Tensor) -> torch.Tensor:
    """The forward of a convolution; named so that what is pickled or copied finds the class's own again.

    What few channels say is what a model gives: it lies as torch would have it, for whoever takes a view of it.
    """
    made = _convolve(self, picture)
    return made.contiguous() if self.out_channels <= _FEW_CHANNELS else made


def _convolve(self: torch.nn.Conv2d, picture: torch.Tensor) -> torch.Tensor:
    weight, bias = self.weight, self.bias
    if torch.compiler.is_compiling():  # a compiler has ways of its own, and no state to keep
        return _convolve_plainly(self, picture)
    if torch.is_grad_enabled() or picture.dtype != torch.float32 or weight.dtype != torch.float32 or picture.dim() != 4:
        return _convolve_plainly(self, picture)
    if not _is_plain(self):  # since it was installed
        return _convolve_plainly(self, picture)
    if not serves(self):
        return _convolve_packed(self, picture)
    if self.kernel_size == (1, 1):
        return functional.linear(picture.permute(0, 2, 3, 1), weight.flatten(1), bias).permute(0, 3, 1, 2)
    tile = choose_tile(picture.shape, weight.shape)
    if not tile:
        return _convolve_packed(self, picture)
    kept = _find_filters(self)
    if tile not in kept.tiles:
        kept.tiles[tile] = transform_filters(weight, tile)
    return convolve(picture, kept.tiles[tile], bias, tile)


def _find_filters(layer: torch.nn.Conv2d) -> _Filters:
    kept = _FILTERS.get(layer)
    if kept is None or kept.state != read_state(layer.weight):
        kept = _FILTERS[layer] = _Filters(
            read_state(layer.weight), layer.weight.untyped_storage(), fingerprint(layer.weight)
        )
    return kept


def _convolve_packed(layer: torch.nn.Conv2d, picture: torch.Tensor) -> torch.Tensor:
    """By oneDNN, as torch does it, with a weight that is not turned around at every call."""
    if not can_pack():
        return _convolve_plainly(layer, picture)
    kept = _find_filters(layer)
    if picture.shape not in kept.packed:
        if len(kept.packed) >= _MOST_SHAPES:
            kept.packed.clear()
        kept.packed[picture.shape] = _pack(layer, picture.shape)
    last = picture.contiguous(memory_format=torch.channels_last)
    return _run_packed(layer, last, kept.packed[picture.shape])


def _pack(layer: torch.nn.Conv2d, shape: torch.Size) -> torch.Tensor:
    reorder: Any = torch._C._nn
    dense = layer.weight.detach().contiguous().to_mkldnn()
    packed: torch.Tensor = reorder.mkldnn_reorder_conv2d_weight(
        dense, layer.padding, layer.stride, layer.dilation, layer.groups, list(shape)
    )
    return packed


def _run_packed(layer: torch.nn.Conv2d, picture: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.ops.mkldnn._convolution_pointwise(
        picture, packed, layer.bias, layer.padding, layer.stride, layer.dilation, layer.groups, "none", [], ""
    )
    return made


@functools.cache
@torch.no_grad()
def can_pack() -> bool:
    """Whether this torch has oneDNN's convolutions with a packed weight, and they are right; tried once."""
    if not torch.backends.mkldnn.is_available():
        return False
    layer = torch.nn.utils.skip_init(torch.nn.Conv2d, 4, 8, 3, stride=2, padding=1)
    numbers = torch.arange(8 * 4 * 9, dtype=torch.float32).remainder(7) - 3
    layer.weight.copy_(numbers.view_as(layer.weight))
    layer.bias.copy_(numbers[:8])
    picture = (torch.arange(4 * 64, dtype=torch.float32).remainder(5) - 2).view(1, 4, 8, 8)
    picture = picture.contiguous(memory_format=torch.channels_last)
    try:
        made = _run_packed(layer, picture, _pack(layer, picture.shape))
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.equal(made, _convolve_plainly(layer, picture))  # whole numbers, which are exact in any order


def _convolve_plainly(layer: torch.nn.Conv2d, picture: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = type(layer).forward(layer, picture)
    return made


def project_once(self: torch.nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    """The forward of what an encoded prompt goes through in attention: the same at every step, so done at the first."""
    if torch.compiler.is_compiling():
        return functional.linear(rows, self.weight, self.bias)
    given = (rows, self.weight, *(() if self.bias is None else (self.bias,)))
    once = (
        not torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not any(one.is_inference() for one in given)
    )
    state = tuple(map(read_state, given)) if once else ()
    kept = _PROJECTED.get(self)
    if once and kept is not None and kept[0]() is rows and kept[1] == (*state, kept[2]._version):
        return kept[2]
    made = functional.linear(rows, self.weight, self.bias)
    if once:
        held = [one.untyped_storage() for one in given[1:]]
        _PROJECTED[self] = (weakref.ref(rows), (*state, made._version), made, held)
    return made


project_once.__name__ = "forward"


def install(module: torch.nn.Module, *, second_filters: bool = True) -> bool:
    """Let every layer of a model that can be done so be done so, and tell whether what was made of weights still holds.

    Without `second_filters`, which take up to four times the memory of the first ones, weights are laid out alone.
    """
    holds = True
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Linear):
            _turn(part)
            _PROJECTED.pop(part, None)  # of the last call's prompt
            if type(part) is not torch.nn.Linear and is_installed(part):
                _let_go(part)
                holds = False
            elif type(part) is torch.nn.Linear and name.endswith(_OF_PROMPTS) and is_free(part):
                vars(part)["forward"] = MethodType(project_once, part)
        elif isinstance(part, torch.nn.Conv2d):
            holds = _install_convolution(part, second_filters) and holds
        else:
            holds = host_blocks.install(part) and holds
    return holds


def _is_plain(layer: torch.nn.Conv2d) -> bool:
    """Whether oneDNN's convolution is all that a layer does."""
    kind = type(layer) is torch.nn.Conv2d and layer.groups == 1 and "_conv_forward" not in vars(layer)
    kind = kind and is_as_written(torch.nn.Conv2d, "forward", "_conv_forward")
    return kind and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _install_convolution(layer: torch.nn.Conv2d, second_filters: bool) -> bool:
    """Whether filters that were kept of it still hold; those of other weights are let go of."""
    if layer.kernel_size == (1, 1):
        _turn(layer)
    elif not serves(layer) and not layer.weight.is_contiguous(memory_format=torch.channels_last):
        layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    if not _is_plain(layer) and is_installed(layer):  # it was, and somebody gave it another way since
        _let_go(layer)
        return False
    if not _is_plain(layer) or not (is_free(layer) or is_installed(layer)):
        return True
    kept = _FILTERS.get(layer)
    if not second_filters:
        _let_go(layer)
        return kept is None
    vars(layer)["forward"] = MethodType(forward, layer)
    if kept is not None and not torch.equal(kept.mark, fingerprint(layer.weight)):
        del _FILTERS[layer]
        return False
    return True


def _turns() -> bool:
    return measure_turning() >= _TURNING_PAYS


def _turn(layer: torch.nn.Linear | torch.nn.Conv2d) -> None:
    """Let a weight (out, in) lie in memory as (in, out), which some hosts' products read faster; its shape stays."""
    weight = layer.weight.data
    if type(weight) is not torch.Tensor or min(weight.shape[:2]) < _SMALL or weight.dtype != torch.float32:
        return
    if weight.stride(0) != 1 and _turns():
        layer.weight.data = weight.transpose(0, 1).contiguous().transpose(0, 1)


def is_installed(module: torch.nn.Module) -> bool:
    """Whether a layer is done so."""
    own = getattr(vars(module).get("forward"), "__func__", None) in (forward, project_once)
    return own or host_blocks.is_installed(module)


def remove(module: torch.nn.Module) -> None:
    """Let all layers of a model be as torch does them."""
    for part in module.modules():
        _let_go(part)
        if isinstance(part, torch.nn.Linear | torch.nn.Conv2d) and type(part.weight.data) is torch.Tensor:
            part.weight.data = part.weight.data.contiguous()


def _let_go(layer: torch.nn.Module) -> None:
    host_blocks.let_go(layer)
    if is_installed(layer):
        del vars(layer)["forward"]
    _FILTERS.pop(layer, None)
    _PROJECTED.pop(layer, None)


@functools.cache
def measure_gain() -> float | None:
    """How many times as fast this host is so, tried once and kept; None while others keep the host busy."""
    kept = read_fact(_FACTS, _name_host())
    if isinstance(kept, float):
        return kept
    if _is_busy():
        return None
    gain = round(_try_out(), 3)
    keep_fact(_FACTS, _name_host(), gain)
    return gain


@functools.cache
def measure_turning() -> float:
    """How many times as fast products are on this host whose weights were turned, tried once and kept."""
    key = f"{_name_host()} products turned"
    kept = read_fact(_FACTS, key)
    if isinstance(kept, float):
        return kept
    busy = _is_busy()
    given = [(torch.ones(rows, inner), torch.ones(outer, inner), torch.ones(outer)) for rows, inner, outer in _PRODUCTS]
    turned = [(rows, matrix.t().contiguous().t(), bias) for rows, matrix, bias in given]
    plain, ours = _time(
        lambda: [functional.linear(*one) for one in given], lambda: [functional.linear(*one) for one in turned]
    )
    gain = round(plain / ours, 3)
    if not busy:
        keep_fact(_FACTS, key, gain)
    return gain


def _is_busy() -> bool:
    """Whether others keep the host busy, so that a trial would tell of them."""
    psutil.cpu_percent()
    return bool(psutil.cpu_percent(interval=_LOOK_S) > _BUSY)


def _name_host() -> str:
    machine = f"{platform.machine()} {platform.processor()}"
    return f"{machine} torch {torch.__version__} threads {torch.get_num_threads()}"


@torch.no_grad()
def _try_out() -> float:
    """A convolution and a product as denoisers have them."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    picture, weight, bias = draw(2, 160, 16, 16), draw(160, 160, 3, 3), draw(160)
    rows, matrix = draw(512, 160), draw(640, 160)
    best, filters = matrix.t().contiguous().t() if _turns() else matrix, transform_filters(weight, 4)
    last = picture.contiguous(memory_format=torch.channels_last)

    def plain() -> Any:
        return functional.conv2d(picture, weight, bias, padding=1), functional.linear(rows, matrix)

    def ours() -> Any:
        return convolve(last, filters, bias, 4), functional.linear(rows, best)

    took = _time(plain, ours)
    return took[0] / took[1]


def _time(*functions: Callable[[], Any]) -> list[float]:
    """The least that each took, in turns."""
    best = [math.inf] * len(functions)
    for _ in range(_ROUNDS):
        for number, function in enumerate(functions):
            start = time.perf_counter()
            function()
            best[number] = min(best[number], time.perf_counter() - start)
    return best
