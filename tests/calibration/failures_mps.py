"""Failures of operations on Apple silicon: dtypes, kernels, sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from anyaccel.recipes import recipes
from anyaccel.recipes.lazy_modules import diffusers
from tests.calibration import snippets
from tests.calibration.case import Case

_PYTORCH = "https://github.com/pytorch/pytorch/issues/"
_DIFFUSERS = "https://github.com/huggingface/diffusers/"
_COMFYUI = "https://github.com/Comfy-Org/ComfyUI/issues/"


def _pass_nan_with_beta_zero(device: torch.device) -> None:
    query = torch.ones(1, 8, 16, device=device, dtype=torch.bfloat16)
    key = torch.ones(1, 16, 24, device=device, dtype=torch.bfloat16)
    ignored = torch.full((1, 1, 1), float("nan"), device=device, dtype=torch.bfloat16)
    torch.baddbmm(ignored, query, key, alpha=0.088, beta=0)


def _score_without_a_mask(device: torch.device) -> None:
    attention = diffusers.models.attention_processor.Attention(query_dim=8, heads=2, dim_head=4).to(device)
    attention.get_attention_scores(torch.ones(2, 6, 4, device=device), torch.ones(2, 6, 4, device=device))


def _slice_attention(device: torch.device) -> None:
    recipe = recipes()["stable-diffusion-xl"]
    pipe: Any = recipe.make()
    pipe.to(device)
    pipe.enable_attention_slicing()
    pipe(**recipe.call())


def _attend_to_permuted_inputs(device: torch.device) -> None:
    query, key, value = (torch.randn(84, 3, 3, 64).to(device).permute(0, 2, 1, 3) for _ in range(3))
    functional.scaled_dot_product_attention(query, key, value)


def _attend_to_a_long_video(device: torch.device) -> None:
    # With one element per head there are still 2**31 scores, but they take seconds instead of minutes.
    query = torch.zeros(1, 2, 2**15, 1, device=device)
    key = torch.zeros(1, 2, 2**15 + 512, 1, device=device)
    functional.scaled_dot_product_attention(query, key, key)


def _attend_at_768_pixels(device: torch.device) -> None:
    query = torch.zeros(2, 8, 96 * 96, 1, device=device)
    functional.scaled_dot_product_attention(query, query, query)


def _cast_layers_to_fp8(device: torch.device) -> None:
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.unet.to(device)
    pipe.unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def _make_fp8_e5m2(device: torch.device) -> None:
    torch.zeros(8, device=device).to(torch.float8_e5m2)


def _multiply_in_complex128(device: torch.device) -> None:
    rotation = torch.polar(torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)).to(device)
    rotation * rotation


def _upsample_video_in_half(device: torch.device) -> None:
    layer = torch.nn.ConvTranspose3d(4, 4, 3, stride=2).to(device, torch.float16)
    layer(torch.ones(1, 4, 3, 4, 4, device=device, dtype=torch.float16))


def _upsample_video_in_autocast(device: torch.device) -> None:
    layer = torch.nn.ConvTranspose3d(4, 4, 3, stride=2).to(device)
    with torch.autocast(device.type, dtype=torch.float16):
        layer(torch.ones(1, 4, 3, 4, 4, device=device))


def _multiply_in_int8(device: torch.device) -> None:
    weights = torch.ones(32, 32, dtype=torch.int8, device=device)
    torch._int_mm(weights, weights)


def _generate_two_images(device: torch.device) -> None:
    recipe = recipes()["stable-diffusion"]
    pipe: Any = recipe.make()
    pipe.to(device)(**recipe.call() | {"prompt": ["a lighthouse", "a harbour"]})


CASES = (
    Case(
        name="mps-baddbmm-beta-0",
        device="mps",
        effect="wrong",
        thread=_PYTORCH + "194442",
        says="baddbmm with beta=0 propagates a NaN of its input: every element is NaN, none on the CPU.",
        run=_pass_nan_with_beta_zero,
        limit="baddbmm",
    ),
    Case(
        name="mps-attention-scores-nan",
        device="mps",
        effect="wrong",
        thread=_DIFFUSERS + "pull/13701",
        says="get_attention_scores without a mask gave NaN in 30 of 30 trials: it passes torch.empty to baddbmm.",
        run=_score_without_a_mask,
        site="diffusers/models/attention_processor.py",
        limit="baddbmm",
    ),
    Case(
        name="mps-attention-slicing-black",
        device="mps",
        effect="wrong",
        thread=_DIFFUSERS + "issues/14438",
        says="SDXL with enable_attention_slicing gives a black image.",
        run=_slice_attention,
        site="diffusers/models/attention_processor.py",
        limit="baddbmm",
    ),
    Case(
        name="mps-permuted-attention",
        device="mps",
        effect="wrong",
        thread=_PYTORCH + "181133",
        says="Attention with permuted query, key and value is off by 3.6, with heads of 64 and three tokens.",
        run=_attend_to_permuted_inputs,
        limit="attention",
    ),
    Case(
        name="mps-scores-past-2-31",
        device="mps",
        effect="wrong",
        thread=_COMFYUI + "14837",
        says="Attention with about 2**31 scores corrupts the image: no crash, no exception.",
        run=_attend_to_a_long_video,
        limit="attention_scores",
    ),
    Case(
        name="mps-ndarray-past-2-32-bytes",
        device="mps",
        effect="error",
        thread="https://github.com/invoke-ai/InvokeAI/issues/2444",
        says="768 x 768 pixels abort on a Mac with 128 GB: an array of 5.4 GB exceeds 2**32 bytes.",
        run=_attend_at_768_pixels,
    ),
    Case(
        name="mps-fp8-weights",
        device="mps",
        effect="error",
        thread=_COMFYUI + "6859",
        says="A model with fp8 weights: the MPS backend does not have support for that dtype.",
        run=snippets.load_weights_in_fp8,
        strict_error="TypeError",
        limit="float8_e4m3fn",
    ),
    Case(
        name="mps-layerwise-casting",
        device="mps",
        effect="error",
        thread=_DIFFUSERS + "pull/14073",
        says="Layerwise casting raises: Cannot convert a MPS Tensor to float8_e4m3fn dtype.",
        run=_cast_layers_to_fp8,
        strict_error="TypeError",
        site="diffusers/hooks/layerwise_casting.py",
        limit="float8_e4m3fn",
    ),
    Case(
        name="mps-fp8-e5m2",
        device="mps",
        effect="error",
        thread=_PYTORCH + "132624",
        says="Trying to convert Float8_e5m2 to the MPS backend but it does not have support for that dtype.",
        run=_make_fp8_e5m2,
        strict_error="TypeError",
        limit="float8_e5m2",
    ),
    Case(
        name="mps-complex128",
        device="mps",
        effect="error",
        thread=_PYTORCH + "176981",
        says="A complex128 tensor can be moved, but operations raise: Undefined type ComplexDouble.",
        run=_multiply_in_complex128,
        limit="complex128",
    ),
    Case(
        name="mps-conv-transpose3d-half",
        device="mps",
        effect="error",
        thread="https://github.com/pytorch/pytorch/pull/188732",
        says="ConvTranspose 3D with BF16 or FP16 types is not supported on MPS.",
        run=_upsample_video_in_half,
        strict_error="RuntimeError",
        limit="conv_transpose3d",
    ),
    Case(
        name="mps-conv-transpose3d-autocast",
        device="mps",
        effect="error",
        thread=_PYTORCH + "160332",
        says="Autocast runs ConvTranspose3d in half precision, which MPS rejects.",
        run=_upsample_video_in_autocast,
        strict_error="RuntimeError",
        limit="conv_transpose3d",
    ),
    Case(
        name="mps-int8-products",
        device="mps",
        effect="error",
        thread="https://github.com/MiniMax-AI/MiniMax-H3/issues/56",
        says="int8 quantization needs aten::_int_mm, which MPS lacks.",
        run=_multiply_in_int8,
        limit="int_mm",
    ),
    Case(
        name="mps-two-prompts",
        device="mps",
        effect="wrong",
        thread=_DIFFUSERS + "issues/363",
        says="Two prompts in one call give noise.",
        run=_generate_two_images,
        site="diffusers/pipelines/stable_diffusion/pipeline_stable_diffusion.py",
    ),
    Case(
        name="mps-prx-rotary",
        device="mps",
        effect="error",
        thread=_DIFFUSERS + "pull/12665",
        says="The rotary embedding of PRX is computed in float64 on the device; float32 does not degrade quality.",
        run=snippets.rotate_in_float64_einsum,
        strict_error="TypeError",
        limit="float64",
    ),
    Case(
        name="mps-wan-i2v-mask-on-cuda",
        device="mps",
        effect="error",
        thread=_DIFFUSERS + "pull/14765",
        says="Wan's get_i2v_mask has device='cuda' as its default and crashes on NPU, XPU and MPS.",
        run=snippets.create_mask_on_cuda,
        strict_error="AssertionError",
    ),
)
