"""Weights that `from_pretrained` leaves in float32 in a half-precision pipeline, and float32 modules of a cast one."""

from pathlib import Path
from typing import Any

import diffusers
import numpy
import pytest
import torch

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.recipes import recipes, run
from tests.conftest import NEEDS_RECIPES

pytestmark = [NEEDS_RECIPES, pytest.mark.usefixtures("pipelines_imported"), pytest.mark.filterwarnings("ignore")]


def list_weights(pipe: Any) -> dict[str, torch.Tensor]:
    models = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    return {
        f"{name}.{path}": tensor
        for name, model in models.items()
        for path, tensor in (*model.named_parameters(), *model.named_buffers())
    }


@pytest.mark.parametrize(
    ("recipe", "dtype", "float32"),
    [
        ("wan", torch.bfloat16, "transformer.scale_shift_table"),  # a parameter in `_keep_in_fp32_modules`
        ("pixart-sigma", torch.bfloat16, "transformer.pos_embed.pos_embed"),  # a buffer
    ],
)
def test_a_pipeline_in_half_precision_is_moved_and_not_cast(
    recipe: str, dtype: torch.dtype, float32: str, tmp_path: Path
) -> None:
    pipe: Any = recipes()[recipe].make()
    pipe.save_pretrained(tmp_path)
    library: Any = diffusers
    stock = list_weights(library.DiffusionPipeline.from_pretrained(tmp_path, dtype=dtype))
    placed = list_weights(anyaccel.DiffusionPipeline.from_pretrained(tmp_path, dtype=dtype).to("cpu"))
    assert stock[float32].dtype == torch.float32
    assert {name: weight.dtype for name, weight in placed.items()} == {name: w.dtype for name, w in stock.items()}
    assert all(torch.equal(weight, stock[name]) for name, weight in placed.items())


@pytest.mark.parametrize("device", ["cpu", "neuron", "mps"])
@pytest.mark.parametrize(("recipe", "part"), [("wan", "scale_shift_table"), ("flux", "DenseReluDense.wo.weight")])
def test_float32_modules_keep_their_values_in_a_cast(device: str, recipe: str, part: str) -> None:
    def use(accelerator: VirtualAccelerator | None = None) -> None:
        pipe: Any = recipes()[recipe].make()
        before = {name: weight.clone() for name, weight in list_weights(pipe).items() if name.endswith(part)}
        placed = list_weights(anyaccel.place(pipe, device, dtype="float16"))
        assert before
        for name, weight in before.items():
            assert placed[name].dtype == torch.float32
            assert torch.equal(placed[name].cpu(), weight)

    use() if device == "cpu" else run_forked(device, use)


def test_models_passed_to_from_pretrained_keep_their_dtype(tmp_path: Path) -> None:
    recipe = recipes()["wan"]
    recipe.make().save_pretrained(tmp_path)  # type: ignore[attr-defined]
    library: Any = diffusers

    def load(kind: Any) -> Any:
        vae = library.AutoencoderKLWan.from_pretrained(tmp_path, subfolder="vae", dtype=torch.float32)
        pipe = kind.from_pretrained(tmp_path, vae=vae, dtype=torch.bfloat16).to("cpu")
        assert pipe.vae is vae
        return pipe

    stock, placed = load(library.DiffusionPipeline), load(anyaccel.DiffusionPipeline)
    dtypes = {name: weight.dtype for name, weight in list_weights(placed).items()}
    assert dtypes == {name: weight.dtype for name, weight in list_weights(stock).items()}
    assert stock.vae.dtype == torch.float32
    numpy.testing.assert_array_equal(run(recipe, placed), run(recipe, stock))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_nothing_is_cast_on_the_cpu(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("anyaccel.runtime.placement.place.measure_half_precision", lambda: {"bfloat16": 100.0})
    recipe = recipes()["stable-diffusion"]
    stock, placed = (recipe.make().to(dtype) for _ in range(2))  # type: ignore[attr-defined]
    anyaccel.place(placed, "cpu")
    assert {weight.dtype for weight in list_weights(placed).values() if weight.is_floating_point()} == {dtype}
    numpy.testing.assert_array_equal(run(recipe, placed), run(recipe, stock))
    warned = [record for record in caplog.records if "times as long as float32 on this CPU" in record.getMessage()]
    assert len(warned) == (dtype is torch.bfloat16)


@pytest.mark.parametrize("before", [True, False], ids=["before placing", "after placing"])
def test_a_torch_dtype_in_to_casts_all_weights(before: bool) -> None:
    stock: Any = recipes()["wan"].make()
    stock.to(torch.bfloat16)
    pipe: Any = recipes()["wan"].make()
    pipe = anyaccel.place(pipe.to(torch.bfloat16), "cpu") if before else anyaccel.place(pipe, "cpu").to(torch.bfloat16)
    assert {weight.dtype for weight in list_weights(stock).values()} == {torch.bfloat16}
    assert {weight.dtype for weight in list_weights(pipe).values()} == {torch.bfloat16}


def test_a_cast_before_the_move_is_kept(tmp_path: Path) -> None:
    recipes()["stable-diffusion"].make().save_pretrained(tmp_path)  # type: ignore[attr-defined]
    pipe = anyaccel.DiffusionPipeline.from_pretrained(tmp_path, dtype=torch.bfloat16)
    pipe.vae.to(torch.float32)
    assert pipe.to("cpu").vae.dtype == torch.float32
    assert pipe.unet.dtype == torch.bfloat16
