"""Fusing: what a compiler leaves as several kernels and the device does as one, exchanged before it is compiled."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch.nn import functional

__all__ = ["fuse"]

_NORMS = (functional.group_norm, torch.group_norm)
_HALF = (torch.float16, torch.bfloat16)


def fuse(graph: torch.fx.GraphModule, wanted: tuple[str, ...]) -> int:
    """Exchange what can be done as one, in place; how many places there were."""
    done = 0
    for node in list(graph.graph.nodes):
        if "group_norm" in wanted and node.target in _NORMS:
            done += _fuse_norm(graph.graph, node)
    if done:
        graph.graph.eliminate_dead_code()
        graph.recompile()
    return done


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
    silu = following is not None and following.target is functional.silu
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
    importlib.import_module("anyaccel.runtime.speed.group_norm_triton")  # makes the operation known
    return True


def _value(node: Any) -> torch.Tensor | None:
    """Return the tensor that a node was traced with, unless gradients are needed for it."""
    value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) and not value.requires_grad else None


def _exchange(node: torch.fx.Node, other: torch.fx.Node) -> None:
    other.meta = dict(node.meta)
    node.replace_all_uses_with(other)
