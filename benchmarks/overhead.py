"""Overhead of `place`: the same pipeline object called alternately with and without anyaccel's hooks.

    python -m benchmarks.overhead cpu        a mid-size UNet and a mid-size transformer
    python -m benchmarks.overhead cuda       SDXL and FLUX.1-schnell at full size, random weights, eager

Writes benchmarks/results/overhead_DEVICE.json; `--commit` and `--out` are for a copy without .git, `--pairs` for a
machine with noisy timings. The plain call uses the original class's `__call__` without hooks, the placed call has
them. Adding and removing hooks is not timed. The order alternates.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import diffusers
import torch

import anyaccel
from anyaccel.backends.device import this_machine
from anyaccel.forward_overrides import Slot, remove_override
from anyaccel.runtime.introspection import find_components, find_models, plain_class
from anyaccel.runtime.pipeline import place
from anyaccel.runtime.placement_state import find_placement
from anyaccel.runtime.workarounds.model_inputs import set_input_adapters
from benchmarks.provenance import read_commit

RESULTS = Path(__file__).parent / "results"
Make = Callable[[torch.device], tuple[Any, dict[str, Any]]]


LIBRARY: Any = diffusers


def build(device: torch.device, class_name: str, **config: Any) -> Any:
    """Create a model with random weights on its device."""
    with torch.device(device):
        return getattr(LIBRARY, class_name)(**config).eval()


def make_unet_pipeline(device: torch.device) -> tuple[Any, dict[str, Any]]:
    """Return a Stable Diffusion pipeline with about 60 million parameters and no text encoder, and its call."""
    unet = build(device, "UNet2DConditionModel",
        sample_size=32, block_out_channels=(64, 128, 256), layers_per_block=2, cross_attention_dim=256,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=8,
    )  # fmt: skip
    vae = build(device, "AutoencoderKL",
        block_out_channels=(32, 64, 64, 64), latent_channels=4, norm_num_groups=32,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    )  # fmt: skip
    pipe = LIBRARY.StableDiffusionPipeline(
        vae=vae,
        unet=unet,
        text_encoder=None,
        tokenizer=None,
        scheduler=LIBRARY.DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    embedding = torch.randn(1, 16, 256)
    return pipe, {
        "prompt_embeds": embedding, "negative_prompt_embeds": torch.zeros_like(embedding), "num_inference_steps": 4,
        "height": 128, "width": 128, "output_type": "latent",
    }  # fmt: skip


def make_transformer_pipeline(device: torch.device, full_size: bool = False) -> tuple[Any, dict[str, Any]]:
    """Return a FLUX pipeline without text encoders, mid-size or as large as FLUX.1-schnell, and its call."""
    small: dict[str, Any] = {} if full_size else {
        "num_layers": 3, "num_single_layers": 6, "attention_head_dim": 64, "num_attention_heads": 8,
        "joint_attention_dim": 512, "pooled_projection_dim": 256, "axes_dims_rope": (8, 28, 28),
    }  # fmt: skip
    transformer = build(device, "FluxTransformer2DModel", guidance_embeds=False, **small)
    channels = (128, 256, 512, 512) if full_size else (32, 64, 64, 64)
    vae = build(device, "AutoencoderKL",
        block_out_channels=channels, latent_channels=16, layers_per_block=2, use_quant_conv=False,
        use_post_quant_conv=False, down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, shift_factor=0.1159, scaling_factor=0.3611,
    )  # fmt: skip
    pipe = LIBRARY.FluxPipeline(
        scheduler=LIBRARY.FlowMatchEulerDiscreteScheduler(), vae=vae, text_encoder=None, tokenizer=None,
        text_encoder_2=None, tokenizer_2=None, transformer=transformer,
    )  # fmt: skip
    width, pooled = transformer.config.joint_attention_dim, transformer.config.pooled_projection_dim
    length, side = (256, 1024) if full_size else (64, 128)
    return pipe, {
        "prompt_embeds": torch.randn(1, length, width), "pooled_prompt_embeds": torch.randn(1, pooled),
        "num_inference_steps": 4, "height": side, "width": side, "guidance_scale": 0.0,
        "output_type": "pt" if full_size else "latent",
    }  # fmt: skip


def make_schnell_pipeline(device: torch.device) -> tuple[Any, dict[str, Any]]:
    """Return FLUX.1-schnell at full size, and its call."""
    return make_transformer_pipeline(device, full_size=True)


def make_sdxl_pipeline(device: torch.device) -> tuple[Any, dict[str, Any]]:
    """Return full-size SDXL without text encoders, and a call with 30 steps and guidance at 1024²."""
    unet = build(device, "UNet2DConditionModel",
        sample_size=128, in_channels=4, out_channels=4, block_out_channels=(320, 640, 1280), layers_per_block=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 10), attention_head_dim=(5, 10, 20), cross_attention_dim=2048,
        addition_embed_type="text_time", addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
        use_linear_projection=True,
    )  # fmt: skip
    vae = build(device, "AutoencoderKL",
        block_out_channels=(128, 256, 512, 512), latent_channels=4, layers_per_block=2, force_upcast=False,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    )  # fmt: skip
    pipe = LIBRARY.StableDiffusionXLPipeline(
        vae=vae, text_encoder=None, text_encoder_2=None, tokenizer=None, tokenizer_2=None, unet=unet,
        scheduler=LIBRARY.EulerDiscreteScheduler(), add_watermarker=False,
    )  # fmt: skip
    prompt, pooled = torch.randn(1, 77, 2048), torch.randn(1, 1280)
    return pipe, {
        "prompt_embeds": prompt, "negative_prompt_embeds": torch.zeros_like(prompt), "pooled_prompt_embeds": pooled,
        "negative_pooled_prompt_embeds": torch.zeros_like(pooled), "num_inference_steps": 30, "height": 1024,
        "width": 1024, "output_type": "pt",
    }  # fmt: skip


def measure(name: str, make: Make, device: str, dtype: torch.dtype, count: int) -> dict[str, Any]:
    """Time the plain and the placed call alternately; return the ratio of their medians."""
    opened = anyaccel.open_device(device)
    pipe, call = make(opened.torch_device)
    pipe = place(pipe, device, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    call = {key: value.to(opened.torch_device, dtype) if isinstance(value, torch.Tensor) else value
            for key, value in call.items()}  # fmt: skip
    original_class: Any = plain_class(pipe)
    placement = find_placement(pipe)
    assert placement is not None

    def time_s(placed: bool) -> float:
        components = find_components(pipe)
        for module in [module for model in find_models(pipe).values() for module in model.modules()]:
            remove_override(module, Slot.INPUTS)
        if placed:
            set_input_adapters(components, placement.plan, placement.device)
        arguments = {**call, "generator": torch.Generator("cpu").manual_seed(0)}
        anyaccel.synchronize(device)
        start = time.perf_counter()
        pipe(**arguments) if placed else original_class.__call__(pipe, **arguments)
        anyaccel.synchronize(device)
        return time.perf_counter() - start

    for _ in range(3):
        time_s(True), time_s(False)
    pairs = []
    gc.disable()  # a garbage collection would distort the time of one call
    for index in range(count):
        first = time_s(bool(index % 2))
        second = time_s(not index % 2)
        pairs.append((second, first) if index % 2 else (first, second))
    gc.enable()
    plain, placed = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratios = sorted(placed_s / plain_s for plain_s, placed_s in pairs)
    parameters = sum(p.numel() for part in find_components(pipe).values() if isinstance(part, torch.nn.Module)
                     for p in part.parameters())  # fmt: skip
    result = {
        "case": name, "dtype": str(dtype), "parameters": parameters, "pairs": count, "plain_s": round(plain, 5),
        "placed_s": round(placed, 5), "ratio_of_medians": round(placed / plain, 4),
        "median_ratio_of_pairs": round(statistics.median(ratios), 4),
        "middle_half_of_ratios": [round(ratios[count // 4], 4), round(ratios[3 * count // 4], 4)],
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    return result


def main() -> None:
    """Measure on the device of the command line and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("device")
    parser.add_argument("--commit", help="the commit of a copy without .git")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--pairs", type=int, default=30)
    options = parser.parse_args()
    device, folder, commit = options.device, options.out, options.commit or read_commit()
    opened = anyaccel.open_device(device)
    cases: list[tuple[str, Make, torch.dtype]]
    if opened.sheet.torch_name == "cpu":
        cases = [("mid-size UNet", make_unet_pipeline, torch.float32),
                 ("mid-size transformer", make_transformer_pipeline, torch.float32)]  # fmt: skip
    else:
        cases = [
            ("SDXL 1024², 30 steps, eager", make_sdxl_pipeline, torch.bfloat16),
            ("FLUX.1-schnell 1024², 4 steps, eager", make_schnell_pipeline, torch.bfloat16),
        ]
    machine = this_machine()
    result = {
        "what": "placed by anyaccel compared to plain diffusers, eager, the same pipeline object, alternating",
        "device": opened.driver.device_name(opened.index),
        "evidence": "hardware",
        "cases": [measure(name, make, device, dtype, options.pairs) for name, make, dtype in cases],
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit,
        "system": f"{machine.system} {machine.architecture}",
        "versions": dict(machine.versions) | {"diffusers": diffusers.__version__},
    }
    folder.mkdir(exist_ok=True)
    (folder / f"overhead_{opened.sheet.name}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
