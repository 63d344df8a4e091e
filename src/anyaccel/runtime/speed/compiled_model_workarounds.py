"""Workarounds applied to the graphs of compiled models.

A compiled model runs without a torch function mode. Instead, unsupported dtypes, attention,
`torch.empty` and `baddbmm(beta=0)` are replaced in its graph before compilation. Without these
workarounds, some devices silently return wrong results or run out of memory.

Known limitations: complex dtypes, data-dependent shapes and random functions are not replaced. If the
device does not support complex dtypes or data-dependent shapes, a model that needs them does not
compile and runs eagerly. Denoisers and decoders use no random functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from anyaccel.planning.attention import AttentionRule
from anyaccel.planning.plan import Plan
from anyaccel.runtime.workarounds import sliced_attention, uninitialized_memory

__all__ = ["GraphWorkarounds", "read_graph_workarounds"]

# Why not a function mode as in eager models: Dynamo traces through one only until the model calls a Python method of
# `Tensor` such as `unflatten`, and then breaks the graph (torch 2.13):
# https://github.com/pytorch/pytorch/issues/130104

_REPLACED_DTYPES = ("float64",)


@dataclass(frozen=True)
class GraphWorkarounds:
    """The workarounds that a plan requires in the graphs of compiled models.

    Instances are hashable, because compiler backends are cached by their workarounds.
    """

    device: str = ""
    dtypes: tuple[tuple[str, str], ...] = ()
    attention: AttentionRule | None = None
    zero_empty: bool = False
    ignore_beta_zero: bool = False

    def __bool__(self) -> bool:
        return self != GraphWorkarounds(self.device)

    def apply(self, module: torch.fx.GraphModule) -> None:
        """Apply the workarounds to an FX graph in place."""
        if self.dtypes:
            _replace_dtypes(module, {getattr(torch, name): getattr(torch, other) for name, other in self.dtypes})
        _replace_functions(module, self._make_handlers())
        module.recompile()

    def _make_handlers(self) -> dict[Any, Any]:
        """Return the handlers for functions that are replaced in graphs, which eager models also use."""
        handlers = uninitialized_memory.make_zero_empty_handlers(torch.device(self.device)) if self.zero_empty else {}
        if self.ignore_beta_zero:
            handlers |= uninitialized_memory.make_beta_zero_handlers()
        if self.attention is not None:
            handlers |= sliced_attention.make_handlers(self.attention)
        return handlers


def read_graph_workarounds(plan: Plan, device: torch.device) -> GraphWorkarounds:
    """Return the workarounds that a plan requires in the graphs of models compiled for a device."""
    workarounds = plan.workarounds.value
    return GraphWorkarounds(
        device=device.type,
        dtypes=tuple(pair for pair in plan.replacements.value if pair[0] in _REPLACED_DTYPES and pair[1] != "pairs"),
        attention=plan.attention.value if "attention" in workarounds else None,
        zero_empty="zero_empty" in workarounds,
        ignore_beta_zero="ignore_beta_zero" in workarounds,
    )


def _replace_dtypes(module: torch.fx.GraphModule, dtypes: dict[torch.dtype, torch.dtype]) -> None:
    """Replace unsupported dtypes in the arguments of all calls in a graph."""

    def replace(value: Any) -> Any:
        return dtypes.get(value, value) if isinstance(value, torch.dtype) else value

    for node in module.graph.nodes:
        if node.op in ("call_function", "call_method"):
            node.args = tuple(replace(value) for value in node.args)
            node.kwargs = {name: replace(value) for name, value in node.kwargs.items()}
            # `Tensor.double()` has no dtype argument to replace.
            if node.op == "call_method" and node.target == "double" and torch.float64 in dtypes:
                node.target, node.args = "to", (*node.args, dtypes[torch.float64])


def _replace_functions(module: torch.fx.GraphModule, handlers: dict[Any, Any]) -> None:
    """Replace function calls in a graph with calls to their handlers, which the compiler can trace."""
    for node in module.graph.nodes:
        function = getattr(torch.Tensor, node.target, None) if node.op == "call_method" else node.target
        if node.op in ("call_function", "call_method") and function in handlers:
            node.op, node.target = "call_function", _bind(handlers[function], function)


def _bind(handler: Callable[..., Any], function: Any) -> Callable[..., Any]:
    """Wrap a handler in a function that can be called like the torch function it replaces."""

    def call_handler(*args: Any, **kwargs: Any) -> Any:
        return handler(function, args, kwargs)

    return call_handler
