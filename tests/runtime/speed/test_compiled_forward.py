"""Compiled forwards: fallback to eager mode, and changes after compilation."""

import functools
import gc
import importlib.util
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from peft import LoraConfig, inject_adapter_in_model

import anyaccel
from anyaccel.backends.devices.cpu import CpuDriver
from anyaccel.backends.driver import Recorder
from anyaccel.forward_overrides import Slot, get_override
from anyaccel.recipes import recipes, run
from anyaccel.runtime.module_fingerprint import is_in_training
from anyaccel.runtime.placement_state import find_placement
from anyaccel.runtime.speed import apply_speedups
from anyaccel.runtime.speed import compile as compile_module
from anyaccel.runtime.speed.apply_speedups import remove_speedups
from anyaccel.runtime.speed.compiled_forward import CompiledForward, compile_blocks, compile_forward, find_compiled
from anyaccel.runtime.speed.float8 import Float8Linear
from tests.conftest import NEEDS_RECIPES
from tests.runtime.speed.small_pipelines import Blocks, make_small

pytestmark = NEEDS_RECIPES


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.dropout = torch.nn.Dropout(0.5)
        self.eval()

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.dropout(self.layer(sample).relu())
        return output


def fail(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("this backend compiles nothing")


@pytest.fixture(scope="module", autouse=True)
def own_compiled_code() -> Iterator[None]:
    """Share compiled code between these tests, because tracing a UNet takes seconds, but not with other files."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def use_backend(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    monkeypatch.setattr(compile_module, "_find_backend", lambda *args, **options: backend)


def find_maker(name: str) -> Callable[[], Any]:
    """Return a function that makes the pipeline of a recipe, with a small UNet if it has one."""
    return make_small if name == "stable-diffusion" else recipes()[name].make


# test_report_contains_a_repeated_failure runs the UNet eagerly.
@pytest.mark.long
@pytest.mark.parametrize("name", ["wan", pytest.param("stable-diffusion", marks=pytest.mark.slow)])
def test_pipeline_runs_eagerly_if_compilation_fails(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_backend(monkeypatch, fail)
    recipe, make = recipes()[name], find_maker(name)
    expected = run(recipe, make())
    pipe: Any = anyaccel.place(make(), "cpu", dtype="float32", compile=True)
    for _ in range(2):
        numpy.testing.assert_array_equal(run(recipe, pipe), expected)
    report = pipe.plan.report
    assert report.compiled_models.value == ()
    assert {"unet", "transformer"} & set(report.not_compiled.value)
    assert "this backend compiles nothing" in report.not_compiled.reason
    assert "not_compiled" in str(pipe.plan)
    assert sum("running it eagerly" in record.message for record in caplog.records) == len(report.not_compiled.value)


@pytest.mark.long
@pytest.mark.parametrize("name", ["wan", "stable-diffusion"])
def test_channels_last_applies_to_2d_convolutions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(monkeypatch, "eager")
    recipe, make = recipes()[name], find_maker(name)
    expected = run(recipe, make())
    pipe: Any = anyaccel.place(make(), "cpu", dtype="float32", compile=True, channels_last=True)
    numpy.testing.assert_allclose(run(recipe, pipe), expected, atol=1e-4)
    assert pipe.plan.report.not_compiled is None
    assert pipe.plan.report.compiled_models.value
    # Not in models with 3-D convolutions, and not in the encoder, which is not compiled.
    is_image = name == "stable-diffusion"
    for module, is_converted in ((pipe.vae.decoder, is_image), (pipe.vae.encoder, False)):
        weights = [layer.weight for layer in module.modules() if isinstance(layer, torch.nn.Conv2d)]
        weights = [weight for weight in weights if weight[0, 0].numel() > 1]
        assert {weight.is_contiguous(memory_format=torch.channels_last) for weight in weights} == {is_converted}


def test_errors_of_the_model_are_raised() -> None:
    model = Model()
    compile_forward(model, "model", {"backend": "eager"})
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 5))
    assert model(torch.ones(2, 3)).shape == (2, 3)


def test_out_of_memory_is_not_a_compiler_failure() -> None:
    model = Model()
    compile_forward(model, "model", {"backend": "eager"})
    compiled = find_compiled(model)
    assert isinstance(compiled, CompiledForward)

    def run_out(*args: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    compiled._compiled = run_out
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        model(torch.ones(2, 3))
    assert compiled.failure == ""


@torch.no_grad()
def test_hooks_added_after_compilation_run() -> None:
    model, calls = Model(), []
    compile_forward(model, "model", {"backend": "eager"})
    expected = model(torch.ones(2, 3))
    handle = model.layer.register_forward_hook(lambda *args: calls.append(1))
    assert torch.equal(model(torch.ones(2, 3)), expected)
    assert calls == [1]
    handle.remove()
    compiled = find_compiled(model)
    assert compiled is not None
    assert compiled.failure == "", "compiled code must be used again"


@torch.no_grad()
def test_code_patched_after_compilation_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    compile_forward(model, "model", {"backend": "eager"})
    model(torch.ones(2, 3))
    compiled = find_compiled(model)
    assert compiled is not None
    model(torch.ones(2, 3))
    assert compiled.failure == "", "compilation itself does not count as a patch"
    plain = torch.nn.Linear.forward

    @functools.wraps(plain)
    def patched(self: Any, sample: torch.Tensor) -> torch.Tensor:
        return plain(self, sample) + 100

    monkeypatch.setattr(torch.nn.Linear, "forward", patched)
    assert model(torch.ones(2, 3)).min() > 50
    assert "patched" in compiled.failure


@torch.no_grad()
def test_code_patched_during_a_call_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    compile_forward(model, "model", {"backend": "eager"})
    compiled = find_compiled(model)
    assert compiled is not None
    with compiled.in_call(), compiled.in_call(has_callback=True):
        model(torch.ones(2, 3))
        assert compiled.failure == ""
        monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, sample: sample + 100)
        assert model(torch.ones(2, 3)).min() > 50
    assert "patched" in compiled.failure


@torch.no_grad()
def test_the_code_is_checked_once_in_a_call_without_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    compile_forward(model, "model", {"backend": "eager"})
    compiled = find_compiled(model)
    assert compiled is not None
    checks: list[Any] = []
    monkeypatch.setattr(compiled, "_check", checks.append)
    with compiled.in_call():
        model(torch.ones(2, 3))
        model(torch.ones(2, 3))
    assert len(checks) == 1
    model(torch.ones(2, 3))
    assert len(checks) == 2


class StopError(Exception):
    """Ends a call from inside a model."""


class StoppingProcessor(AttnProcessor2_0):
    """An attention processor of the user that ends the call at the second attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.means: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = super().__call__(*args, **kwargs)
        self.means.append(float(output.mean()))
        if len(self.means) == 2:
            raise StopError
        return output


def test_an_error_of_the_user_does_not_run_the_model_again() -> None:
    recipe = recipes()["stable-diffusion"]

    def count(pipe: Any) -> int:
        processor = StoppingProcessor()
        pipe.unet.set_attn_processor(processor)
        with pytest.raises(StopError):
            pipe(**recipe.call())
        return len(processor.means)

    placed = anyaccel.place(make_small(), "cpu", dtype="float32", compile=False)
    compile_forward(placed.unet, "unet", {"backend": "eager"})
    assert count(placed) == count(make_small()) == 2
    compiled = find_compiled(placed.unet)
    assert compiled is not None
    assert not compiled.failure


def test_a_callback_can_patch_functions_of_a_compiled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipes()["stable-diffusion"]
    silu = torch.nn.functional.silu

    def patch(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        monkeypatch.setattr(torch.nn.functional, "silu", lambda x, inplace=False: silu(x) * 0.7)
        return {}

    def call(pipe: Any) -> Any:
        try:
            return pipe(**recipe.call(), callback_on_step_end=patch).images
        finally:
            monkeypatch.undo()

    expected = call(make_small())
    placed = anyaccel.place(make_small(), "cpu", dtype="float32", compile=False)
    compile_forward(placed.unet, "unet", {"backend": "eager"})
    assert numpy.abs(call(placed) - expected).max() < 1e-4


@torch.no_grad()
def test_patched_torch_function_runs_until_it_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubles(torch.nn.Module):
        def forward(self, sample: torch.Tensor) -> torch.Tensor:
            return torch.cat([sample, sample])

    model, plain = Doubles(), torch.cat
    compile_forward(model, "model", {"backend": "eager"})
    model(torch.ones(2, 3))
    compiled = find_compiled(model)
    assert compiled is not None
    monkeypatch.setattr(torch, "cat", lambda *args: plain(*args) * 2)
    assert model(torch.ones(2, 3)).max() == 2
    monkeypatch.undo()
    assert model(torch.ones(2, 3)).max() == 1
    assert not compiled.failure


def test_hooks_of_other_libraries_added_after_compilation_run(monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(monkeypatch, "eager")
    recipe = recipes()["stable-diffusion"]
    pipe: Any = anyaccel.place(make_small(), "cpu", dtype="float32", compile=True)
    run(recipe, pipe)
    assert get_override(pipe.unet, Slot.COMPILE) is not None
    stock: Any = make_small()
    for model in (stock.unet, pipe.unet):
        model.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)
    numpy.testing.assert_array_equal(run(recipe, pipe), run(recipe, stock))
    assert "another library" in pipe.plan.report.not_compiled.reason


@pytest.mark.parametrize("when", ["before", "after"])
def test_forward_replaced_by_the_user_runs(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    use_backend(monkeypatch, "eager")
    recipe = recipes()["stable-diffusion"]
    stock: Any = make_small()
    mask = (torch.arange(77).expand(2, 77) < 3).float()
    stock.unet.forward = functools.partial(stock.unet.forward, encoder_attention_mask=mask)
    expected = run(recipe, stock)
    assert numpy.abs(expected - run(recipe, make_small())).max() > 1e-3
    plain: Any = make_small()
    if when == "before":
        plain.unet.forward = functools.partial(plain.unet.forward, encoder_attention_mask=mask)
    pipe: Any = anyaccel.place(plain, "cpu", dtype="float32", compile=True)
    if when == "after":
        run(recipe, pipe)
        pipe.unet.forward = functools.partial(pipe.unet.forward, encoder_attention_mask=mask)
    numpy.testing.assert_allclose(run(recipe, pipe), expected, atol=1e-5)


@pytest.mark.parametrize("when", ["before", "after"])
def test_forward_of_another_placed_model_runs(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    use_backend(monkeypatch, "eager")
    recipe = recipes()["stable-diffusion"]
    pipe, other = (anyaccel.place(make_small(), "cpu", dtype="float32", compile=True) for _ in range(2))
    with torch.no_grad():
        other.unet.conv_out.weight.mul_(1.5)
    expected = run(recipe, other)
    if when == "after":
        assert numpy.abs(expected - run(recipe, pipe)).max() > 1e-3
    pipe.unet.forward = other.unet.forward
    numpy.testing.assert_allclose(run(recipe, pipe), expected, atol=1e-5)


def test_class_replaced_after_compilation_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(monkeypatch, "eager")
    recipe = recipes()["stable-diffusion"]
    stock: Any = make_small()
    pipe: Any = anyaccel.place(make_small(), "cpu", dtype="float32", compile=True)
    run(recipe, pipe)
    for pipeline in (pipe, stock):
        unet_class: Any = type(pipeline.unet)

        def forward(self: Any, sample: Any, *args: Any, unet_class: Any = unet_class, **kwargs: Any) -> Any:
            return unet_class.forward(self, sample * 0.5, *args, **kwargs)

        pipeline.unet.__class__ = type(unet_class.__name__, (unet_class,), {"forward": forward})
    numpy.testing.assert_allclose(run(recipe, pipe), run(recipe, stock), atol=1e-5)


def test_report_drops_removed_compiled_models(monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(monkeypatch, "eager")
    recipe = recipes()["stable-diffusion"]
    pipe: Any = anyaccel.place(make_small(), "cpu", dtype="float32", compile=True)
    run(recipe, pipe)
    assert pipe.plan.report.compiled_models.value
    pipe.to("cpu", compile=False)
    assert pipe.plan.report.compiled_models is None


def test_model_errors_keep_compiled_blocks() -> None:
    model = Blocks(Model())
    compile_blocks(model, "model", {"backend": "eager"})
    compiled_block = model.block._compiled_call_impl
    assert compiled_block is not None
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 5))
    assert model.block._compiled_call_impl is compiled_block
    compiled = find_compiled(model)
    assert compiled is not None
    assert compiled.failure == ""


def test_blocks_that_fail_to_compile_run_eagerly() -> None:
    torch._dynamo.reset()
    model = Blocks(Model())
    compile_blocks(model, "model", {"backend": fail})
    with torch.no_grad():
        assert model(torch.ones(2, 3)).shape == (2, 3)
    assert model.block._compiled_call_impl is None
    compiled = find_compiled(model)
    assert compiled is not None
    assert "compiles nothing" in compiled.failure


@torch.no_grad()
def test_library_of_a_killed_compiler_is_compiled_again(tmp_path: Path) -> None:
    library, calls = tmp_path / f"c{'a' * 51}.main.so", []
    library.touch()

    def compile_graph(graph: Any, inputs: Any) -> Any:
        calls.append(1)
        if library.exists():  # as Inductor does
            spec = importlib.util.spec_from_file_location("library", library)
            assert spec is not None
            importlib.util.module_from_spec(spec)
        return graph.forward

    torch._dynamo.reset()
    model = Model()
    compile_forward(model, "model", {"backend": compile_graph})
    assert model(torch.ones(2, 3)).shape == (2, 3)
    compiled = find_compiled(model)
    assert compiled is not None
    assert (compiled.failure, len(calls), library.exists()) == ("", 2, False)


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
def test_released_model_frees_its_weights_immediately() -> None:
    model = Model()
    compile_forward(model, "model", {"backend": "eager"})
    weight = weakref.ref(model.layer.weight)
    del model
    assert weight() is None


@pytest.mark.long
def test_report_contains_a_repeated_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(monkeypatch, fail)
    recipe = recipes()["stable-diffusion"]
    pipe: Any = anyaccel.place(make_small(), "cpu", dtype="float32", compile=True)
    run(recipe, pipe)
    assert "unet" in pipe.plan.report.not_compiled.value
    remove_speedups(pipe, find_placement(pipe))
    assert not pipe.plan.report.not_compiled
    run(recipe, pipe)
    assert "unet" in pipe.plan.report.not_compiled.value
    assert "unet" not in pipe.plan.report.compiled_models.value


def test_models_recompile_after_another_pipeline_removed_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(monkeypatch, "eager")
    recipe = recipes()["stable-diffusion"]
    pipe: Any = anyaccel.place(make_small(), "cpu", dtype="float32", compile=True)
    run(recipe, pipe)
    sibling: Any = anyaccel.DiffusionPipeline.from_pipe(pipe)
    sibling.to("cpu", dtype="float32", compile=False)
    assert find_compiled(pipe.unet) is None
    run(recipe, pipe)
    assert find_compiled(pipe.unet) is not None
    assert "unet" in pipe.plan.report.compiled_models.value


@pytest.mark.long
def test_no_compilation_when_attention_is_sliced_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(monkeypatch, "eager")
    recipe = recipes()["stable-diffusion"]
    pipe: Any = anyaccel.place(make_small(), "cpu", dtype="float32", compile=True)
    run(recipe, pipe)
    placement = find_placement(pipe)
    assert placement is not None
    assert placement.speed is not None
    unsliced, sliced = (
        placement.plan,
        anyaccel.place(make_small(), "cpu", dtype="float32", attention_slicing="max").plan,
    )
    placement.call_plan = sliced
    apply_speedups._compile(pipe, placement, placement.speed)
    assert find_compiled(pipe.unet) is None
    assert "attention is sliced" in pipe.plan.report.not_compiled.reason
    placement.call_plan = unsliced
    apply_speedups._compile(pipe, placement, placement.speed)
    assert find_compiled(pipe.unet) is not None
    assert pipe.plan.report.not_compiled is None


@pytest.mark.long
def test_interrupted_calls_are_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(monkeypatch, "eager")
    saved: list[Any] = []
    monkeypatch.setattr(apply_speedups, "load_payload", lambda key: None)
    monkeypatch.setattr(apply_speedups, "save_compiled", lambda *args: saved.append(args))
    recipe = recipes()["stable-diffusion"]
    pipe: Any = anyaccel.place(make_small(), "cpu", dtype="float32", compile=True)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    hook = pipe.unet.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(recipe, pipe)
    hook.remove()
    assert not saved
    for _ in range(2):
        run(recipe, pipe)
    assert len(saved) == 1


@pytest.mark.long
@pytest.mark.parametrize("options", [{"speed": "fast"}, {"compile": True}, {"capture": True}])
def test_removed_denoisers_are_skipped(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(monkeypatch, "eager")
    monkeypatch.setattr(CpuDriver, "recorder", lambda self, index: Recorder(lambda function: (function(), function)))
    recipe = recipes()["wan-two-experts"]
    stock: Any = recipe.make()
    pipe: Any = anyaccel.place(recipe.make(), "cpu", dtype="float32", **options)
    for pipeline in (stock, pipe):
        pipeline.transformer_2 = None
        pipeline.register_to_config(boundary_ratio=None)
    expected = run(recipe, stock)
    assert run(recipe, pipe).shape == expected.shape
    pipe.to("cpu", compile=False)


def count_compiled_runs(model: torch.nn.Module, *changes: Callable[[], Any]) -> int:
    """Return how often a compiled model runs compiled, if it runs once after each of the changes."""

    def run_compiled(module: Any, sample: torch.Tensor) -> Any:
        calls.append(sample)
        return type(module).forward(module, sample)

    calls: list[torch.Tensor] = []
    compiled = CompiledForward(model, "unet", run_compiled)
    forward = functools.partial(type(model).forward, model)
    with torch.no_grad():
        for change in changes:
            change()
            compiled(forward, (torch.ones(2, 3),), {})
    return len(calls)


def test_training_mode_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    model = Model().eval()
    assert count_compiled_runs(model, model.eval, model.dropout.train, model.train, model.eval) == 2
    assert caplog.messages == ["anyaccel: unet runs eagerly while it is in training mode"]


def test_new_layers_run_compiled() -> None:
    model = Model().eval()

    def add_adapter() -> None:
        # Layers that are in training mode, as all new ones.
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["layer"]), model)

    assert count_compiled_runs(model, model.eval, add_adapter) == 2
    assert is_in_training(
        inject_adapter_in_model(LoraConfig(target_modules=["layer"], lora_dropout=0.1), Model().eval())
    )
    assert not Float8Linear(torch.nn.Linear(3, 3).eval()).training


def test_weights_that_share_memory_keep_their_format() -> None:
    first, second = torch.nn.Conv2d(4, 4, 3), torch.nn.Conv2d(4, 4, 3)
    shared = first.state_dict()
    with torch.inference_mode():
        compile_module._convert_to_channels_last(torch.nn.Sequential(first, second))
    weights = first.weight, second.weight
    assert [weight.is_contiguous(memory_format=torch.channels_last) for weight in weights] == [False, True]
    shared["weight"].zero_()
    assert not first.weight.detach().any()
    assert not any(weight.is_inference() for weight in weights), "weights created in inference mode cannot be trained"
