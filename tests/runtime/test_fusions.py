"""Exchanging what is done as one: in every place where it is right, and in no other."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from anyaccel.runtime import fusions


def trace(function: Any, *inputs: Any) -> torch.fx.GraphModule:
    """The graph of a function as a compiler's backend gets it."""
    found: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        compiled: Any = torch.compile(function, backend=backend)
        compiled(*inputs)
    return found[0]


def targets(graph: torch.fx.GraphModule) -> set[Any]:
    return {node.target for node in graph.graph.nodes if node.op == "call_function"}


@pytest.fixture
def half() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"x": (2, 5, 8), "w": (16, 8), "b": (16,)}
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}


def test_a_product_and_its_activation(half: dict[str, torch.Tensor]) -> None:
    def layer(x: Any, w: Any, b: Any) -> Any:
        return functional.gelu(functional.linear(x, w, b), approximate="tanh") * 2

    graph = trace(layer, *half.values())
    assert fusions.fuse(graph, ("gelu",)) == 1
    assert functional.gelu not in targets(graph)
    made = graph(*half.values())[0].float()
    assert (made - layer(*half.values()).float()).abs().max() < 0.05
    assert fusions.fuse(graph, ("gelu",)) == 0


def test_what_is_used_twice_or_is_another_activation_stays(half: dict[str, torch.Tensor]) -> None:
    def twice(x: Any, w: Any, b: Any) -> Any:
        made = functional.linear(x, w, b)
        return functional.gelu(made, approximate="tanh") + made

    def exact(x: Any, w: Any, b: Any) -> Any:
        return functional.gelu(functional.linear(x, w, b))

    for function in (twice, exact):
        assert fusions.fuse(trace(function, *half.values()), fusions_wanted()) == 0
    single = {name: tensor.float() for name, tensor in half.items()}

    def layer(x: Any, w: Any, b: Any) -> Any:
        return functional.gelu(functional.linear(x, w, b), approximate="tanh")

    assert fusions.fuse(trace(layer, *single.values()), fusions_wanted()) == 0, "float32 is left alone"


def fusions_wanted() -> tuple[str, ...]:
    return ("group_norm", "gelu")


def test_a_normalization_and_its_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    library: Any = torch.library.Library("anyaccel", "FRAGMENT")  # type: ignore[no-untyped-call]
    if not hasattr(torch.ops.anyaccel, "normalize_groups"):
        library.define("normalize_groups(Tensor x, int groups, Tensor w, Tensor b, float eps, bool silu) -> Tensor")

        def on_the_host(x: Any, groups: int, w: Any, b: Any, eps: float, silu: bool) -> Any:
            calls.append(silu)
            made = functional.group_norm(x, groups, w, b, eps)
            return functional.silu(made) if silu else made

        library.impl("normalize_groups", on_the_host, "CPU")
    monkeypatch.setattr(fusions, "_has_kernel", lambda: True)
    x = torch.randn(2, 8, 4, 4).to(torch.bfloat16)
    norm = torch.nn.GroupNorm(4, 8, eps=1e-6).to(torch.bfloat16)

    def layer(x: Any) -> Any:
        return functional.silu(norm(x)) + norm(x * 2)

    graph = trace(layer, x)
    assert fusions.fuse(graph, ("group_norm",)) == 2
    assert not targets(graph) & {functional.group_norm, functional.silu}
    inputs = [
        x if node.meta["example_value"].dim() == 4 else None for node in graph.graph.nodes if node.op == "placeholder"
    ]
    weights = iter([norm.weight, norm.bias])
    made = graph(*[value if value is not None else next(weights) for value in inputs])[0]
    torch.testing.assert_close(made, layer(x))
    assert sorted(calls) == [False, True]


def test_a_graph_with_what_is_done_as_one_is_kept_for_the_next_process(half: dict[str, torch.Tensor]) -> None:
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, check_cacheable

    def layers(x: Any, w: Any, b: Any) -> Any:
        made = functional.gelu(functional.linear(x, w, b), approximate="tanh")
        return functional.linear(torch.cat([x, made], -1), torch.cat([w, w, w], -1))

    graph = trace(layers, *half.values())
    assert fusions.fuse(graph, ("gelu", "joined")) == 2
    with pytest.raises(BypassAOTAutogradCache):
        check_cacheable(graph)
    with fusions.kept_with_graphs():
        check_cacheable(graph)
