"""Changes after a graph was captured, on the CPU, with graphs that replay operations without Python code."""

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from anyaccel.backends import cuda_graphs
from anyaccel.backends.devices.cpu import CpuDriver
from anyaccel.backends.driver import Recorder
from anyaccel.forward_overrides import Slot, set_override
from anyaccel.recipes import recipes
from anyaccel.runtime.module_fingerprint import ModuleFingerprint, PatchedCode
from anyaccel.runtime.speed import graph_capture
from anyaccel.runtime.speed.compiled_forward import compile_blocks, compile_forward, find_compiled
from anyaccel.runtime.speed.graph_capture import GraphCapture
from tests.conftest import NEEDS_RECIPES
from tests.hardware import invalidation_checks
from tests.hardware.invalidation_cases import CASES
from tests.runtime.speed.dispatch_graphs import DispatchGraphs
from tests.runtime.speed.small_pipelines import Blocks

pytestmark = [NEEDS_RECIPES, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]

CHECKS = [
    invalidation_checks.check_option_changes,
    invalidation_checks.check_shared_denoiser,
    invalidation_checks.check_direct_calls,
    invalidation_checks.check_denoiser_on_the_cpu,
]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> DispatchGraphs:
    graphs = DispatchGraphs()
    recorder = Recorder(graphs, read_settings=cuda_graphs._read_settings)
    monkeypatch.setattr(CpuDriver, "recorder", lambda self, index: recorder)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # a case sets it to the default, True
    return graphs


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["attention_backend_context", "freeu_with_a_patched_helper", "dropout_in_one_layer", "weight_data_replaced"]
)
def test_placed_pipeline_follows_a_change(name: str, graphs: DispatchGraphs) -> None:
    invalidation_checks.check_change(name, "cpu", compile=False)
    assert graphs.replayed


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_placed_pipeline_follows_every_change(name: str, graphs: DispatchGraphs) -> None:
    invalidation_checks.check_change(name, "cpu", compile=False)
    assert graphs.replayed


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_calls_of_a_captured_model(check: Any, graphs: DispatchGraphs) -> None:
    check("cpu")
    assert graphs.replayed


def test_new_tf32_settings_are_read() -> None:
    matmul: Any = torch.backends.cuda.matmul
    if not hasattr(torch.backends.cudnn, "conv"):
        pytest.skip("torch before 2.9 has no fp32_precision")
    before, precision = cuda_graphs._read_settings(), matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        assert cuda_graphs._read_settings() != before
    finally:
        matmul.fp32_precision = precision
    assert cuda_graphs._read_settings() == before


class Model(torch.nn.Module):
    """A linear layer after a function that a test chooses."""

    def __init__(self, function: Any = torch.relu) -> None:
        super().__init__()
        self.layer, self.function = torch.nn.Linear(4, 4), function
        self.eval()

    def forward(self, sample: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        output: torch.Tensor = self.layer(self.function(sample) if other is None else self.function(sample, other))
        return output


def capture(model: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> GraphCapture:
    """Set a graph capture on a model of this file, whose code would not be captured otherwise."""
    monkeypatch.setattr(graph_capture, "find_user_code_in_model", lambda module: "")
    override = GraphCapture(model, Recorder(DispatchGraphs(), **options), lambda: None)
    set_override(model, Slot.CAPTURE, override)
    override.begin_call()
    return override


@torch.no_grad()
def test_weights_and_arguments_on_another_device_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    override = capture(model, monkeypatch, device_type="cuda")
    for number in range(5):
        model(torch.full((2, 4), float(number)))
    assert not override.captured_shapes
    assert "another device" in override.status
    monkeypatch.setattr(override, "_obstacle", "")
    for number in range(5):
        model(torch.full((2, 4), float(number)))
    assert not override.captured_shapes, "the argument is on the CPU"


@torch.no_grad()
def test_argument_that_is_passed_twice_is_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(lambda sample, other: sample * 2 if sample is other else sample + other)
    override = capture(model, monkeypatch)
    plain = Model.forward
    for number in range(6):
        sample = torch.full((2, 4), float(number))
        torch.testing.assert_close(model(sample, sample * 3), plain(model, sample, sample * 3))
        torch.testing.assert_close(model(sample, sample), plain(model, sample, sample))
    assert override.captured_shapes == 2


@torch.no_grad()
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (torch.rand_like, "draws random numbers"),
        (lambda sample: torch.nn.functional.dropout(sample, training=True), "draws random numbers"),
        (lambda sample: sample.mul_(2), "modifies its arguments"),
    ],
    ids=["random", "dropout", "in place"],
)
def test_models_with_side_effects_are_not_captured(function: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(function)
    samples = [torch.full((2, 4), float(number)) for number in range(1, 6)]
    torch.manual_seed(0)
    expected = [(model(sample), sample) for sample in [sample.clone() for sample in samples]]
    override = capture(model, monkeypatch)
    torch.manual_seed(0)
    actual = [(model(sample), sample) for sample in [sample.clone() for sample in samples]]
    torch.testing.assert_close(actual, expected)
    assert reason in override.status


@torch.no_grad()
def test_not_a_number_in_an_argument_does_not_count_as_modified(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    override = capture(model, monkeypatch)
    for _ in range(4):
        model(torch.full((2, 4), float("nan")))
    assert override.captured_shapes == 1


@torch.no_grad()
def test_models_that_read_a_value_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(lambda sample: sample if sample.sum() > 3 else sample * 2)
    override = capture(model, monkeypatch)
    for number in range(6):
        sample = torch.full((2, 4), 0.25 * number)
        torch.testing.assert_close(model(sample), Model.forward(model, sample))
    assert "not permitted" in override.status


@torch.no_grad()
def test_cpu_scalar_that_is_edited_in_place_is_noticed() -> None:
    model: Any = Model()
    model.gain = torch.tensor(2.0)
    before = ModuleFingerprint(model)
    assert before.holds()
    model.gain.fill_(3.0)
    assert not before.holds()


@torch.no_grad()
def test_plain_tensor_that_is_repointed_is_noticed() -> None:
    model: Any = Model()
    model.table = torch.ones(3)
    before = ModuleFingerprint(model)
    model.table.data = torch.ones(3) * 2
    assert not before.holds()


def test_replaced_constants_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    unet: Any = recipes()["stable-diffusion"].make()
    before, code = ModuleFingerprint(unet.unet), PatchedCode(unet.unet)
    monkeypatch.setattr("diffusers.models.attention_processor.F", torch.nn)
    assert not before.holds()
    assert not code.changed(), "Dynamo guards constants"
    monkeypatch.undo()
    assert before.holds()
    monkeypatch.setattr("diffusers.utils.torch_utils.fourier_filter", lambda *args: None)
    assert not before.holds()
    assert code.changed()


@torch.no_grad()
def test_default_device_is_part_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    override = capture(model, monkeypatch)
    with torch.device("cpu"):
        for number in range(5):
            model(torch.full((2, 4), float(number)))
        assert override.captured_shapes == 1
    model(torch.ones(2, 4))
    assert not override.captured_shapes


class PlainFunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class PlainDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("mode", [PlainFunctionMode, PlainDispatchMode])
@pytest.mark.parametrize("compile_model", [compile_forward, compile_blocks])
def test_compiled_models_run_eagerly_under_modes(compile_model: Any, mode: Any) -> None:
    runs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run_graph(*args: Any) -> Any:
            runs.append(1)
            return graph.forward(*args)

        return run_graph

    torch._dynamo.reset()
    model = Blocks(Model())
    compile_model(model, "model", {"backend": backend})
    for _ in range(2):
        model(torch.ones(2, 4))
    assert len(runs) == 2
    with mode():
        model(torch.ones(2, 4))
    assert len(runs) == 2
    model(torch.ones(2, 4))
    assert len(runs) == 3
    compiled = find_compiled(model)
    assert compiled is not None
    assert not compiled.failure
