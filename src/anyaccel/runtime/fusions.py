"""Fusing: what a compiler leaves as several kernels and the device does as one, exchanged before it is compiled."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

__all__ = ["fuse", "kept_with_graphs"]

_NORMS = (functional.group_norm, torch.group_norm)
_SILUS = (functional.silu, torch.nn.SiLU)
_JOINS = (torch.cat, torch.concat, torch.concatenate)
_HALF = (torch.float16, torch.bfloat16)


def fuse(graph: torch.fx.GraphModule, wanted: tuple[str, ...]) -> int:
    """Exchange what can be done as one, in place; how many places there were."""
    done = 0
    for node in list(graph.graph.nodes):
        if "group_norm" in wanted and node.target in _NORMS:
            done += _fuse_norm(graph.graph, node)
        elif "gelu" in wanted and node.target is functional.gelu:
            done += _fuse_gelu(graph.graph, node)
        elif "joined" in wanted and node.target in _JOINS:
            done += _fuse_joined(graph.graph, node)
    if done:
        graph.graph.eliminate_dead_code()
        graph.recompile()
    return done


@contextmanager
def kept_with_graphs() -> Iterator[None]:
    """While a graph is compiled: what stands for several operations may be in one that is kept for the next process.

    Torch keeps no graph with functions that it does not know, since they may change; these are told by their code.
    """
    own = (multiply_and_activate, multiply_joined)
    known = {
        f"{one.__module__}.{one.__name__}": f"{crc32(one.__code__.co_code):x} {' '.join(one.__code__.co_names)}"
        for one in own
    }
    inductor: Any = importlib.import_module("torch._inductor.config")
    with inductor.patch(unsafe_marked_cacheable_functions={**inductor.unsafe_marked_cacheable_functions, **known}):
        yield


def _fuse_norm(graph: torch.fx.Graph, node: torch.fx.Node) -> bool:
    """Normalization over groups of channels, and the activation after it."""
    names = ("input", "num_groups", "weight", "bias", "eps")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    value = _value(given.get("input"))
    if value is None or value.dim() != 4 or value.dtype not in _HALF:
        return False
    if given.get("weight") is None or given.get("bias") is None or not _has_kernel():
        return False
    following = next(iter(node.users)) if len(node.users) == 1 else None
    silu = following is not None and following.target in _SILUS
    last = following if silu and following is not None else node
    with graph.inserting_before(last):
        made = graph.call_function(
            torch.ops.anyaccel.normalize_groups.default,
            (given["input"], given["num_groups"], given["weight"], given["bias"], given.get("eps", 1e-5), silu),
        )
    _exchange(last, made)
    return True


def _has_kernel() -> bool:
    """Whether the operation is there: it needs Triton."""
    if importlib.util.find_spec("triton") is None:
        return False
    importlib.import_module("anyaccel.runtime.kernels.group_norm")  # makes the operation known
    return True


def _fuse_gelu(graph: torch.fx.Graph, node: torch.fx.Node) -> bool:
    """A product and the activation after it, which the library of matrix products does before it writes the result."""
    before = node.args[0] if node.args else None
    if node.kwargs.get("approximate") != "tanh" or not isinstance(before, torch.fx.Node):
        return False
    if before.target not in (functional.linear, torch._C._nn.linear) or len(before.users) != 1:
        return False
    names = ("input", "weight", "bias")
    given = dict(zip(names, before.args, strict=False)) | dict(before.kwargs)
    value, bias = _value(given.get("input")), given.get("bias")
    if value is None or value.dtype not in _HALF or bias is None or not _is_plain(given.get("weight")):
        return False
    with graph.inserting_before(node):
        made = graph.call_function(multiply_and_activate, (given["input"], given["weight"], bias))
    _exchange(node, made)
    return True


def multiply_and_activate(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`gelu(linear(values))` by its approximation with tanh."""
    rows = values.reshape(-1, values.shape[-1])
    return torch._addmm_activation(bias, rows, weight.t(), use_gelu=True).reshape(*values.shape[:-1], weight.shape[0])


def _fuse_joined(graph: torch.fx.Graph, node: torch.fx.Node) -> bool:
    """A product of what two tensors are joined to: one product for each adds up to it, and nothing is joined."""
    names = ("tensors", "dim")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    tensors, value = given.get("tensors"), _value(node)
    if not isinstance(tensors, list | tuple) or len(tensors) != 2 or value is None or value.dtype not in _HALF:
        return False
    after = next(iter(node.users)) if len(node.users) == 1 else None
    if after is None or after.target not in (functional.linear, torch._C._nn.linear) or not after.args:
        return False
    product = dict(zip(("input", "weight", "bias"), after.args, strict=False)) | dict(after.kwargs)
    last = given.get("dim", 0) in (-1, value.dim() - 1)
    if not last or product.get("input") is not node or not _is_plain(product.get("weight")):
        return False
    with graph.inserting_before(after):
        made = graph.call_function(multiply_joined, (*tensors, product["weight"], product.get("bias")))
    _exchange(after, made)
    return True


def multiply_joined(
    first: torch.Tensor, second: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`linear(cat([first, second], -1))` as two products, the second added to the first."""
    width = first.shape[-1]
    made = functional.linear(first.reshape(-1, width), weight[:, :width], bias)
    rows = second.reshape(-1, second.shape[-1])
    return torch.addmm(made, rows, weight[:, width:].t()).reshape(*first.shape[:-1], weight.shape[0])


def _is_plain(node: Any) -> bool:
    """Whether a weight is a tensor as any other, and not one of a quantized kind."""
    value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    return isinstance(value, torch.Tensor) and (
        type(value) in (torch.Tensor, torch.nn.Parameter) or isinstance(value, FakeTensor)
    )


def _value(node: Any) -> torch.Tensor | None:
    """The tensor that a node was traced with, where it lies on a device that these operations are for."""
    value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) and not value.requires_grad else None


def _exchange(node: torch.fx.Node, other: torch.fx.Node) -> None:
    other.meta = dict(node.meta)
    node.replace_all_uses_with(other)
