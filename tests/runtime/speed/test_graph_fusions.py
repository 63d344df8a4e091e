"""Graph fusions replace the operations they support, and no others."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from anyaccel.runtime.speed import graph_fusions


def trace(function: Any, *inputs: Any) -> torch.fx.GraphModule:
    """Return the graph of a function as a compiler backend receives it."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        compiled: Any = torch.compile(function, backend=backend)
        compiled(*inputs)
    return graphs[0]


def targets(graph: torch.fx.GraphModule) -> set[Any]:
    return {node.target for node in graph.graph.nodes if node.op == "call_function"}


def test_group_norm_and_silu_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    library: Any = torch.library.Library("anyaccel", "FRAGMENT")  # type: ignore[no-untyped-call]
    if not hasattr(torch.ops.anyaccel, "normalize_groups"):
        library.define("normalize_groups(Tensor x, int groups, Tensor w, Tensor b, float eps, bool silu) -> Tensor")

        def run_on_cpu(x: Any, groups: int, w: Any, b: Any, eps: float, silu: bool) -> Any:
            calls.append(silu)
            result = functional.group_norm(x, groups, w, b, eps)
            return functional.silu(result) if silu else result

        library.impl("normalize_groups", run_on_cpu, "CPU")
    monkeypatch.setattr(graph_fusions, "_has_kernel", lambda: True)
    x = torch.randn(2, 8, 4, 4).to(torch.bfloat16)
    norm = torch.nn.GroupNorm(4, 8, eps=1e-6).to(torch.bfloat16)

    def layer(x: Any) -> Any:
        return functional.silu(norm(x)) + norm(x * 2)

    graph = trace(layer, x)
    assert graph_fusions.fuse(graph, ("group_norm",)) == 2
    assert not targets(graph) & {functional.group_norm, functional.silu}
    inputs = [
        x if node.meta["example_value"].dim() == 4 else None for node in graph.graph.nodes if node.op == "placeholder"
    ]
    weights = iter([norm.weight, norm.bias])
    result = graph(*[value if value is not None else next(weights) for value in inputs])[0]
    torch.testing.assert_close(result, layer(x))
    assert sorted(calls) == [False, True]
