"""Tests for the full-size cases of `benchmarks.models`: their parameter counts, and small versions of their calls."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anyaccel.bench.case import ANYACCEL, OFFLOADED, STOCK, BenchCase
from anyaccel.bench.pipelines import make_call, make_pipeline
from benchmarks.model_cases import CASES, GIB
from benchmarks.models import Part, list_parts, make_batches, read_variants, summarize, write_report

# AutoencoderOobleck of diffusers 0.42 uses the older function.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")

# Parameters of the denoiser in billions.
DENOISER_BILLIONS = {"sd35": 2.24, "sana": 1.60, "audio": 1.06, "inpaint": 2.57, "edit": 3.88, "zimage": 6.15,
                     "wan": 1.42, "hunyuan": 8.33, "ltx2": 18.88, "qwen": 20.43}  # fmt: skip
KL = {"block_out_channels": [8, 8, 8, 8], "norm_num_groups": 4, "layers_per_block": 1}
WAN_VAE = {"base_dim": 8, "num_res_blocks": 1}
SIDE = {"height": 64, "width": 64, "num_inference_steps": 2}
# Config overrides, embedding sizes and call arguments: few layers, the same code.
SMALL: dict[str, tuple[dict[str, Any], dict[int, int], dict[str, Any]]] = {
    "sd35": ({"transformer": {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8,
                              "caption_projection_dim": 16, "joint_attention_dim": 32, "pooled_projection_dim": 64,
                              "dual_attention_layers": [0], "pos_embed_max_size": 96, "sample_size": 8}, "vae": KL},
             {4096: 32, 2048: 64}, SIDE),
    "sana": ({"transformer": {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8,
                              "num_cross_attention_heads": 2, "cross_attention_head_dim": 8,
                              "cross_attention_dim": 16, "caption_channels": 8},
              "vae": {"encoder_block_out_channels": [32] * 6, "decoder_block_out_channels": [32] * 6,
                      "encoder_layers_per_block": [1] * 6, "decoder_layers_per_block": [1] * 6,
                      "attention_head_dim": 4}},
             {2304: 8}, SIDE),
    "audio": ({"transformer": {"num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4,
                               "num_key_value_attention_heads": 2, "cross_attention_dim": 16,
                               "cross_attention_input_dim": 16, "global_states_input_dim": 32, "sample_size": 16,
                               "time_proj_dim": 8},
               "projection_model": {"text_encoder_dim": 16, "conditioning_dim": 16},
               "vae": {"encoder_hidden_size": 4, "decoder_channels": 4, "channel_multiples": [1, 1, 1, 1, 1]}},
              {768: 16}, {"num_inference_steps": 2}),
    "inpaint": ({"unet": {"block_out_channels": [16, 16, 32], "in_channels": 9, "norm_num_groups": 4,
                          "layers_per_block": 1, "attention_head_dim": [2, 2, 4], "cross_attention_dim": 16,
                          "transformer_layers_per_block": [1, 1, 1], "addition_time_embed_dim": 8,
                          "projection_class_embeddings_input_dim": 64}, "vae": KL},
                {2048: 16, 1280: 16}, SIDE),
    "edit": ({"transformer": {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2,
                              "attention_head_dim": 16, "joint_attention_dim": 32, "axes_dims_rope": [4, 4, 4, 4]},
              "vae": {**KL, "norm_num_groups": 4}}, {7680: 32}, SIDE),
    "zimage": ({"transformer": {"n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "dim": 32,
                                "cap_feat_dim": 16, "axes_dims": [8, 4, 4]}, "vae": KL}, {2560: 16}, SIDE),
    "wan": ({"transformer": {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32,
                             "text_dim": 16}, "vae": WAN_VAE}, {4096: 16}, SIDE | {"num_frames": 5}),
    "hunyuan": ({"transformer": {"num_layers": 2, "num_refiner_layers": 1, "num_attention_heads": 2,
                                 "attention_head_dim": 16, "text_embed_dim": 16, "text_embed_2_dim": 8,
                                 "image_embed_dim": 8, "rope_axes_dim": [4, 4, 8]},
                 "vae": {"block_out_channels": [32, 32, 32, 32, 32], "layers_per_block": 1}},
                {3584: 16, 1472: 8}, SIDE | {"num_frames": 5}),
    "ltx2": ({"transformer": {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16,
                              "cross_attention_dim": 32, "caption_channels": 16, "audio_num_attention_heads": 2,
                              "audio_attention_head_dim": 8, "audio_cross_attention_dim": 16},
              "connectors": {"caption_channels": 16, "text_proj_in_factor": 3,
                             "video_connector_num_attention_heads": 2, "video_connector_attention_head_dim": 8,
                             "audio_connector_num_attention_heads": 2, "audio_connector_attention_head_dim": 8},
              "vae": {"block_out_channels": [8, 16, 32, 64], "decoder_block_out_channels": [8, 16, 32],
                      "layers_per_block": [1] * 5, "decoder_layers_per_block": [1] * 4},
              "audio_vae": {"ch_mult": [1, 1, 1], "num_res_blocks": 1}, "vocoder": {"hidden_channels": 32}},
             {188160: 48}, SIDE | {"num_frames": 9}),
    "qwen": ({"transformer": {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16,
                              "joint_attention_dim": 16, "axes_dims_rope": [4, 6, 6]}, "vae": WAN_VAE},
             {3584: 16}, SIDE),
}  # fmt: skip


def make_small(name: str, device: str = "cpu") -> BenchCase:
    config, sizes, call = SMALL[name]
    case = CASES[name]
    embeds = {key: (*shape[:-1], sizes.get(shape[-1], shape[-1])) for key, shape in case.embeds.items()}
    return replace(
        case,
        device=device,
        dtype="float32",
        random=True,
        config=config,
        embeds=embeds,
        images=dict.fromkeys(case.images, (64, 64)),
        call=case.call | call,
        options={"memory": "resident", "vae_tiling": False},
    )


def run_small(name: str, variant: str) -> dict[str, torch.Tensor]:
    case = make_small(name)
    pipe = make_pipeline(case, variant)
    with torch.no_grad():
        return dict(pipe(**make_call(case, pipe), generator=torch.Generator().manual_seed(0)))


def test_every_case_has_its_memory_and_a_small_version() -> None:
    assert set(CASES) == set(GIB) == set(SMALL) == set(DENOISER_BILLIONS)


@pytest.mark.parametrize("name", sorted(CASES))
def test_parameter_counts(name: str) -> None:
    from anyaccel.bench.pipelines import _make_random

    pipe = _make_random(replace(CASES[name], random=True), torch.device("meta"))
    denoiser = pipe.components.get("transformer") or pipe.components["unet"]
    assert sum(weight.numel() for weight in denoiser.parameters()) / 1e9 == pytest.approx(
        DENOISER_BILLIONS[name], abs=0.01
    )
    assert not [key for key, value in pipe.components.items() if "text_encoder" in key and value is not None]


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(CASES))
def test_the_small_version_of_a_call_gives_the_same_result(name: str) -> None:
    expected, actual = run_small(name, STOCK[0]), run_small(name, "anyaccel")
    for key, value in expected.items():
        assert torch.isfinite(value).all()
        assert torch.equal(actual[key], value), key


@pytest.mark.parametrize("name", ["zimage", "hunyuan"])  # hunyuan indexes with a mask
def test_the_plan_predicts_the_memory_of_a_call_that_obviously_fits(name: str) -> None:
    from anyaccel.bench.worker import _forecast

    case = make_small(name)
    pipe = make_pipeline(case, "anyaccel")
    forecast = _forecast(pipe, make_call(case, pipe))["forecast"]
    weights = sum(forecast["components"].values())
    assert set(forecast["components"]) == {"transformer", "vae"}
    assert weights < forecast["peak_bytes"] <= forecast["recorded_peak_bytes"]


def test_input_images_and_masks() -> None:
    call = make_call(make_small("inpaint"), None)
    assert (call["image"].size, call["image"].mode) == ((64, 64), "RGB")
    assert (call["mask_image"].getpixel((0, 0)), call["mask_image"].getpixel((63, 63))) == (0, 255)
    mask = make_call(make_small("sana"), None)["prompt_attention_mask"]
    assert mask.dtype == torch.int64
    assert mask.all()


def test_batches_fit_into_the_memory_and_compare_variants_side_by_side() -> None:
    parts = list(list_parts(list(CASES), 132))
    batches = make_batches(parts, 132, 16)
    assert sorted(part for batch in batches for part in batch) == sorted(parts)
    for batch in batches:
        assert sum(part.gib for part in batch) <= 132
        assert sum(len(part.variants) for part in batch) <= 16
        assert len({OFFLOADED in part.variants for part in batch}) == 1
    for name in CASES:
        assert any({"stock compiled", "anyaccel"} <= set(part.variants) for part in parts if part.name == name)
    assert list(list_parts(["qwen:anyaccel,stock eager"], 120)) == [
        Part("qwen", ("anyaccel",)),
        Part("qwen", ("stock eager",)),
    ]


def test_a_row_has_ratios_and_the_error_of_the_forecast() -> None:
    results: dict[str, dict[str, Any]] = {name: {"median_s": 2.0, "file": ""} for name in STOCK}
    forecast = {"peak_bytes": 110, "recorded_peak_bytes": 120}
    for name in ANYACCEL:
        results[name] = {"median_s": 1.0, "file": "", "peak_bytes": 100, "held_bytes": 160, "forecast": forecast}
    row = summarize("sana", results)
    ours = row["variants"]["anyaccel"]
    assert ours["against stock compiled"] == 2.0
    assert ours["forecast_error_percent"] == {"peak": 10.0, "with captured graphs": -25.0}
    assert row["model"] == "sana-1600m-1024px"
    assert "not_compared" in ours, "there is no image"


def test_a_second_run_adds_variants_and_keeps_other_cases(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    first = {"stock compiled": {"median_s": 2.0, "file": "", "psnr_db": None}}
    write_report(path, {"commit": "a"}, {name: summarize(name, first) for name in ("sana", "wan")})
    variants = read_variants(path)["sana"] | {"anyaccel": {"median_s": 1.0, "file": ""}}
    write_report(path, {"commit": "a"}, {"sana": summarize("sana", variants)})
    rows = {row["case"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows["sana"]["variants"]) == ["stock compiled", "anyaccel"]
    assert rows["sana"]["variants"]["anyaccel"]["against stock compiled"] == 2.0
    assert list(rows["wan"]["variants"]) == ["stock compiled"]
