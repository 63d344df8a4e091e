"""Repairs in a compiler's graph: what a plan puts right inside a model that is compiled.

A compiled model runs in no torch function mode, so the functions of its graph are replaced before it is compiled:
dtypes that the device lacks, attention, `torch.empty` and `baddbmm(beta=0)`. Without those a device gives a wrong
result silently, or runs out of memory.

Known limitations: complex numbers, data-dependent shapes and random numbers are left as they are. Devices refuse the
first two, so that such a model runs eagerly; denoisers and decoders draw no random numbers.
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

_REPLACED_DTYPES = ("float64",)


@dataclass(frozen=True)
class GraphWorkarounds:
    """The repairs of a plan that a graph needs; graphs with equal ones are shared."""

    device: str = ""
    dtypes: tuple[tuple[str, str], ...] = ()
    attention: AttentionRule | None = None
    zero_empty: bool = False
    ignore_beta_zero: bool = False

    def __bool__(self) -> bool:
        return self != GraphWorkarounds(self.device)

    def apply(self, module: torch.fx.GraphModule) -> None:
        """Make the repairs in a graph, in place."""
        if self.dtypes:
            _replace_dtypes(module, {getattr(torch, name): getattr(torch, other) for name, other in self.dtypes})
        _replace_functions(module, self._make_handlers())
        module.recompile()

    def _make_handlers(self) -> dict[Any, Any]:
        """Return the handlers that are used inside a model that is not compiled."""
        handlers = uninitialized_memory.make_zero_empty_handlers(torch.device(self.device)) if self.zero_empty else {}
        if self.ignore_beta_zero:
            handlers |= uninitialized_memory.make_beta_zero_handlers()
        if self.attention is not None:
            handlers |= sliced_attention.make_handlers(self.attention)
        return handlers


def read_graph_workarounds(plan: Plan, device: torch.device) -> GraphWorkarounds:
    """Return what a plan repairs in graphs for a device."""
    workarounds = plan.workarounds.value
    return GraphWorkarounds(
        device=device.type,
        dtypes=tuple(pair for pair in plan.replacements.value if pair[0] in _REPLACED_DTYPES and pair[1] != "pairs"),
        attention=plan.attention.value if "attention" in workarounds else None,
        zero_empty="zero_empty" in workarounds,
        ignore_beta_zero="ignore_beta_zero" in workarounds,
    )


def _replace_dtypes(module: torch.fx.GraphModule, dtypes: dict[torch.dtype, torch.dtype]) -> None:
    """Replace a dtype that the device lacks wherever a graph names it."""

    def exchange(value: Any) -> Any:
        return dtypes.get(value, value) if isinstance(value, torch.dtype) else value

    for node in module.graph.nodes:
        if node.op in ("call_function", "call_method"):
            node.args = tuple(exchange(value) for value in node.args)
            node.kwargs = {name: exchange(value) for name, value in node.kwargs.items()}
            if node.op == "call_method" and node.target == "double" and torch.float64 in dtypes:
                node.target, node.args = "to", (*node.args, dtypes[torch.float64])


def _replace_functions(module: torch.fx.GraphModule, handlers: dict[Any, Any]) -> None:
    """Call handlers instead of the functions that they are for; a compiler traces through them."""
    for node in module.graph.nodes:
        function = getattr(torch.Tensor, node.target, None) if node.op == "call_method" else node.target
        if node.op in ("call_function", "call_method") and function in handlers:
            node.op, node.target = "call_function", _bind(handlers[function], function)


def _bind(handler: Callable[..., Any], function: Any) -> Callable[..., Any]:
    """Return a handler as a function with the arguments of the one that it replaces."""

    def repaired(*args: Any, **kwargs: Any) -> Any:
        return handler(function, args, kwargs)

    return repaired
