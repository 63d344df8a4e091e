"""Workarounds in compiled graphs: sliced attention, zeroed memory and ignored inputs."""

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
from anyaccel.runtime.speed import compile as compile_module
from anyaccel.runtime.speed.compiled_model_workarounds import GraphWorkarounds, read_graph_workarounds
from anyaccel.runtime.workarounds import sliced_attention
from tests.conftest import NEEDS_RECIPES
from tests.runtime.speed.small_pipelines import make_small

pytestmark = pytest.mark.usefixtures("pipelines_imported", "compiler_imported")


def compile_with_workarounds(workarounds: GraphWorkarounds, function: Any, dynamic: bool | None = False) -> Any:
    """Compile a function with workarounds; tracing is the same as for Inductor, without code generation."""

    def compile_graph(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        workarounds.apply(module)
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    torch._dynamo.reset()
    return torch.compile(function, backend=compile_graph, fullgraph=True, dynamic=dynamic)


@NEEDS_RECIPES
@pytest.mark.filterwarnings("ignore")  # torch warns while it traces
def test_compiled_pipeline_slices_attention_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    unsliced: list[Any] = []
    sliced: list[tuple[int, ...]] = []
    attend_in_slices = sliced_attention.attend_in_slices

    def compile_graph(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        unsliced.extend(node for node in module.graph.nodes if node.target is scaled_dot_product_attention)
        return module.forward

    def count(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        sliced.append(tuple(query.shape))
        return attend_in_slices(query, *args, **kwargs)

    monkeypatch.setattr(compile_module, "find_compiler", lambda name: compile_graph)
    monkeypatch.setattr(sliced_attention, "attend_in_slices", count)
    torch._dynamo.reset()
    recipe = recipes()["stable-diffusion"]
    expected = run(recipe, make_small())
    pipe: Any = anyaccel.place(make_small(), "cpu", dtype="float32", attention_slicing=1, compile=True)
    numpy.testing.assert_allclose(run(recipe, pipe), expected, atol=1e-4)
    assert "unet" in pipe.plan.report.compiled_models.value
    assert pipe.plan.report.not_compiled is None
    assert sliced
    assert not unsliced


@pytest.mark.long
@torch.no_grad()
@pytest.mark.parametrize(
    ("rule", "dynamic"),
    [
        (AttentionRule(max_scores=40), False),
        (AttentionRule(max_scores=40), True),
        (AttentionRule(heads="max"), False),
        (AttentionRule(heads=2), False),
        pytest.param(AttentionRule(heads="max"), True, marks=pytest.mark.slow),
        pytest.param(AttentionRule(heads=2), True, marks=pytest.mark.slow),
    ],
)
def test_attention_in_a_graph_is_sliced(rule: AttentionRule, dynamic: bool) -> None:
    def attend(query: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, query, query, attn_mask=mask) + 1

    compiled = compile_with_workarounds(GraphWorkarounds("cpu", attention=rule), attend, dynamic)
    for queries in (5, 7):
        query, mask = torch.randn(2, 3, queries, 4), torch.randn(queries, queries)
        torch.testing.assert_close(compiled(query, mask), attend(query, mask))


@torch.no_grad()
def test_empty_returns_zeros_in_a_graph() -> None:
    def read(left: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = torch.empty(2, 3, 3), torch.empty_like(left), left.new_empty(4)
        return (*results, torch.empty(2, device="meta"))

    compiled = compile_with_workarounds(GraphWorkarounds("cpu", zero_empty=True), read)
    for result in compiled(torch.full((1 << 12,), float("nan")))[:3]:
        assert torch.equal(result, torch.zeros_like(result))


@torch.no_grad()
def test_baddbmm_with_beta_zero_ignores_its_input_in_a_graph() -> None:
    def multiply(addend: torch.Tensor, left: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.baddbmm(addend, left, left, beta=0, alpha=0.5), addend.baddbmm(left, left, beta=2)

    seen: list[torch.fx.Node] = []
    workarounds = GraphWorkarounds("cpu", ignore_beta_zero=True)

    def compile_graph(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        workarounds.apply(module)

        def inspect_graph(traced: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            seen.extend(node for node in traced.graph.nodes if "baddbmm" in str(node.target))
            return traced.forward

        return torch._dynamo.backends.common.aot_autograd(fw_compiler=inspect_graph)(module, inputs)

    torch._dynamo.reset()
    compiled: Any = torch.compile(multiply, backend=compile_graph, fullgraph=True)
    addend, left = torch.randn(2, 3, 3), torch.randn(2, 3, 3)
    for actual, expected in zip(compiled(addend, left), multiply(addend, left), strict=True):
        torch.testing.assert_close(actual, expected)
    assert len(seen) == 1, "only the call with beta=2 remains"


def test_graph_workarounds_follow_the_device() -> None:
    def read(name: str) -> GraphWorkarounds:
        facts = PipelineFacts(pipeline="Pipeline", components=())
        plan = make_plan(anyaccel.sheet(name), facts, PlacementOptions(dtype="float16"), device=name)
        return read_graph_workarounds(plan, torch.device("cpu"))

    mps = read("mps")
    assert mps.zero_empty
    assert mps.ignore_beta_zero
    assert mps.attention is not None
    assert mps.attention.max_scores
    assert read("rocm") == GraphWorkarounds("cpu", attention=AttentionRule(contiguous=True))
    assert read("neuron") == GraphWorkarounds("cpu", dtypes=(("float64", "float32"),))
    assert read("neuron")
    assert not read("cuda")
