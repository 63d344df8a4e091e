"""Graph capture: correct replays, no stale graphs, and eager mode if capture fails."""

import collections
import copy
import functools
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.hooks.hooks import HookRegistry
from diffusers.models.attention_processor import AttnProcessor2_0
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from anyaccel.backends.devices.cpu import CpuDriver
from anyaccel.backends.driver import Recorder
from anyaccel.forward_overrides import Slot, remove_override, set_override
from anyaccel.planning.decision import Decision
from anyaccel.planning.memory import MemoryRule
from anyaccel.recipes import recipes, run
from anyaccel.runtime.library_code import find_user_code_in_model
from anyaccel.runtime.module_fingerprint import LayerHooks, ModuleFingerprint
from anyaccel.runtime.pipeline import place
from anyaccel.runtime.placement import oom_retry
from anyaccel.runtime.placement.memory_plan import CallPlan
from anyaccel.runtime.speed.apply_speedups import _pause_gc
from anyaccel.runtime.speed.graph_capture import GraphCapture


class FakeGraphs:
    """Fake graph recorder; a replay runs the function again and copies the result into the captured buffers."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0
        self.spoil = 0.0
        self.fail = ""

    def __call__(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        self.recorded += 1
        result = function()
        # The mode of the capture, as in a real graph: a replay does not depend on the current inference mode.
        modes = torch.is_inference_mode_enabled()

        def replay() -> None:
            if self.fail:
                raise RuntimeError(self.fail)
            self.replayed += 1
            with torch.inference_mode(modes):
                output = function()
            for buffer, value in zip(_tensors(result), _tensors(output), strict=True):
                buffer.copy_(value * (1 + self.spoil))

        return result, replay


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@pytest.fixture
def unet() -> Any:
    pipe: Any = recipes()["stable-diffusion"].make()
    return pipe.unet


@pytest.fixture
def graphs() -> FakeGraphs:
    return FakeGraphs()


def make_inputs(seed: int, size: int = 8) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "sample": torch.randn(2, 4, size, size, generator=generator),
        "timestep": torch.tensor(float(seed)),
        "encoder_hidden_states": torch.randn(2, 7, 32, generator=generator),
    }


def capture(module: Any, record: Any, **options: Any) -> GraphCapture:
    override = GraphCapture(module, Recorder(record, **options), lambda: None)
    set_override(module, Slot.CAPTURE, override)
    override.begin_call()
    return override


@torch.no_grad()
def test_replays_use_their_inputs(unet: Any, graphs: FakeGraphs) -> None:
    expected = [unet(**make_inputs(seed)).sample for seed in range(6)]
    override = capture(unet, graphs)
    outputs = [unet(**make_inputs(seed)).sample for seed in range(6)]
    assert graphs.recorded == 1
    assert graphs.replayed >= 3
    for output, expected_output in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, expected_output)
    assert unet(**make_inputs(1, size=16), return_dict=False)[0].shape[-1] == 16
    assert "ms" in override.status
    remove_override(unet, Slot.CAPTURE)
    assert "forward" not in vars(unet)


@torch.no_grad()
def test_graphs_with_wrong_results_are_not_used(unet: Any, graphs: FakeGraphs) -> None:
    expected = [unet(**make_inputs(seed)).sample for seed in range(5)]
    graphs.spoil = 0.5
    override = capture(unet, graphs)
    for seed in range(5):
        torch.testing.assert_close(unet(**make_inputs(seed)).sample, expected[seed])
    assert graphs.recorded == 1
    assert "does not match the eager result" in override.status


@torch.no_grad()
def test_failed_capture_runs_eagerly(unet: Any) -> None:
    def fail(function: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    expected = unet(**make_inputs(3)).sample
    override = capture(unet, fail)
    for _ in range(4):
        torch.testing.assert_close(unet(**make_inputs(3)).sample, expected)
    assert "not permitted" in override.status


@torch.no_grad()
def test_failed_replay_runs_eagerly(unet: Any, graphs: FakeGraphs) -> None:
    override = capture(unet, graphs)
    expected, *_ = [unet(**make_inputs(0)).sample for _ in range(4)]
    assert override.captured_shapes == 1
    graphs.fail = "no such kernel"
    torch.testing.assert_close(unet(**make_inputs(0)).sample, expected)
    assert "no such kernel" in override.status
    assert not override.captured_shapes


@torch.no_grad()
def test_interrupted_capture_is_not_used(unet: Any) -> None:
    def interrupt(function: Any) -> Any:
        raise KeyboardInterrupt

    expected = unet(**make_inputs(0)).sample
    override = capture(unet, interrupt, warmup_runs=1)
    unet(**make_inputs(0))
    with pytest.raises(KeyboardInterrupt):
        unet(**make_inputs(0))
    assert not override.captured_shapes
    override.recorder = Recorder(FakeGraphs(), warmup_runs=1)
    torch.testing.assert_close(unet(**make_inputs(0)).sample, expected)


def replace_weight(unet: Any) -> None:
    unet.conv_in.weight = torch.nn.Parameter(unet.conv_in.weight * 2)


def repoint_weight(unet: Any) -> None:
    unet.conv_in.weight.data = unet.conv_in.weight.data * 2


def enable_free_u(unet: Any) -> None:
    unet.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)


def set_processor(unet: Any) -> None:
    unet.set_attn_processor(copy.copy(next(iter(unet.attn_processors.values()))))


def add_adapter(unet: Any) -> None:
    peft = pytest.importorskip("peft")
    unet.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))


@torch.no_grad()
@pytest.mark.parametrize("between_steps", [False, True], ids=["next call", "next step"])
@pytest.mark.parametrize("change", [replace_weight, repoint_weight, enable_free_u, set_processor, add_adapter])
def test_changed_models_are_captured_again(unet: Any, graphs: FakeGraphs, change: Any, between_steps: bool) -> None:
    override = capture(unet, graphs)
    for seed in range(4):
        unet(**make_inputs(seed))
    override.begin_call()
    assert override.captured_shapes == 1, "nothing changed"
    change(unet)
    if not between_steps:
        override.begin_call()
        assert not override.captured_shapes
    output = unet(**make_inputs(1)).sample
    assert not override.captured_shapes
    remove_override(unet, Slot.CAPTURE)
    assert torch.equal(output, unet(**make_inputs(1)).sample)


@torch.no_grad()
def test_changed_numeric_settings_drop_graphs(unet: Any, graphs: FakeGraphs) -> None:
    settings = ["tf32"]
    override = capture(unet, graphs, read_settings=lambda: list(settings))
    for seed in range(4):
        unet(**make_inputs(seed))
    assert override.captured_shapes == 1
    settings[0] = "ieee"
    unet(**make_inputs(1))
    assert not override.captured_shapes


@torch.no_grad()
def test_fingerprint_includes_the_adapter_scale(unet: Any) -> None:
    add_adapter(unet)
    before = ModuleFingerprint(unet)
    assert before.holds()
    unet.set_adapters("default", 0.5)
    assert not before.holds()


def test_hooks_of_other_libraries_are_detected(unet: Any) -> None:
    assert not LayerHooks(unet).has_foreign_forward()
    HookRegistry.check_if_exists_or_initialize(unet)  # as `cache_context` does
    assert not LayerHooks(unet).has_foreign_forward()
    unet.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)
    assert LayerHooks(unet).has_foreign_forward()


def test_calls_with_gradients_are_not_captured(unet: Any, graphs: FakeGraphs) -> None:
    capture(unet, graphs)
    for seed in range(4):
        assert unet(**make_inputs(seed)).sample.requires_grad
    assert not graphs.recorded


class DoubleLinear(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output * 2 if func is torch.nn.functional.linear else output


class DoubleConvolutions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output * 2 if func is torch.ops.aten.convolution.default else output


@torch.no_grad()
@pytest.mark.parametrize("mode", [DoubleLinear, DoubleConvolutions])
def test_calls_under_torch_modes_are_not_captured(unet: Any, graphs: FakeGraphs, mode: Any) -> None:
    plain = unet(**make_inputs(1)).sample
    with mode():
        expected = unet(**make_inputs(1)).sample
    override = capture(unet, graphs)
    with mode():
        for _ in range(4):
            assert torch.equal(unet(**make_inputs(1)).sample, expected)
    assert not graphs.recorded
    assert "mode" in override.status
    for _ in range(4):
        torch.testing.assert_close(unet(**make_inputs(1)).sample, plain)
    assert graphs.recorded
    with mode():
        assert torch.equal(unet(**make_inputs(1)).sample, expected)


@torch.no_grad()
def test_training_mode_is_not_captured(unet: Any, graphs: FakeGraphs) -> None:
    capture(unet.train(), graphs)
    for seed in range(4):
        unet(**make_inputs(seed))
    assert not graphs.recorded


@torch.no_grad()
@pytest.mark.parametrize("everywhere", [True, False], ids=["global", "on a layer"])
def test_hooks_run_and_are_not_captured(unet: Any, graphs: FakeGraphs, everywhere: bool) -> None:
    capture(unet, graphs)
    for seed in range(4):
        unet(**make_inputs(seed))
    calls: list[int] = []

    def count(*args: Any) -> None:
        calls.append(1)

    register = (
        torch.nn.modules.module.register_module_forward_hook if everywhere else unet.mid_block.register_forward_hook
    )
    handle = register(count)
    try:
        unet(**make_inputs(1))
    finally:
        handle.remove()
    assert len(calls) > 50 if everywhere else len(calls) == 1


def test_captured_pipeline_generates_the_same_image(graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipes()["stable-diffusion-xl"]
    expected = run(recipe, recipe.make())
    monkeypatch.setattr(CpuDriver, "recorder", lambda self, index: Recorder(graphs))
    pipe = place(recipe.make(), "cpu", dtype="float32", capture=True)
    for _ in range(2):
        assert abs(run(recipe, pipe) - expected).max() < 1e-5
    assert graphs.replayed
    assert pipe.plan.report.capture.value
    assert "ms" in pipe.plan.report.capture.reason
    pipe.to("cpu", capture=False)
    replayed = graphs.replayed
    assert abs(run(recipe, pipe) - expected).max() < 1e-5
    assert graphs.replayed == replayed


def test_sizes_that_do_not_fit_are_not_captured(graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipes()["stable-diffusion"]
    monkeypatch.setattr(CpuDriver, "recorder", lambda self, index: Recorder(graphs))
    pipe = place(recipe.make(), "cpu", dtype="float32", capture=True)
    pipe(**{**recipe.call(), "num_inference_steps": 4})
    recorded = graphs.recorded
    assert recorded
    forecast: Any = SimpleNamespace(recorded_peak_bytes=2, capacity_bytes=1)
    monkeypatch.setattr(oom_retry, "plan_call", lambda *args: CallPlan(Decision(MemoryRule(), "a test"), forecast))
    pipe(**{**recipe.call(), "num_inference_steps": 4, "height": 32, "width": 32})
    assert graphs.recorded == recorded
    assert not pipe.plan.report.capture.value
    assert "at this size" in pipe.plan.report.capture.reason


@torch.no_grad()
def test_released_module_frees_its_weights_immediately(graphs: FakeGraphs) -> None:
    module: Any = torch.nn.Linear(2, 2)
    capture(module, graphs)
    weight = weakref.ref(module.weight)
    gc.collect()
    gc.disable()
    try:
        del module
        assert weight() is None
    finally:
        gc.enable()


@dataclass
class Hidden:
    image: torch.Tensor


@torch.no_grad()
def test_outputs_with_hidden_tensors_are_not_captured(graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    class HidesOutput(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> Hidden:
            return Hidden(image * 2)

    monkeypatch.setattr("anyaccel.runtime.speed.graph_capture.find_user_code_in_model", lambda module: "")
    model = HidesOutput().eval()
    override = capture(model, graphs)
    for number in range(4):
        assert model(torch.full((2,), float(number))).image[0] == 2 * number
    assert "the type Hidden, which may contain tensors" in override.status


class StoresOutput(torch.nn.Module):
    """Writes its output to a list argument, like the decoders of video models."""

    def forward(self, image: torch.Tensor, earlier: list[Any]) -> torch.Tensor:
        output = image * 2 if earlier[0] is None else image + earlier[0]
        earlier[0] = output
        return output


@torch.no_grad()
def test_models_that_modify_arguments_are_not_captured(graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyaccel.runtime.speed.graph_capture.find_user_code_in_model", lambda module: "")
    model, image = StoresOutput().eval(), torch.ones(4, 4)
    override = capture(model, graphs)
    for _ in range(4):
        earlier: list[Any] = [None]
        for number in range(5):
            assert torch.equal(model(image, earlier), image * (number + 2))
    assert not override.captured_shapes
    assert "modifies its arguments" in override.status


@torch.no_grad()
def test_threads_do_not_mix_their_inputs(unet: Any, graphs: FakeGraphs) -> None:
    expected = [unet(**make_inputs(seed)).sample for seed in range(8)]
    override = capture(unet, graphs)

    @torch.no_grad()
    def call(seed: int) -> bool:
        return all(torch.allclose(unet(**make_inputs(seed)).sample, expected[seed], atol=1e-5) for _ in range(5))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(8)))
    assert override.captured_shapes == 1


@pytest.mark.parametrize("before", [True, False])
def test_garbage_collector_is_restored_after_compilation(before: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with _pause_gc(True):
            assert not gc.isenabled()
            assert not torch._dynamo.config.run_gc_after_compile
        assert gc.isenabled() is before
        with pytest.raises(ZeroDivisionError), _pause_gc(True):
            1 / 0  # noqa: B018
        assert gc.isenabled() is before
        with _pause_gc(False):
            assert gc.isenabled() is before
    finally:
        (gc.enable if was_enabled else gc.disable)()


class CallsItself(torch.nn.Module):
    """Splits its input until one row is left."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        if len(image) == 1:
            return image * 2
        return torch.cat([self(image[:1]), self(image[1:])])


@torch.no_grad()
@pytest.mark.parametrize("make", [CallsItself, functools.partial(torch.nn.LSTM, 4, 4)], ids=["calls itself", "LSTM"])
def test_recursive_and_recurrent_models_run(make: Any, graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyaccel.runtime.speed.graph_capture.find_user_code_in_model", lambda module: "")
    model = make().eval()
    args = [torch.full((3, 4), float(number)) for number in range(4)]
    expected = [_tensors(model(item)) for item in args]
    capture(model, graphs)
    for item, expected_output in zip(args, expected, strict=True):
        torch.testing.assert_close(_tensors(model(item)), expected_output)


class CountingProcessor(AttnProcessor2_0):
    """A user's processor with state."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gain, self.seen = torch.ones(1), collections.Counter[str]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.seen["calls"] += 1
        return super().__call__(*args, **kwargs) * self.gain


@torch.no_grad()
def test_user_code_runs_at_every_call(unet: Any, graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    override = capture(unet, graphs)
    for seed in range(4):
        unet(**make_inputs(seed))
    processor = CountingProcessor()
    unet.set_attn_processor(processor)
    unet(**make_inputs(0))  # discards the output of a replay; the replays of `FakeGraphs` run Python code
    replayed = graphs.replayed
    processor.seen.clear()
    for seed in range(4):
        unet(**make_inputs(seed))
    counted = processor.seen["calls"]
    unet(**make_inputs(0))
    assert processor.seen["calls"] == counted * 5 // 4
    assert (graphs.replayed, "CountingProcessor" in override.status) == (replayed, True)
    unet.set_attn_processor(AttnProcessor2_0())  # type: ignore[no-untyped-call]
    override.begin_call()
    for seed in range(4):
        unet(**make_inputs(seed))
    assert graphs.replayed > replayed


def test_custom_code_is_found_despite_wraps(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_user_code_in_model(unet) == ""
    before = ModuleFingerprint(unet)
    plain = type(unet.mid_block).forward

    @functools.wraps(plain)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    monkeypatch.setattr(type(unet.mid_block), "forward", patched)
    assert "forward" in find_user_code_in_model(unet)
    assert not before.holds()
    monkeypatch.undo()
    assert before.holds()
    monkeypatch.setattr("diffusers.models.attention_processor.Attention.prepare_attention_mask", patched)
    assert not before.holds()
    monkeypatch.undo()
    for owner, name in ((torch.nn.functional, "group_norm"), (torch, "cat"), (torch.Tensor, "chunk")):
        monkeypatch.setattr(owner, name, patched)
        assert not before.holds(), name
        monkeypatch.undo()
        assert before.holds(), name
    unet.conv_in._conv_forward = lambda *args: type(unet.conv_in)._conv_forward(unet.conv_in, *args)
    assert "a replaced _conv_forward" in find_user_code_in_model(unet)


def change_tensor(model: Any) -> None:
    model.attention.processor.gain = torch.ones(1)


def change_list(model: Any) -> None:
    model.attention.processor.tensors[0] = torch.ones(1)


def append_to_list(model: Any) -> None:
    model.attention.processor.tensors.append(1)


def change_hook(model: Any) -> None:
    model.attention.register_forward_hook(lambda *args: None)


def change_forward(model: Any) -> None:
    model.attention.forward = lambda *args: args


def transpose_weight(model: Any) -> None:
    model.attention.weight.data = model.attention.weight.data.t()


def add_layer(model: Any) -> None:
    model.another = torch.nn.Linear(2, 2)


def add_attribute(model: Any) -> None:
    model.attention.another = 1


def add_buffer(model: Any) -> None:
    model.attention.register_buffer("table", torch.ones(1))


class LinearSubclass(torch.nn.Linear):
    """A subclass that adds nothing."""


def replace_class(model: Any) -> None:
    model.attention.__class__ = LinearSubclass


CHANGES = [
    replace_class, change_tensor, change_list, append_to_list, change_hook, change_forward, transpose_weight, add_layer,
    add_attribute, add_buffer,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_fingerprint_detects_changes(change: Callable[[Any], None]) -> None:
    model: Any = torch.nn.Module()
    model.attention = torch.nn.Linear(4, 4)
    model.attention.processor = CountingProcessor()
    model.attention.processor.tensors = [torch.ones(1)]
    before = ModuleFingerprint(model)
    assert before.holds()
    change(model)
    assert not before.holds()
