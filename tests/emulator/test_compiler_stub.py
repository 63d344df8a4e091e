"""The stub for vendor compilers: graphs, recompilations, graph breaks, artifacts for later processes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import LimitError, VirtualDeviceError
from tests.emulator.forked import DEVICES

pytestmark = pytest.mark.usefixtures("compiler_imported")
BACKENDS = [("neuron", "neuron"), ("hpu", "hpu_backend")]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rotary = torch.arange(8, device=x.device, dtype=torch.float32)
        hidden = self.project(x) + rotary * x.new_tensor([0.5])
        heads = hidden.view(1, -1, 2, 4).transpose(1, 2)
        mixed = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        joined: torch.Tensor = mixed.transpose(1, 2).reshape(x.shape)
        picked: torch.Tensor = joined[[0, 1]] + hidden[0]
        return picked


class Branching(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.project(x)
        if hidden.sum() > 0:
            hidden = hidden + 1
        return hidden


Report = tuple[int, int, list[str], float]


def compile_two_shapes(backend: str) -> Callable[[VirtualAccelerator], Report]:
    def use(accelerator: VirtualAccelerator) -> Report:
        device = accelerator.device()
        block = Block().to(device)
        compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=False)
        with torch.no_grad():
            small, large = torch.ones(5, 8).to(device), torch.ones(6, 8).to(device)
            difference = (compiled(small) - block(small)).abs().max().item()
            compiled(small), compiled(large), compiled(large)
        log = accelerator.compiler
        weights = {"float32[8, 8]", "float32[8]"}
        shapes = [shape for graph in log.recompilations for shape in graph.inputs if shape not in weights]
        return len(log.graphs), log.compiled, shapes, difference

    return use


@pytest.mark.parametrize("device", DEVICES)
def test_other_backends_compile_too(device: str) -> None:
    def use(accelerator: VirtualAccelerator) -> float:
        # Dynamo makes this table of functions once, here before the fork. In a new process it is made on the device.
        TorchInGraphFunctionVariable._get_handlers.cache_clear()
        block, x = Block().to(accelerator.device()), torch.ones(5, 8, device=accelerator.device())
        with torch.no_grad():
            return float((torch.compile(block, backend="eager")(x) - block(x)).abs().max())

    assert run_forked(device, use) < 1e-6


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_one_graph_per_shape(device: str, backend: str) -> None:
    graphs, compiled, shapes, difference = run_forked(device, compile_two_shapes(backend))
    assert (graphs, compiled) == (2, 2)
    assert shapes == ["float32[6, 8]"]
    assert difference < 1e-6


@pytest.mark.parametrize(
    ("device", "backend", "variable", "value"),
    [
        ("neuron", "neuron", "TORCH_NEURONX_NEFF_CACHE_DIR", "{}"),
        ("hpu", "hpu_backend", "PT_HPU_RECIPE_CACHE_CONFIG", "{},false,1024,false"),
    ],
)
def test_second_process_uses_the_cache(
    device: str, backend: str, variable: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value.format(tmp_path / "cache"))
    assert run_forked(device, compile_two_shapes(backend))[:2] == (2, 2)
    assert run_forked(device, compile_two_shapes(backend))[:2] == (2, 0)
    assert len(list((tmp_path / "cache").glob("*.json"))) == 2


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the artifacts of two shapes."""
    folder: Path = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", str(folder))
        run_forked("neuron", compile_two_shapes("neuron"))
    return folder


@pytest.fixture
def cache(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = Path(shutil.copytree(compiled, tmp_path / "cache"))
    assert len(list(folder.glob("*.json"))) == 2
    monkeypatch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", str(folder))
    return folder


def test_artifact_of_another_version_is_rejected(cache: Path) -> None:
    for artifact in cache.glob("*.json"):
        content = json.loads(artifact.read_text())
        artifact.write_text(json.dumps(content | {"compiler": "0"}))
    with pytest.raises(
        Exception, match=r"was compiled with compiler version 0, but the current version is 1"
    ) as caught:
        run_forked("neuron", compile_two_shapes("neuron"))
    assert str(cache) in str(caught.value)
    assert VirtualDeviceError.__name__ in str(caught.value) or isinstance(caught.value, VirtualDeviceError)


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"graph": "other", "compiler": "1"}'])
def test_damaged_artifact_is_replaced(cache: Path, damage: str) -> None:
    for artifact in cache.glob("*.json"):
        artifact.write_text(damage)
    assert run_forked("neuron", compile_two_shapes("neuron"))[:2] == (2, 2)
    assert run_forked("neuron", compile_two_shapes("neuron"))[:2] == (2, 0)


def test_dynamic_shapes_are_rejected_according_to_the_sheet() -> None:
    def compile_dynamic(backend: str) -> Callable[[VirtualAccelerator], int]:
        def use(accelerator: VirtualAccelerator) -> int:
            device = accelerator.device()
            compiled = torch.compile(Block().to(device), backend=backend, dynamic=True)
            return len(compiled(torch.ones(5, 8).to(device)))

        return use

    with pytest.raises(LimitError, match="dynamic=True"):
        run_forked("neuron", compile_dynamic("neuron"))
    assert run_forked("hpu", compile_dynamic("hpu_backend")) == 2


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_graph_breaks_name_the_line_of_the_program(device: str, backend: str) -> None:
    def use(accelerator: VirtualAccelerator) -> list[tuple[str, int]]:
        device = accelerator.device()
        with torch.no_grad():
            torch.compile(Branching().to(device), backend=backend)(torch.ones(5, 8).to(device))
        return [(graph_break.file, graph_break.line) for graph_break in accelerator.compiler.breaks]

    breaks = run_forked(device, use)
    lines = Path(__file__).read_text().splitlines()
    assert [(Path(file).name, lines[line - 1].strip()) for file, line in breaks] == [
        (Path(__file__).name, "if hidden.sum() > 0:")
    ]


def test_ledger_counts_runs_of_a_graph_but_not_its_tracing() -> None:
    class UsesFloat64(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.arange(8, device=x.device, dtype=torch.float64).float()

    def use(accelerator: VirtualAccelerator) -> list[int]:
        device = accelerator.device()
        compiled = torch.compile(UsesFloat64().to(device), backend="neuron", fullgraph=True)
        counts = []
        for _ in range(2):
            compiled(torch.ones(5, 8).to(device))
            counts.append(sum(row.count for row in accelerator.ledger.rows("error")))
        return counts

    first, second = run_forked("neuron", use)
    assert first > 0
    assert second == 2 * first, "tracing added rows"
