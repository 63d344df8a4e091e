"""Graph passes that replace operations with fused kernels before compilation."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch.nn import functional

__all__ = ["fuse"]

# `torch.nn.GroupNorm` calls the first one, which calls the second. A graph can contain either.
_GROUP_NORMS = (functional.group_norm, torch.group_norm)
_HALF_DTYPES = (torch.float16, torch.bfloat16)


def fuse(module: torch.fx.GraphModule, fusions: tuple[str, ...]) -> int:
    """Apply the named fusions to a graph in place; return the number of replaced operations."""
    replaced = 0
    for node in list(module.graph.nodes):
        if "group_norm" in fusions and node.target in _GROUP_NORMS:
            replaced += _fuse_group_norm(module.graph, node)
    if replaced:
        module.graph.eliminate_dead_code()
        module.recompile()
    return replaced


def _fuse_group_norm(graph: torch.fx.Graph, node: torch.fx.Node) -> bool:
    """Fuse a group norm, and a SiLU that follows it, into one operation; return whether this succeeded."""
    names = ("input", "num_groups", "weight", "bias", "eps")
    arguments = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    value = _find_example_value(arguments.get("input"))
    # The kernel is written for half-precision images; in float32 the compiler's own code is used.
    if value is None or value.dim() != 4 or value.dtype not in _HALF_DTYPES:
        return False
    if arguments.get("weight") is None or arguments.get("bias") is None or not _has_kernel():
        return False
    # A SiLU is fused only if nothing else uses the normalized values.
    user = next(iter(node.users)) if len(node.users) == 1 else None
    silu = user is not None and user.target is functional.silu
    last = user if silu and user is not None else node
    eps = arguments.get("eps", 1e-5)
    with graph.inserting_before(last):
        fused = graph.call_function(
            torch.ops.anyaccel.normalize_groups.default,
            (arguments["input"], arguments["num_groups"], arguments["weight"], arguments["bias"], eps, silu),
        )
    _replace_node(last, fused)
    return True


def _has_kernel() -> bool:
    """Return whether the fused operation is available, which requires Triton."""
    if importlib.util.find_spec("triton") is None:
        return False
    importlib.import_module("anyaccel.runtime.speed.group_norm_triton")  # registers the operation
    return True


def _find_example_value(node: Any) -> torch.Tensor | None:
    """Return a node's example tensor; return None if there is none or if it requires gradients.

    Gradients are not supported, because the fused kernel has no backward pass.
    """
    value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) and not value.requires_grad else None


def _replace_node(node: torch.fx.Node, replacement: torch.fx.Node) -> None:
    replacement.meta = dict(node.meta)
    node.replace_all_uses_with(replacement)
