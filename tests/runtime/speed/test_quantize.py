"""Products in 8 bits: which layers, what they give, what is refused afterwards, a word where it cannot be done."""

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
from anyaccel.runtime.speed.quantize import gains, is_quantized
from tests.forced_plan import force_plan


@pytest.mark.parametrize(
    ("name", "inside", "outside", "expected"),
    [
        ("transformer_blocks.0.ff.net.0.proj", 3072, 12288, True),
        ("blocks.0.attn.to_q", 1280, 1280, False),
        ("transformer_blocks.0.norm1.linear", 3072, 18432, False),
        ("time_text_embed.timestep_embedder.linear_2", 3072, 3072, False),
        ("single_transformer_blocks.0.proj_out", 15360, 3072, True),
        ("blocks.0.to_q", 3072, 3075, False),
    ],
)
def test_which_layers_gain(name: str, inside: int, outside: int, expected: bool) -> None:
    assert gains(torch.nn.Linear(inside, outside, device="meta"), name) is expected
    assert not gains(torch.nn.Conv2d(4, 4, 3), name)


@pytest.fixture
def pipe() -> Any:
    return place(recipes()["stable-diffusion"].make(), "cpu", dtype="bfloat16")


@pytest.fixture
def ready() -> None:
    """Products in 8 bits are there on this host."""
    try:
        check_float8(torch.device("cpu"), torch.bfloat16)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"torch has no products in 8 bits on this host: {error}")


def ask(pipe: Any) -> Any:
    """As if the sheet said that 8 bits pay."""
    force_plan(pipe, quantized=Decision("float8", "for the test"))
    return run(recipes()["stable-diffusion"], pipe)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64)])
@pytest.mark.usefixtures("ready")
def test_a_layer_in_8_bits_gives_nearly_the_same(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 96, bias=bias, dtype=torch.bfloat16)
    given = (
        torch.randn(shape, dtype=torch.bfloat16) * torch.logspace(-3, 3, shape[-2] if len(shape) > 1 else 1)[:, None]
    )
    given = given.reshape(shape).bfloat16()
    other = Float8Linear(layer)
    with torch.no_grad():
        exact, made = layer(given).float(), other(given).float()
    assert made.shape == exact.shape
    rows = (made - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(rows.max()) < 0.08, "each row has a scale of its own, so that small ones are as right as large ones"
    assert float(rows.max()) > 1e-4, "nothing was rounded"
    assert (other.weight.float() - layer.weight.float()).abs().max() < 0.07 * layer.weight.abs().max()
    assert other.weight.dtype == torch.bfloat16


@pytest.mark.usefixtures("ready")
def test_rows_of_zeros_stay_so() -> None:
    layer = torch.nn.Linear(32, 32, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        assert not Float8Linear(layer)(torch.zeros(4, 32, dtype=torch.bfloat16)).any()


@pytest.mark.usefixtures("ready")
def test_a_picture_whose_large_matrices_are_in_8_bits(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "SMALLEST_WEIGHT", 1000)
    exact = run(recipes()["stable-diffusion"], pipe)
    before = {name for name, part in pipe.unet.named_modules() if isinstance(part, torch.nn.Linear)}
    made = ask(pipe)
    after = {name for name, part in pipe.unet.named_modules() if isinstance(part, Float8Linear)}
    assert after < before
    assert all(gains(torch.nn.Linear(64, 64, device="meta"), name) for name in after)
    assert any("ff" in name for name in after)
    assert is_quantized(pipe.unet)
    off = float(abs(made - exact).max())
    assert 0 < off < 0.1
    assert (ask(pipe) == made).all(), "from then on it is the same picture"


def test_where_it_cannot_be_done_the_plan_says_so(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "SMALLEST_WEIGHT", 1000)

    def refuse(*args: Any, **options: Any) -> None:
        raise RuntimeError("torch._scaled_mm is only supported on other devices\nand more")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    ask(pipe)
    assert pipe.plan.report.quantization.value == ""
    assert pipe.plan.report.quantization.reason == "torch cannot: torch._scaled_mm is only supported on other devices"
    assert not is_quantized(pipe.unet)
    assert not any(isinstance(part, Float8Linear) for part in pipe.unet.modules())


def test_a_busy_device_is_not_one_without_products_in_8_bits(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*args: Any, **options: Any) -> None:
        raise RuntimeError("XPU out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(quantize, "SMALLEST_WEIGHT", 1000)
    monkeypatch.setattr(quantize, "check_float8", run_out)
    placement = force_plan(pipe, quantized=Decision("float8", "for the test"))
    with pytest.raises(RuntimeError, match="XPU out of memory"):
        quantize.quantize_denoisers(pipe, placement)
    assert placement.report.quantization is None


@pytest.mark.usefixtures("ready")
def test_memory_that_runs_out_half_way_leaves_a_model_that_is_known_to_be_changed(
    pipe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(quantize, "SMALLEST_WEIGHT", 1000)
    made: list[Any] = []

    def make(layer: torch.nn.Linear) -> Any:
        if len(made) == 2:
            raise torch.OutOfMemoryError("no more")
        made.append(Float8Linear(layer))
        return made[-1]

    monkeypatch.setattr(quantize, "Float8Linear", make)
    placement = force_plan(pipe, quantized=Decision("float8", "for the test"))
    with pytest.raises(torch.OutOfMemoryError):
        quantize.quantize_denoisers(pipe, placement)
    with pytest.raises(UsageError, match="needs the weights of unet as they were"):
        pipe.save_pretrained(tmp_path)


@pytest.mark.parametrize("what", ["save", "lora", "dtype"])
def test_what_needs_the_weights_as_they_were_is_refused(pipe: Any, what: str, tmp_path: Path) -> None:
    vars(pipe.unet)["_anyaccel_quantized"] = "float8"
    asked = {
        "save": lambda: pipe.save_pretrained(tmp_path),
        "lora": lambda: pipe.load_lora_weights(tmp_path),
        "dtype": lambda: pipe.to("cpu", dtype="float32"),
    }
    with pytest.raises(UsageError, match="needs the weights of unet as they were") as caught:
        asked[what]()
    assert "load the pipeline again" in (caught.value.hint or "")
