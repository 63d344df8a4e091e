"""The option `weights=`, which quantizes a loaded pipeline when it is placed."""

import copy
import functools
import math
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import diffusers
import numpy
import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict

import anyaccel
from anyaccel.embedded.model import find_embedded_model
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import ModelError
from anyaccel.planning.options import WEIGHT_FORMATS
from anyaccel.quantized_weights import quantize
from anyaccel.quantized_weights.dequantized_linear import DequantizedLinear
from anyaccel.quantized_weights.quantize import (
    find_layers,
    is_partly_quantized,
    quantize_model,
    quantize_weight,
    read_error,
)
from anyaccel.quantized_weights.replace_layers import list_formats
from anyaccel.recipes import Recipe, recipes, run
from anyaccel.runtime.introspection import read_facts
from anyaccel.runtime.placement.quantized_layers import find_models_to_quantize, quantize_models
from anyaccel.upstream.diffusers_internals import use_progress_bars
from tests.conftest import NEEDS_RECIPES
from tests.emulator.forked import DEVICES
from tests.quantized_weights.quantizers import FORMATS, RECIPE, make_pipeline

pytestmark = NEEDS_RECIPES
PAGE = Path(__file__).parents[2] / "docs" / "quantized-weights.md"
# The other devices and formats run with `make test-slow`.
QUICK: list[tuple[str, str, tuple[str, ...]]] = [
    ("mps", "flux", WEIGHT_FORMATS),
    ("neuron", "flux", ("nf4",)),
    ("hpu", "flux", ("gguf:Q4_0",)),
    ("xpu", "flux", ("fp8",)),
    ("mps", "stable-diffusion-xl", ("nf4",)),
]


@functools.cache
def run_dequantized(name: str, weights: str) -> Any:
    """Return the image of the quantized weights in plain layers on the CPU, in float32."""
    pipe: Any = recipes()[name].make()
    quantize_models(find_models_to_quantize(pipe, weights), weights)
    for model in ("transformer", "unet", "text_encoder", "text_encoder_2"):
        if getattr(pipe, model, None) is not None:
            getattr(pipe, model).dequantize()
    return run(recipes()[name], pipe)


def list_quantized(model: torch.nn.Module) -> list[DequantizedLinear]:
    return [layer for layer in model.modules() if isinstance(layer, DequantizedLinear)]


@pytest.mark.parametrize(
    ("device", "name", "formats"),
    [
        *QUICK,
        *(
            pytest.param(device, name, WEIGHT_FORMATS, marks=pytest.mark.slow)
            for device in DEVICES
            for name in ("flux", "stable-diffusion-xl")
        ),
    ],
)
def test_the_image_is_that_of_the_same_weights_on_the_cpu(device: str, name: str, formats: tuple[str, ...]) -> None:
    recipe: Recipe = recipes()[name]

    def use(accelerator: VirtualAccelerator) -> list[tuple[Any, dict[str, str], bool, set[torch.dtype]]]:
        results = []
        for weights in formats:
            placed = anyaccel.place(recipe.make(), f"virtual:{accelerator.name}", dtype="float32", weights=weights)
            layers = list_quantized(getattr(placed, "transformer", None) or placed.unet)
            assert len(layers) > 20
            codes = {layer.get_buffer("codes").dtype for layer in layers}
            plan = placed.plan
            results.append((run(recipe, placed), dict(plan.weights.value), bool(plan.dequantized.value), codes))
        return results

    denoiser = "transformer" if name == "flux" else "unet"
    for weights, (image, chosen, dequantizes, codes) in zip(formats, run_forked(device, use), strict=True):
        numpy.testing.assert_allclose(image, run_dequantized(name, weights), atol=1e-5, err_msg=weights)
        assert chosen == dict.fromkeys((denoiser, "text_encoder", "text_encoder_2"), weights)
        assert dequantizes is ((device, weights) != ("xpu", "fp8"))  # XPU has float8
        assert codes <= {torch.uint8, torch.int8}


def read_table() -> dict[str, list[float]]:
    """Return the rows of docs/quantized-weights.md: bits per weight and two errors in percent, by format."""
    rows = [[cell.strip(" `%") for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines()]
    return {row[0]: [float(cell) for cell in row[1:]] for row in rows if len(row) == 4 and row[0] in WEIGHT_FORMATS}


def test_the_error_of_each_format() -> None:
    values = torch.randn(256, 3072, generator=torch.Generator().manual_seed(0))
    errors, bits = {}, {}
    for weights in WEIGHT_FORMATS:
        layer = torch.nn.Linear(3072, 256)
        layer.weight = torch.nn.Parameter(values.clone())
        model: Any = torch.nn.Sequential(layer)
        quantize_model(model, weights)
        error = read_error(model)
        assert error is not None
        assert (error.format, error.layers, error.worst_layer) == (weights, 1, "0")
        assert error.mean == error.worst
        assert error.mean == pytest.approx(float((model[0].weight - values).norm() / values.norm()))
        errors[weights] = error.mean
        bits[weights] = model[0].count_bytes() * 8 / values.numel()
    expected = read_table()
    assert errors == pytest.approx({name: row[1] / 100 for name, row in expected.items()}, rel=0.05)
    assert sorted(errors, key=lambda name: errors[name]) == list(expected)
    # A row has a scale, and a layer can have a table of at most 256 values.
    assert bits == pytest.approx({name: row[0] for name, row in expected.items()}, abs=0.03)


def test_the_error_of_trained_weights() -> None:
    kind: Any = diffusers.UNet2DConditionModel
    errors = {}
    for weights in WEIGHT_FORMATS:
        unet = kind.from_pretrained(find_embedded_model() / "unet", torch_dtype=torch.float32)
        quantize_model(unet, weights)
        error = read_error(unet)
        assert error is not None
        errors[weights] = error.mean * 100
    assert errors == pytest.approx({name: row[2] for name, row in read_table().items()}, rel=0.02)


def test_nf4_has_the_codes_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    values = torch.randn(16, 128, generator=torch.Generator().manual_seed(0))
    data, state = functional.quantize_4bit(values, quant_type="nf4", blocksize=64)
    _form, parts = quantize_weight(values, "nf4")
    assert torch.equal(parts["codes"], data.reshape(-1))
    torch.testing.assert_close(parts["scales"], state.absmax)


@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_weights_of_zero_and_of_one_value(weights: str) -> None:
    values = torch.zeros(4, 64)
    values[1] = 3.0
    form, parts = quantize_weight(values, weights)
    torch.testing.assert_close(form.dequantize(parts), values)


def test_the_plan_reports_the_error() -> None:
    pipe = anyaccel.place(RECIPE.make(), "cpu", dtype="float32", weights="int8")
    error = read_error(pipe.transformer)
    assert error is not None
    assert 0.004 < error.mean < 0.007
    assert error.mean < error.worst == max(layer.error or 0 for layer in list_quantized(pipe.transformer))
    assert f"transformer {error.mean:.2%}"[:-2] in pipe.plan.weights.reason
    assert f"worst layer {error.worst_layer}" in " ".join(str(pipe.plan).split())
    plain = anyaccel.place(RECIPE.make(), "cpu")
    assert plain.plan.weights.value == ()
    assert list_formats(plain.transformer) == {}


def test_which_layers_stay() -> None:
    pipe: Any = RECIPE.make()
    layers = find_layers(pipe.transformer, "int8")
    kept = {name for name, layer in pipe.transformer.named_modules() if type(layer) is torch.nn.Linear} - set(layers)
    assert kept == {
        *(f"time_text_embed.{part}_embedder.linear_{n}" for part in ("timestep", "guidance", "text") for n in (1, 2)),
        *("context_embedder", "x_embedder", "proj_out"),
    }
    # T5 keeps the layers `wo` in float32.
    assert not [name for name in find_layers(pipe.text_encoder_2, "int8") if name.endswith("wo")]
    # 37 columns are no multiple of 32, and 37 * 32 weights no multiple of 64.
    gguf, nf4, int8 = (set(find_layers(pipe.text_encoder, name)) for name in ("gguf:Q8_0", "nf4", "int8"))
    assert nf4 < gguf < int8
    tied: Any = torch.nn.ModuleDict({"a": torch.nn.Linear(64, 64), "b": torch.nn.Embedding(64, 64)})
    tied.b.weight = tied.a.weight
    assert find_layers(tied, "int8") == {}


def test_the_facts_count_the_small_weights() -> None:
    before = {component.name: component for component in read_facts(RECIPE.make()).components}
    pipe = anyaccel.place(RECIPE.make(), "cpu", dtype="float32", weights="gguf:Q8_0")
    after = {component.name: component for component in read_facts(pipe).components}
    assert after["vae"] == before["vae"]
    facts = after["transformer"]
    assert facts.parameters == before["transformer"].parameters
    assert facts.packed_bytes == facts.packed_parameters * 8.5 / 8
    tensors = (*pipe.transformer.parameters(), *pipe.transformer.buffers())
    assert facts.count_bytes(4) == sum(tensor.nbytes for tensor in tensors)


def test_weights_that_fit_when_quantized_stay_on_the_device() -> None:
    def use(accelerator: VirtualAccelerator) -> list[tuple[str, int]]:
        chosen = []
        for weights in (None, "nf4"):
            pipe = RECIPE.make()
            placed = anyaccel.place(pipe, f"virtual:{accelerator.name}", dtype="float32", weights=weights)
            need = sum(component.count_bytes(4) for component in read_facts(placed).components)
            chosen.append((placed.plan.memory.value.residence, need))
        return chosen

    needs = run_forked("mps", use)
    small = needs[1][1] * 3 // 2
    assert needs[0][1] > small
    assert [residence for residence, _ in run_forked("mps", use, memory=small)] == ["phase", "resident"]


def interrupting_at(name: str, layer: int) -> AbstractContextManager[None]:
    """Raise `KeyboardInterrupt` in the `with` block when a layer of a model class is quantized, as Ctrl-C does."""

    def make_bar(layers: list[Any], *, desc: str, **options: Any) -> Iterator[Any]:
        for number, item in enumerate(layers):
            if name in desc and number == layer:
                raise KeyboardInterrupt
            yield item

    return use_progress_bars(make_bar)


@pytest.mark.parametrize("memory", ["resident", "phase"])
def test_an_interrupted_quantization_can_be_continued(memory: str) -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[Any, Any]:
        device = f"virtual:{accelerator.name}"
        pipe = anyaccel.place(RECIPE.make(), device, dtype="float32", memory=memory)
        run(RECIPE, pipe)
        with interrupting_at("FluxTransformer2DModel", 5), pytest.raises(KeyboardInterrupt):
            pipe.to(device, weights="nf4")
        assert list_formats(pipe.transformer) == {"nf4": 5}
        partial = run(RECIPE, pipe)
        assert dict(pipe.plan.weights.value)["transformer"] == "nf4"
        with pytest.raises(anyaccel.AnyaccelError, match="already has nf4 weights"):
            pipe.to(device, weights="int8")
        pipe.to(device, weights="nf4")
        assert list_formats(pipe.transformer) == {"nf4": 21}
        assert not is_partly_quantized(pipe.transformer)
        return partial, run(RECIPE, pipe)

    partial, image = run_forked("mps", use)
    assert numpy.isfinite(partial).all()
    numpy.testing.assert_allclose(image, run_dequantized("flux", "nf4"), atol=1e-5)


def test_a_rejected_quantization_keeps_the_placement() -> None:
    pipe = anyaccel.place(RECIPE.make(), "cpu", dtype="float32")
    plan = pipe.plan
    with interrupting_at("CLIPTextModel", 0), pytest.raises(KeyboardInterrupt):
        pipe.to("cpu", weights="int8")
    assert pipe.plan is plan


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(quantize, "_BAR_DELAY_S", 0)
    stderr = sys.stderr
    for isatty in (False, True):
        monkeypatch.setattr(stderr, "isatty", lambda isatty=isatty: isatty, raising=False)
        quantize_model(cast(Any, RECIPE.make()).transformer, "int8")
        text = capsys.readouterr().err
        assert ("Quantizing FluxTransformer2DModel to int8: 100%" in text) is isatty
    monkeypatch.setattr(quantize, "_BAR_DELAY_S", 2)
    quantize_model(cast(Any, RECIPE.make()).transformer, "int8")
    assert capsys.readouterr().err == "", "short quantizations have no bar"


def test_later_placements() -> None:
    placed = anyaccel.place(RECIPE.make(), "cpu", dtype="float32", weights="int8")
    codes, expected = list_quantized(placed.transformer)[0].get_buffer("codes"), run(RECIPE, placed)
    placed.to("cpu")
    placed.to("cpu", weights=None)
    assert list_quantized(placed.transformer)[0].get_buffer("codes") is codes
    assert "permanent" in placed.plan.weights.reason
    numpy.testing.assert_array_equal(run(RECIPE, copy.deepcopy(placed)), expected)
    with pytest.raises(anyaccel.AnyaccelError, match="text_encoder already has int8 weights\nhint: load the pipeline"):
        placed.to("cpu", weights="nf4")
    numpy.testing.assert_array_equal(run(RECIPE, placed), expected)
    other: Any = RECIPE.make()
    placed.to("cpu", weights="int8")
    placed.transformer = other.transformer
    numpy.testing.assert_array_equal(run(RECIPE, placed), expected)
    assert list_formats(placed.transformer) == {"int8": 21}
    placed.transformer.dequantize()
    assert read_error(placed.transformer) is None


def test_an_offloaded_pipeline_can_be_quantized() -> None:
    def use(accelerator: VirtualAccelerator) -> list[Any]:
        device, images = f"virtual:{accelerator.name}", []
        for memory in ("phase", "layer"):
            placed = anyaccel.place(RECIPE.make(), device, dtype="float32", memory=memory)
            run(RECIPE, placed)
            images.append(run(RECIPE, placed.to(device, weights="nf4")))
        return images

    for image in run_forked("mps", use):
        numpy.testing.assert_allclose(image, run_dequantized("flux", "nf4"), atol=1e-5)


def test_lora_on_quantized_weights(tmp_path: Path) -> None:
    def add(pipe: Any) -> Any:
        torch.manual_seed(0)
        pipe.transformer.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k"], init_lora_weights=False))
        return pipe

    plain: Any = RECIPE.make()
    quantize_models(find_models_to_quantize(plain, "int8"), "int8")
    without = run(RECIPE, plain)
    expected = run(RECIPE, add(plain))
    assert numpy.abs(expected - without).max() > 0.05
    with pytest.raises(anyaccel.AnyaccelError, match="cannot be changed"):
        plain.transformer.fuse_lora()
    numpy.testing.assert_array_equal(run(RECIPE, plain), expected)

    def use(accelerator: VirtualAccelerator) -> None:
        device = f"virtual:{accelerator.name}"
        after = add(anyaccel.place(RECIPE.make(), device, dtype="float32", weights="int8"))
        numpy.testing.assert_allclose(run(RECIPE, after), expected, atol=1e-5)
        before = anyaccel.place(add(RECIPE.make()), device, dtype="float32", weights="int8")
        numpy.testing.assert_allclose(run(RECIPE, before), expected, atol=1e-5)
        assert list_formats(before.transformer) == list_formats(after.transformer)
        for method in (before.fuse_lora, functools.partial(before.save_pretrained, tmp_path)):
            with pytest.raises(anyaccel.AnyaccelError, match="the device dequantizes the int8 weights"):
                method()
        fused = add(RECIPE.make())
        fused.transformer.fuse_lora()
        with pytest.raises(anyaccel.AnyaccelError, match="into which adapters are fused"):
            anyaccel.place(fused, device, weights="int8")

    run_forked("mps", use)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
def test_lora_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    adapted: Any = RECIPE.make()
    adapted.transformer.add_adapter(
        LoraConfig(r=4, target_modules=["to_q", "proj_mlp", "norm.linear", "x_embedder"], init_lora_weights=False)
    )
    adapted.save_lora_weights(tmp_path, get_peft_model_state_dict(adapted.transformer))
    without, plain = (
        run_dequantized("flux", "int8"),
        anyaccel.place(RECIPE.make(), "cpu", dtype="float32", weights="int8"),
    )
    for model in (plain.transformer, plain.text_encoder, plain.text_encoder_2):
        model.dequantize()
    plain.load_lora_weights(tmp_path, adapter_name="first")
    expected = run(RECIPE, plain)
    assert numpy.abs(expected - without).max() > 0.05
    pipe = anyaccel.place(RECIPE.make(), "cpu", dtype="float32", weights="int8")
    names = set(pipe.transformer.state_dict())
    for adapter in ("first", "second"):
        pipe.load_lora_weights(tmp_path, adapter_name=adapter)
        pipe.set_adapters([adapter])
        numpy.testing.assert_allclose(run(RECIPE, pipe), expected, atol=1e-5)
    pipe.set_adapters(["first", "second"], [0.5, 0.5])
    numpy.testing.assert_allclose(run(RECIPE, pipe), expected, atol=1e-5)
    pipe.unload_lora_weights()
    numpy.testing.assert_allclose(run(RECIPE, pipe), without, atol=1e-5)
    assert set(pipe.transformer.state_dict()) == names


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_weights_that_are_not_finite_are_rejected(weights: str, value: float) -> None:
    pipe: Any = RECIPE.make()
    pipe.transformer.transformer_blocks[0].attn.to_q.weight.data[0, 0] = value
    with pytest.raises(ModelError, match=r"transformer_blocks\.0\.attn\.to_q in FluxTransformer2DModel has NaN or Inf"):
        anyaccel.place(pipe, "cpu", weights=weights)
    assert list_formats(pipe.transformer) == {}


@pytest.mark.parametrize("name", ["gguf-Q4_0", "bitsandbytes-nf4", "torchao-int8", "float8_e4m3fn"])
def test_models_that_are_quantized_already_are_refused(name: str, tmp_path: Path) -> None:
    saved: Any = RECIPE.make()
    saved.save_pretrained(tmp_path / "saved")
    pipe = make_pipeline(FORMATS[name], tmp_path / "saved", tmp_path)
    with pytest.raises(anyaccel.AnyaccelError, match=r"transformer already has .* weights\nhint: omit weights="):
        anyaccel.place(pipe, "cpu", weights="int8")
    # Nothing was changed.
    assert list_formats(pipe.text_encoder) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int9"}, "weights must be one of int8, fp8.*\nhint: did you mean int8"),
        ({"weights": "gguf:Q4_K"}, "did you mean gguf:Q4_0"),
        ({"weights": True}, "weights must be one of"),
        ({"weights": "int8", "parallel": "tensor:2"}, "cannot split quantized weights"),
    ],
)
def test_values_that_are_rejected(options: dict[str, Any], message: str) -> None:
    pipe: Any = RECIPE.make()
    with pytest.raises(anyaccel.AnyaccelError, match=message):
        anyaccel.place(pipe, "cpu", **options)
    assert list_formats(pipe.transformer) == {}


def test_from_pretrained_quantizes_when_loading(tmp_path: Path) -> None:
    saved: Any = RECIPE.make()
    saved.save_pretrained(tmp_path)
    pipe = anyaccel.DiffusionPipeline.from_pretrained(tmp_path, weights="gguf:Q8_0")
    assert list_formats(pipe.transformer) == {"gguf:Q8_0": 21}
    numpy.testing.assert_allclose(run(RECIPE, pipe), run_dequantized("flux", "gguf:Q8_0"), atol=1e-5)
    with pytest.raises(anyaccel.AnyaccelError, match="weights must be one of"):
        anyaccel.DiffusionPipeline.from_pretrained("missing", weights="int3")


def test_a_model_on_meta_has_the_same_sizes() -> None:
    for weights in WEIGHT_FORMATS:
        pipes: list[Any] = [RECIPE.make(), RECIPE.make()]
        models = [pipes[0].transformer, pipes[1].transformer.to("meta")]
        for model in models:
            quantize_model(model, weights)
        shapes = [{name: (part.shape, part.dtype) for name, part in model.named_buffers()} for model in models]
        assert shapes[0] == shapes[1]
        error = read_error(models[1])
        assert error is not None
        assert math.isnan(error.mean)
