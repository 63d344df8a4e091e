"""Weights that `from_pretrained` leaves in float32 in a half-precision pipeline, and float32 modules of a cast one."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.recipes import recipes
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
