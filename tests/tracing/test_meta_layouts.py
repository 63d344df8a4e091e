"""Layouts of common operations are those of torch's meta kernels."""

import itertools
from typing import Any

import torch

from anyaccel.tracing.meta_layouts import find_layout

ATEN = torch.ops.aten
SHAPES = [(2, 3, 4, 5), (4, 5), (1, 3, 1, 1), (1, 1, 1, 5), (), (2, 1, 4, 1), (1,), (2, 3, 4, 1), (5,)]
BINARY = (ATEN.add.Tensor, ATEN.sub.Tensor, ATEN.mul.Tensor, ATEN.div.Tensor)
UNARY = (
    (ATEN.clamp.default, (0, 1)),
    (ATEN.clamp_min.default, (0.5,)),
    (ATEN.gelu.default, ()),
    (ATEN.silu.default, ()),
    (ATEN.linalg_vector_norm.default, (2.0, [1], True)),
    (ATEN.linalg_vector_norm.default, (2.0, [-1], True)),
)


def make_tensors() -> list[torch.Tensor]:
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in SHAPES]
    first = tensors[0]
    others = [first.float(), first.long(), first.transpose(1, 2), first.to(memory_format=torch.channels_last)]
    return [*tensors, *others, torch.empty(2, 3, 4, 10, dtype=torch.bfloat16, device="meta")[..., ::2]]


def list_calls() -> list[tuple[Any, tuple[Any, ...]]]:
    tensors = make_tensors()
    scalars = [2, 2.5, torch.tensor(3.0), torch.tensor(2)]
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    for func in BINARY:
        calls += [(func, (left, right)) for left, right in itertools.product(tensors, [*tensors, *scalars])]
    calls += [(func, (tensor, *others)) for (func, others), tensor in itertools.product(UNARY, tensors)]
    pairs = itertools.product(tensors, tensors, (0, 1, -1))
    return [*calls, *((ATEN.cat.default, ([left, right], dim)) for left, right, dim in pairs)]


def test_layouts_are_those_of_the_kernels() -> None:
    found = 0
    for func, args in list_calls():
        layout = find_layout(func, args, {})
        if layout is None:
            continue
        result = func(*args)  # raises an error for arguments that do not match
        assert layout == (result.shape, result.stride(), result.dtype), (func, args)
        found += 1
    assert found > 500


def test_other_operations_have_no_layout() -> None:
    assert find_layout(ATEN.mm.default, make_tensors()[1:2] * 2, {}) is None
