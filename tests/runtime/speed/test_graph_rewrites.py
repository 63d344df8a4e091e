"""Graph passes that fold CPU constants, replace `fill_diagonal_` and keep rounding."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from anyaccel.runtime.speed.graph_rewrites import fold_cpu_constants, keep_rounding, replace_fill_diagonal


class Compiled:
    """A function compiled with a graph pass; records what the pass returned and the graph."""

    def __init__(
        self, function: Callable[..., Any], graph_pass: Callable[[torch.fx.GraphModule], int], name: str = "aot_eager"
    ) -> None:
        torch._dynamo.reset()
        self.changes: list[int] = []
        self.targets: list[str] = []

        def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            self.changes.append(graph_pass(module))
            self.targets += [str(getattr(node.target, "__name__", node.target)) for node in module.graph.nodes]
            # AOTAutograd, because it has more requirements for a graph than Dynamo.
            compiled: Callable[..., Any] = torch._dynamo.lookup_backend(name)(module, inputs)
            return compiled

        self.run = torch.compile(function, backend=backend, dynamic=False)


def rotary(x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.shape[-1], dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, 1 / 10000 ** (positions / x.shape[-1]))
    return x @ torch.cat([angles.cos(), angles.sin()]).to(x.dtype)[: x.shape[-1]]


def test_cpu_tensors_that_depend_on_no_input_are_computed_once() -> None:
    compiled = Compiled(rotary, fold_cpu_constants)
    for seed in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(compiled.run(x), rotary(x))
    assert compiled.changes == [1]
    assert not {"arange", "cos", "cat"} & set(compiled.targets)


def test_a_new_size_has_its_own_constants() -> None:
    compiled = Compiled(rotary, fold_cpu_constants)
    for size in (4, 6, 4):
        x = torch.ones(1, size)
        assert torch.equal(compiled.run(x), rotary(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + torch.randn(4),
        lambda x: x + torch.empty(4).fill_(2.0),
        lambda x: torch.zeros(4).add_(x),
        lambda x: torch.zeros(2, 4)[0].copy_(x) + torch.zeros(4),
    ],
    ids=["random", "uninitialized", "written to", "written to through a view"],
)
def test_values_that_change_are_not_folded(function: Callable[..., Any]) -> None:
    compiled = Compiled(function, fold_cpu_constants)
    for seed in range(3):
        x = torch.full((4,), float(seed))
        torch.manual_seed(seed)
        expected, state = function(x), torch.get_rng_state()
        torch.manual_seed(seed)
        assert torch.equal(compiled.run(x), expected)
        assert torch.equal(torch.get_rng_state(), state)
    assert compiled.changes == [0]


def test_a_buffer_is_not_a_constant() -> None:
    layer = torch.nn.Linear(4, 4)
    compiled = Compiled(lambda x: x + layer.weight.detach().cos(), fold_cpu_constants)
    x = torch.zeros(1, 4)
    before = compiled.run(x)
    layer.weight.data += 1
    assert not torch.equal(compiled.run(x), before)


@pytest.mark.parametrize("shape", [(3, 3), (5, 3), (3, 5)])
def test_fill_diagonal_of_a_slice(shape: tuple[int, int]) -> None:
    def mask(x: torch.Tensor) -> torch.Tensor:
        full = x.new_full((6, 6), 1.0)
        full[: shape[0], : shape[1]] = float("-inf")
        full[: shape[0], : shape[1]].fill_diagonal_(0)
        return full + x

    compiled = Compiled(mask, replace_fill_diagonal)
    assert torch.equal(compiled.run(torch.ones(6)), mask(torch.ones(6)))
    assert compiled.changes == [1]
    assert "fill_diagonal_" not in compiled.targets


@pytest.fixture
def quick_inductor() -> Iterator[None]:
    """Let Inductor compile in a third of the time: without headers for vector instructions, which round the same."""
    settings: Any = importlib.import_module("torch._inductor.config")
    with settings.patch({"cpp.simdlen": 1, "cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}):
        yield


@pytest.mark.usefixtures("quick_inductor")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # torch imports it for Inductor
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_a_cast_to_half_precision_rounds(dtype: torch.dtype) -> None:
    def scale(x: torch.Tensor) -> torch.Tensor:
        return (x * 1.0001).to(dtype).type_as(x) * 2

    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    without = Compiled(scale, lambda module: 0, "inductor")
    assert not torch.equal(without.run(x), scale(x)), "Inductor rounds by itself: delete keep_rounding"
    compiled = Compiled(scale, keep_rounding, "inductor")
    assert torch.equal(compiled.run(x), scale(x))
    assert compiled.changes == [1]


def test_a_half_precision_model_keeps_its_casts() -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (4,)).sigmoid()

    compiled = Compiled(norm, keep_rounding)
    x = torch.randn(2, 4, dtype=torch.bfloat16)
    assert torch.equal(compiled.run(x), norm(x))
    assert compiled.changes == [0]
