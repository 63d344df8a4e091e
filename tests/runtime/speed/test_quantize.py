"""Float8 quantization: the choice of layers, their accuracy, and errors afterwards."""

from pathlib import Path
from typing import Any

import pytest
import torch

from anyaccel.errors import UsageError
from anyaccel.planning.decision import Decision
from anyaccel.recipes import recipes, run
from anyaccel.runtime.pipeline import place
from anyaccel.runtime.speed import quantize
from anyaccel.runtime.speed.float8 import Float8Linear, check_float8
from anyaccel.runtime.speed.quantize import is_quantized, is_worth_quantizing
from tests.forced_plan import force_plan


@pytest.mark.parametrize(
    ("name", "in_features", "out_features", "expected"),
    [
        ("transformer_blocks.0.ff.net.0.proj", 3072, 12288, True),
        ("blocks.0.attn.to_q", 1280, 1280, False),
        ("transformer_blocks.0.norm1.linear", 3072, 18432, False),
        ("time_text_embed.timestep_embedder.linear_2", 3072, 3072, False),
        ("single_transformer_blocks.0.proj_out", 15360, 3072, True),
        ("blocks.0.to_q", 3072, 3075, False),
    ],
)
def test_which_layers_are_quantized(name: str, in_features: int, out_features: int, expected: bool) -> None:
    assert is_worth_quantizing(torch.nn.Linear(in_features, out_features, device="meta"), name) is expected
    assert not is_worth_quantizing(torch.nn.Conv2d(4, 4, 3), name)


@pytest.fixture
def pipe() -> Any:
    return place(recipes()["stable-diffusion"].make(), "cpu", dtype="bfloat16")


@pytest.fixture
def needs_float8() -> None:
    """Skip the test if torch cannot multiply in float8 on this CPU."""
    try:
        check_float8(torch.device("cpu"), torch.bfloat16)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"no float8 products on this CPU: {error}")


def run_quantized(pipe: Any) -> Any:
    """Run a pipeline with a plan that quantizes."""
    force_plan(pipe, quantization=Decision("float8", "for the test"))
    return run(recipes()["stable-diffusion"], pipe)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64)])
@pytest.mark.usefixtures("needs_float8")
def test_float8_layer_is_close_to_the_original(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 96, bias=bias, dtype=torch.bfloat16)
    inputs = (
        torch.randn(shape, dtype=torch.bfloat16) * torch.logspace(-3, 3, shape[-2] if len(shape) > 1 else 1)[:, None]
    )
    inputs = inputs.reshape(shape).bfloat16()
    other = Float8Linear(layer)
    with torch.no_grad():
        exact, actual = layer(inputs).float(), other(inputs).float()
    assert actual.shape == exact.shape
    rows = (actual - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(rows.max()) < 0.08, "each row has its own scale: small rows must be as accurate as large ones"
    assert float(rows.max()) > 1e-4, "the product was not computed in float8"
    assert (other.weight.float() - layer.weight.float()).abs().max() < 0.07 * layer.weight.abs().max()
    assert other.weight.dtype == torch.bfloat16


@pytest.mark.usefixtures("needs_float8")
def test_rows_of_zeros_stay_zero() -> None:
    layer = torch.nn.Linear(32, 32, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        assert not Float8Linear(layer)(torch.zeros(4, 32, dtype=torch.bfloat16)).any()


@pytest.mark.usefixtures("needs_float8")
def test_fast_pipeline_quantizes_large_layers(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "SMALLEST_WEIGHT", 1000)
    exact = run(recipes()["stable-diffusion"], pipe)
    before = {name for name, layer in pipe.unet.named_modules() if isinstance(layer, torch.nn.Linear)}
    actual = run_quantized(pipe)
    after = {name for name, layer in pipe.unet.named_modules() if isinstance(layer, Float8Linear)}
    assert after < before
    assert all(is_worth_quantizing(torch.nn.Linear(64, 64, device="meta"), name) for name in after)
    assert any("ff" in name for name in after)
    assert is_quantized(pipe.unet)
    error = float(abs(actual - exact).max())
    assert 0 < error < 0.1
    assert (run_quantized(pipe) == actual).all(), "later calls return the same image"


def test_unsupported_quantization_is_reported(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "SMALLEST_WEIGHT", 1000)

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("torch._scaled_mm is only supported on other devices\nand more")

    monkeypatch.setattr(torch, "_scaled_mm", fail)
    run_quantized(pipe)
    assert pipe.plan.report.quantization.value == ""
    expected = "unet cannot be quantized: torch._scaled_mm is only supported on other devices"
    assert pipe.plan.report.quantization.reason == expected
    assert not is_quantized(pipe.unet)
    assert not any(isinstance(layer, Float8Linear) for layer in pipe.unet.modules())


def test_out_of_memory_is_not_reported_as_unsupported(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*args: Any, **options: Any) -> None:
        raise RuntimeError("XPU out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(quantize, "SMALLEST_WEIGHT", 1000)
    monkeypatch.setattr(quantize, "check_float8", run_out)
    placement = force_plan(pipe, quantization=Decision("float8", "for the test"))
    with pytest.raises(RuntimeError, match="XPU out of memory"):
        quantize.quantize_denoisers(pipe, placement)
    assert placement.report.quantization is None


def test_errors_of_other_operations_are_not_reported_as_unsupported(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("the device was lost")

    monkeypatch.setattr(quantize, "SMALLEST_WEIGHT", 1000)
    monkeypatch.setattr(torch.nn.functional, "linear", fail)
    placement = force_plan(pipe, quantization=Decision("float8", "for the test"))
    with pytest.raises(RuntimeError, match="the device was lost"):
        quantize.quantize_denoisers(pipe, placement)
    assert placement.report.quantization is None


@pytest.mark.usefixtures("needs_float8")
def test_partly_quantized_model_counts_as_quantized(pipe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quantize, "SMALLEST_WEIGHT", 1000)
    quantized: list[Any] = []

    def quantize_layer(layer: torch.nn.Linear) -> Any:
        if len(quantized) == 2:
            raise torch.OutOfMemoryError("no more")
        quantized.append(Float8Linear(layer))
        return quantized[-1]

    monkeypatch.setattr(quantize, "Float8Linear", quantize_layer)
    placement = force_plan(pipe, quantization=Decision("float8", "for the test"))
    with pytest.raises(torch.OutOfMemoryError):
        quantize.quantize_denoisers(pipe, placement)
    with pytest.raises(UsageError, match="requires the original weights of unet"):
        pipe.save_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["save", "lora", "dtype"])
def test_operations_that_need_the_original_weights_raise(pipe: Any, name: str, tmp_path: Path) -> None:
    vars(pipe.unet)["_anyaccel_quantized"] = "float8"
    operations = {
        "save": lambda: pipe.save_pretrained(tmp_path),
        "lora": lambda: pipe.load_lora_weights(tmp_path),
        "dtype": lambda: pipe.to("cpu", dtype="float32"),
    }
    with pytest.raises(UsageError, match="requires the original weights of unet") as caught:
        operations[name]()
    assert "load the pipeline again" in (caught.value.hint or "")
