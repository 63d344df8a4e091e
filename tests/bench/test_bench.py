"""Tests for benchmarks against stock diffusers."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anyaccel.bench.bench import run_bench, run_together
from anyaccel.bench.case import BenchCase
from anyaccel.bench.pipelines import make_call, make_pipeline
from anyaccel.bench.text import format_bench
from anyaccel.bench.worker import _BenchWorker
from anyaccel.errors import UsageError
from anyaccel.recipes import recipes
from anyaccel.runtime.pipeline import Portable


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("fast", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_variants_generate_the_same_image_in_turn(fast: bool, folder: Path) -> None:
    """Slow with the third variant: each variant imports torch and diffusers in a process of its own."""
    call = {"num_inference_steps": 8, "height": 16, "width": 16}
    variants = ("stock eager", "anyaccel", *(["anyaccel fast"] if fast else []))
    case = BenchCase(model=str(folder), title="tiny", device="cpu", dtype="float32", call=call, variants=variants)
    messages: list[str] = []
    row = run_bench(case, rounds=2, on_progress=messages.append)
    assert json.loads(json.dumps(row)) == row
    ours, stock = row["variants"]["anyaccel"], row["variants"]["stock eager"]
    assert ours["psnr_db"] is None or ours["psnr_db"] > 80
    assert ours["median_s"] > 0
    assert ours["first_picture_s"] > 0
    assert row["against stock eager"] == pytest.approx(stock["median_s"] / ours["median_s"], rel=0.05)
    assert "fusions" in ours["plan"]
    assert any("round 2 of 2" in message for message in messages)
    text = "\n".join(format_bench([row]))
    assert "tiny" in text
    if fast:
        assert "times as fast as stock eager" in text
        assert "step_skipping" in row["variants"]["anyaccel fast"]["plan"]
        assert row["fast_psnr_db"] is not None, "it is another image"
        assert "speed='fast' is" in text


@pytest.mark.parametrize("dtype", ["bfloat16", None])
def test_variants_load_the_same_weights(dtype: str | None, folder: Path) -> None:
    case = BenchCase(model=str(folder), device="cpu", dtype=dtype)
    stock, ours = make_pipeline(case, "stock eager"), make_pipeline(case, "anyaccel")
    assert isinstance(ours, Portable)
    assert not isinstance(stock, Portable)
    for name in ("unet", "vae", "text_encoder"):
        expected = getattr(stock, name).state_dict()
        assert all(torch.equal(value, expected[key]) for key, value in getattr(ours, name).state_dict().items())
        assert getattr(ours, name).dtype == (torch.bfloat16 if dtype else torch.float32)


@pytest.mark.slow
def test_a_failed_variant_reports_its_error(tmp_path: Path) -> None:
    [row] = run_together([BenchCase(model=str(tmp_path), device="cpu", variants=("stock eager",))], rounds=1)
    assert re.match(r"stock eager failed: .*model_index\.json", row["error"])
    assert "\n" not in row["error"] + row["hint"], "the traceback is in the details"
    assert "Traceback" in row["failed"]["stock eager"]["details"][0]


def test_an_unknown_variant_is_rejected() -> None:
    with pytest.raises(UsageError, match=r"unknown variant 'faster'"):
        run_bench(BenchCase(model="x", variants=("faster",)))


def test_a_case_survives_json() -> None:
    case = BenchCase(model="m", embeds={"prompt_embeds": (1, 2, 3)}, options={"expected_images": 3})
    assert BenchCase.from_dict(json.loads(json.dumps(case.to_dict()))) == case


def make_small_case() -> BenchCase:
    small = {"unet": {"block_out_channels": [32, 32, 64, 64], "layers_per_block": 1}}
    return BenchCase(
        model="stable-diffusion-v1-5/stable-diffusion-v1-5", device="cpu", dtype="float32", random=True, config=small,
        embeds={"prompt_embeds": (1, 77, 768), "negative_prompt_embeds": (1, 77, 768)},
        call={"num_inference_steps": 1, "height": 32, "width": 32},
    )  # fmt: skip


@pytest.mark.parametrize("variant", ["stock eager", "anyaccel"])
def test_torch_is_not_patched_during_a_measurement(variant: str, tmp_path: Path) -> None:
    """A placed pipeline runs eagerly while torch is patched, so its compiled code would not be measured."""
    worker = _BenchWorker({"case": make_small_case().to_dict(), "variant": variant, "folder": str(tmp_path)})
    before, seen = dict(vars(torch)), []
    worker.pipe = lambda **call: seen.append([name for name, value in before.items() if vars(torch)[name] is not value])
    worker.generate()
    assert seen == [[]]


def test_half_precision_noise_is_that_of_stock_diffusers() -> None:
    """Otherwise, the images of the variants cannot be compared."""
    case = replace(make_small_case(), dtype="bfloat16", call=make_small_case().call | {"output_type": "latent"})
    pipes = [make_pipeline(case, variant) for variant in ("stock eager", "anyaccel")]
    stock, placed = (
        pipe(**make_call(case, pipe), generator=torch.Generator().manual_seed(0)).images.float() for pipe in pipes
    )
    assert (stock - placed).abs().max() <= 0.02 * stock.abs().max()


def test_full_size_models_are_created_from_config_files() -> None:
    case = make_small_case()
    pipes = [make_pipeline(case, "stock eager") for _ in range(2)]
    images = [pipe(**make_call(case, pipe), generator=torch.Generator().manual_seed(0)).images for pipe in pipes]
    assert images[0].shape == (1, 3, 32, 32)
    assert torch.equal(*images), "the same seed gives the same weights"
    assert pipes[0].text_encoder is None
