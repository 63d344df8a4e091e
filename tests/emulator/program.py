"""Tensor programs as data, and an interpreter that runs them on the CPU or a device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

__all__ = ["NAMES", "Instruction", "run_program"]

Integers = tuple[int, int, int]
Instruction = tuple[str, Integers]
"""An operation and three integers that select its tensors, dimensions and constants."""
Operation = Callable[..., Any]
Bound = Callable[["list[torch.Tensor]", Integers], Any]

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool)
POOL_SIZE = 8
MAX_ELEMENTS = 2000
"""Results with more elements are not added to the pool."""

_OPERATIONS: dict[str, Bound] = {}


def _reads(**operations: Operation) -> None:
    """Register operations `f(x, a, b)` of a tensor and two integers; the result is added to the pool."""
    for name, operation in operations.items():
        _OPERATIONS[name] = _bind(operation, tensors=1)


def _reads_two(**operations: Operation) -> None:
    """Register operations `f(x, y, a)` of two tensors and an integer."""
    for name, operation in operations.items():
        _OPERATIONS[name] = _bind(operation, tensors=2)


def _writes(**operations: Operation) -> None:
    """Register in-place operations `f(x, a, b)`. Values stay small, because devices narrow int64."""
    for name, operation in operations.items():
        _OPERATIONS[name] = _bind(operation, tensors=1, in_place=True)


def _writes_two(**operations: Operation) -> None:
    """Register in-place operations `f(x, y, a)` that read a second tensor."""
    for name, operation in operations.items():
        _OPERATIONS[name] = _bind(operation, tensors=2, in_place=True)


def _bind(operation: Operation, tensors: int, in_place: bool = False) -> Bound:
    """Return a function that runs the operation on tensors of a pool; the first integers select the tensors."""

    def run(pool: list[torch.Tensor], numbers: Integers) -> Any:
        selected = [pool[number % len(pool)] for number in numbers[:tensors]]
        result = operation(*selected, *numbers[tensors:])
        return _clamp_(selected[0]) if in_place else result

    return run


def _clamp_(tensor: torch.Tensor) -> None:
    if tensor.dtype.is_floating_point:
        tensor.nan_to_num_(0.0, 50.0, -50.0).clamp_(-50, 50)
    elif tensor.dtype is not torch.bool:
        tensor.remainder_(100)


def _clamp(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.is_floating_point:
        return torch.nan_to_num(tensor, 0.0, 50.0, -50.0).clamp(-50, 50)
    return tensor if tensor.dtype is torch.bool else tensor.remainder(100)


def _to_float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype.is_floating_point else tensor.to(torch.float32)


def _dim(tensor: torch.Tensor, number: int) -> int:
    return number % max(1, tensor.dim())


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as a float matrix."""
    return _to_float(tensor).reshape(-1, tensor.shape[-1])


def _index(tensor: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """Return indices below `size`, computed from a tensor's values."""
    return tensor.reshape(-1)[: count % 5 + 1].to(torch.int64).abs() % max(1, size)


def _fold(x: torch.Tensor, a: int) -> torch.Tensor:
    """Reshape to one of three shapes."""
    return x.reshape((2, -1) if a % 3 == 0 else (-1, 1, 3) if a % 3 == 1 else (-1,))


def _view_strided(x: torch.Tensor, a: int) -> torch.Tensor:
    """Return a 2x2 strided view; valid for any tensor with four elements in a row."""
    return x.as_strided((2, 2), (x.stride(-1), x.stride(-1)), x.storage_offset() + x.stride(-1) * (a % 2))


def _resize(x: torch.Tensor, a: int, b: int) -> None:
    x.resize_(a % 4 + 1, b % 3 + 1).fill_(a % 5)


def _attend(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(query, key, key)


def _set(x: torch.Tensor, key: Any, value: Any) -> None:
    x[key] = value


_reads(
    zeros_like=lambda x, a, b: torch.zeros_like(x, dtype=DTYPES[a % 6]),
    full=lambda x, a, b: torch.full((a % 4 + 1, b % 4 + 1), a, device=x.device, dtype=DTYPES[b % 6]),
    arange=lambda x, a, b: torch.arange(a % 6, a % 6 + b % 9, device=x.device),
    eye=lambda x, a, b: torch.eye(a % 4 + 1, b % 4 + 1, device=x.device, dtype=x.dtype),
    new_ones=lambda x, a, b: x.new_ones(a % 4 + 1, b % 4 + 1),
    cast=lambda x, a, b: x.to(DTYPES[a % 6]),
    move=lambda x, a, b: x.cpu().clone().to(x.device),
    clone=lambda x, a, b: x.clone(),
    contiguous=lambda x, a, b: x.contiguous(),
    transpose=lambda x, a, b: x.transpose(_dim(x, a), _dim(x, b)),
    permute=lambda x, a, b: x.permute([(d + a) % x.dim() for d in range(x.dim())]),
    fold=lambda x, a, b: _fold(x, a),
    flatten_view=lambda x, a, b: x.view(-1),
    view_bits=lambda x, a, b: x.view(torch.int32).remainder(100),
    narrow=lambda x, a, b: x.narrow(_dim(x, a), 0, max(1, x.shape[_dim(x, a)] - b % 3)),
    slice=lambda x, a, b: x[..., a % 3 :: b % 2 + 1],
    select=lambda x, a, b: x.select(_dim(x, a), b % x.shape[_dim(x, a)]),
    expand=lambda x, a, b: x.unsqueeze(0).expand(a % 3 + 1, *x.shape),
    unsqueeze=lambda x, a, b: x.unsqueeze(a % (x.dim() + 1)),
    squeeze=lambda x, a, b: x.squeeze(),
    flip=lambda x, a, b: x.flip(_dim(x, a)),
    chunk=lambda x, a, b: x.chunk(2, _dim(x, a))[-1],
    unbind=lambda x, a, b: x.unbind(_dim(x, a))[0],
    split=lambda x, a, b: x.split(a % 2 + 1, _dim(x, b))[0],
    diagonal=lambda x, a, b: x.diagonal(),
    as_strided=lambda x, a, b: _view_strided(x, a),
    repeat=lambda x, a, b: x.repeat(2, *[1] * (x.dim() - 1)),
    roll=lambda x, a, b: x.roll(a % 3, _dim(x, b)),
    by_list=lambda x, a, b: x[[0, a % x.shape[0]]],
    by_lists=lambda x, a, b: x[[0, a % x.shape[0]], [b % x.shape[1], 0]],
    by_mask=lambda x, a, b: x[x > a % 4],
    detach=lambda x, a, b: x.detach(),
    add_number=lambda x, a, b: _clamp(torch.add(x, a, alpha=b)),
    divide=lambda x, a, b: _clamp(x / (a + 1)),
    negate=lambda x, a, b: -x,
    compare=lambda x, a, b: x > a % 5,
    total=lambda x, a, b: _clamp(x.sum(_dim(x, a), keepdim=b % 2 == 0)),
    largest=lambda x, a, b: x.max(_dim(x, a)).values,
    argmax=lambda x, a, b: x.argmax(_dim(x, a)),
    cumsum=lambda x, a, b: _clamp(x.cumsum(_dim(x, a))),
    softmax=lambda x, a, b: _to_float(x).softmax(_dim(x, a)),
    layer_norm=lambda x, a, b: _clamp(functional.layer_norm(_to_float(x), x.shape[-1:])),
    conv2d=lambda x, a, b: _clamp(functional.conv2d(_rows(x)[None, None], _rows(x).new_full((2, 1, 1, 2), 0.5))),
    interpolate=lambda x, a, b: functional.interpolate(_rows(x)[None, None], scale_factor=2, mode="nearest"),
    bilinear=lambda x, a, b: functional.interpolate(_rows(x)[None, None], size=(a + 1, b + 1), mode="bilinear"),
    sort=lambda x, a, b: x.sort(_dim(x, a)).values,
    triangle=lambda x, a, b: x.tril(a % 3 - 1),
    masked_fill=lambda x, a, b: x.masked_fill(x > a % 5, b),
)  # fmt: skip
_reads_two(
    add=lambda x, y, a: _clamp(x + y),
    multiply=lambda x, y, a: _clamp(x * y),
    matmul=lambda x, y, a: _clamp(_rows(x) @ _rows(y).to(_to_float(x).dtype).t()),
    cat=lambda x, y, a: torch.cat([x, y], _dim(x, a)),
    stack=lambda x, y, a: torch.stack([x, y], a % (x.dim() + 1)),
    where=lambda x, y, a: torch.where(x > a % 5, x, y),
    gather=lambda x, y, a: torch.gather(x.reshape(-1), 0, _index(y, x.numel(), a)),
    scatter=lambda x, y, a: torch.scatter(x.reshape(-1), 0, _index(y, x.numel(), 0), a),
    index_select=lambda x, y, a: torch.index_select(x, _dim(x, a), _index(y, x.shape[_dim(x, a)], a)),
    by_tensor=lambda x, y, a: x[_index(y, x.shape[0], a)],
    by_host_tensor=lambda x, y, a: x[_index(y, x.shape[0], a).cpu()],
    attention=lambda x, y, a: _clamp(_attend(_rows(x)[None, None], _rows(y)[None, None].to(_to_float(x).dtype))),
    expand_as=lambda x, y, a: x.expand_as(y),
    view_as=lambda x, y, a: x.view_as(y),
    out=lambda x, y, a: _clamp(torch.mul(x, y, out=(x * y).new_empty(0))),
)  # fmt: skip
_writes(
    add_=lambda x, a, b: x.add_(a, alpha=b % 3),
    mul_=lambda x, a, b: x.mul_(a % 4 - 1),
    zero_=lambda x, a, b: x.zero_(),
    fill_=lambda x, a, b: x.fill_(a),
    clamp_=lambda x, a, b: x.clamp_(a % 3, 5),
    add_through_transpose=lambda x, a, b: x.transpose(0, -1).add_(a),
    mul_through_slice=lambda x, a, b: x[..., a % 3 :].mul_(b % 3),
    masked_fill_=lambda x, a, b: x.masked_fill_(x > a % 5, b),
    fill_diagonal_=lambda x, a, b: x.fill_diagonal_(a),
    set_slice=lambda x, a, b: _set(x, slice(a % 3, None), b),
    set_list=lambda x, a, b: _set(x, [a % x.shape[0], 0], b),
    set_mask=lambda x, a, b: _set(x, x > a % 5, b),
    set_integer=lambda x, a, b: _set(x, a % x.shape[0], b),
    set_ellipsis=lambda x, a, b: _set(x, (..., -1), b),
    unsqueeze_=lambda x, a, b: x.unsqueeze_(a % (x.dim() + 1)),
    squeeze_=lambda x, a, b: x.squeeze_(),
    t_=lambda x, a, b: x.t_(),
    transpose_=lambda x, a, b: x.transpose_(_dim(x, a), _dim(x, b)),
    resize_=_resize,
    as_strided_=lambda x, a, b: x.as_strided_(x.shape[1:], x.stride()[1:], x.storage_offset() + x.stride(0)),
)  # fmt: skip
_writes_two(
    add_tensor_=lambda x, y, a: x.add_(y),
    sub_through_select=lambda x, y, a: x.select(0, a % x.shape[0]).sub_(y),
    copy_=lambda x, y, a: x.copy_(y),
    copy_from_host_=lambda x, y, a: x.copy_(y.cpu().clone()),
    set_slice_to_tensor=lambda x, y, a: _set(x, slice(0, 1), y[:1]),
    set_list_to_tensor=lambda x, y, a: _set(x, [0], y[0].to(x.dtype)),
    index_copy_=lambda x, y, a: x.index_copy_(0, _index(y, x.shape[0], 0), x[:1].clone()),
    scatter_=lambda x, y, a: x.view(-1).scatter_(0, _index(y, x.numel(), 0), a),
    set_=lambda x, y, a: x.set_(y),
    data=lambda x, y, a: setattr(x, "data", y),
)  # fmt: skip

NAMES = sorted(_OPERATIONS)


def _make_pool(device: torch.device) -> list[torch.Tensor]:
    """Create four tensors on the CPU and move them."""
    tensors = [
        torch.arange(12.0).reshape(3, 4),
        torch.linspace(-3, 3, 24).reshape(2, 3, 4),
        torch.arange(-4, 8).reshape(4, 3),
        torch.tensor([[True, False, True, True]]),
    ]
    return [tensor.to(device) for tensor in tensors]


def run_program(program: list[Instruction], device: torch.device) -> tuple[list[torch.Tensor], list[bool]]:
    """Run a program; return the final pool, and for each instruction whether torch rejected it."""
    pool, rejected = _make_pool(device), []
    for name, numbers in program:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch warns about writes to expanded tensors
                result = _OPERATIONS[name](pool, numbers)
            rejected.append(False)
        except (RuntimeError, IndexError, ZeroDivisionError, TypeError):
            rejected.append(True)
            continue
        if result is not None and result.numel() <= MAX_ELEMENTS:
            pool = [*pool, result] if len(pool) < POOL_SIZE else [*pool[1:], result]
    return pool, rejected
