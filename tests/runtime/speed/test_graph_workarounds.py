"""Repairs in graphs: a compiled model is sliced, written before it is read, and spared ignored arguments too."""

from typing import Any

import numpy
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import anyaccel
from anyaccel.planning.attention import AttentionRule
from anyaccel.planning.facts import PipelineFacts
from anyaccel.planning.options import PlacementOptions
from anyaccel.planning.plan import make_plan
from anyaccel.recipes import recipes, run
from anyaccel.runtime.speed import compile as compiling
from anyaccel.runtime.speed.graph_workarounds import GraphWorkarounds, read_graph_workarounds
from anyaccel.runtime.workarounds import sliced_attention
from tests.conftest import NEEDS_RECIPES

pytestmark = pytest.mark.usefixtures("pipelines_imported", "compiler_imported")


def compile_repaired(repairs: GraphWorkarounds, function: Any, dynamic: bool | None = False) -> Any:
    """Compile a function behind the repairs, traced as by inductor, without generating code."""

    def compile_graph(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        repairs.apply(module)
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    torch._dynamo.reset()
    return torch.compile(function, backend=compile_graph, fullgraph=True, dynamic=dynamic)


@NEEDS_RECIPES
@pytest.mark.filterwarnings("ignore")  # of torch's own, as it traces
def test_a_compiled_pipeline_attends_in_the_slices_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    unsliced: list[Any] = []
    sliced: list[tuple[int, ...]] = []
    attend_in_slices = sliced_attention.attend_in_slices

    def compile_graph(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        unsliced.extend(node for node in module.graph.nodes if node.target is scaled_dot_product_attention)
        return module.forward

    def count(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        sliced.append(tuple(query.shape))
        return attend_in_slices(query, *args, **kwargs)

    monkeypatch.setattr(compiling, "find_compiler", lambda name: compile_graph)
    monkeypatch.setattr(sliced_attention, "attend_in_slices", count)
    torch._dynamo.reset()
    recipe = recipes()["stable-diffusion"]
    expected = run(recipe, recipe.make())
    pipe: Any = anyaccel.place(recipe.make(), "cpu", dtype="float32", attention_slicing=1, compile=True)
    numpy.testing.assert_allclose(run(recipe, pipe), expected, atol=1e-4)
    assert "unet" in pipe.plan.report.compiled_models.value
    assert pipe.plan.report.not_compiled is None
    assert sliced
    assert not unsliced


@pytest.mark.long
@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("rule", [AttentionRule(most_scores=40), AttentionRule(heads="max"), AttentionRule(heads=2)])
def test_attention_in_a_graph_is_sliced(rule: AttentionRule, dynamic: bool) -> None:
    def attend(query: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, query, query, attn_mask=mask) + 1

    compiled = compile_repaired(GraphWorkarounds("cpu", attention=rule), attend, dynamic)
    for queries in (5, 7):
        query, mask = torch.randn(2, 3, queries, 4), torch.randn(queries, queries)
        torch.testing.assert_close(compiled(query, mask), attend(query, mask))


@torch.no_grad()
def test_what_is_read_before_it_is_written_is_zero_in_a_graph() -> None:
    def read(left: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = torch.empty(2, 3, 3), torch.empty_like(left), left.new_empty(4)
        return (*made, torch.empty(2, device="meta"))

    compiled = compile_repaired(GraphWorkarounds("cpu", zero_empty=True), read)
    for made in compiled(torch.full((1 << 12,), float("nan")))[:3]:
        assert torch.equal(made, torch.zeros_like(made))


@torch.no_grad()
def test_an_addend_that_is_ignored_is_not_read_in_a_graph() -> None:
    def multiply(addend: torch.Tensor, left: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.baddbmm(addend, left, left, beta=0, alpha=0.5), addend.baddbmm(left, left, beta=2)

    seen: list[torch.fx.Node] = []
    repairs = GraphWorkarounds("cpu", ignore_beta_zero=True)

    def compile_graph(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        repairs.apply(module)

        def look(traced: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            seen.extend(node for node in traced.graph.nodes if "baddbmm" in str(node.target))
            return traced.forward

        return torch._dynamo.backends.common.aot_autograd(fw_compiler=look)(module, inputs)

    torch._dynamo.reset()
    compiled: Any = torch.compile(multiply, backend=compile_graph, fullgraph=True)
    addend, left = torch.randn(2, 3, 3), torch.randn(2, 3, 3)
    for made, expected in zip(compiled(addend, left), multiply(addend, left), strict=True):
        torch.testing.assert_close(made, expected)
    assert len(seen) == 1, "the one that adds"


def test_a_graph_has_the_repairs_of_its_device() -> None:
    def read(name: str) -> GraphWorkarounds:
        facts = PipelineFacts(pipeline="Pipeline", components=())
        plan = make_plan(anyaccel.sheet(name), facts, PlacementOptions(dtype="float16"), device=name)
        return read_graph_workarounds(plan, torch.device("cpu"))

    mps = read("mps")
    assert mps.zero_empty
    assert mps.ignore_beta_zero
    assert mps.attention is not None
    assert mps.attention.most_scores
    assert read("rocm") == GraphWorkarounds("cpu", attention=AttentionRule(contiguous=True))
    assert read("neuron") == GraphWorkarounds("cpu", dtypes=(("float64", "float32"),))
    assert read("neuron")
    assert not read("cuda")
