"""Code that is known to run correctly on hardware: any error reported for it is a false alarm."""

from __future__ import annotations

import torch

from tests.calibration import good_snippets
from tests.calibration.case import Case, Snippet

__all__ = ["KNOWN_GOOD"]

_DIFFUSERS = "https://github.com/huggingface/diffusers/"
_NEURON = _DIFFUSERS + "pull/13289"
_GAUDI = _DIFFUSERS + "pull/11328"
_MPS = "https://huggingface.co/docs/diffusers/optimization/mps"


def _good(name: str, thread: str, says: str, run: Snippet, product: str | None = None) -> Case:
    return Case(name, name.split("-")[0], None, thread, says, run, product)


KNOWN_GOOD = (
    _good(
        "neuron-stable-diffusion-xl",
        _NEURON,
        "SDXL was validated on Trainium.",
        good_snippets.generate_with("stable-diffusion-xl"),
    ),
    _good(
        "neuron-pixart-alpha", _NEURON, "PixArt was validated on Trainium.", good_snippets.generate_with("pixart-alpha")
    ),
    _good(
        "neuron-flux-2-klein", _NEURON, "FLUX.2-klein runs on one core.", good_snippets.generate_with("flux-2-klein")
    ),
    _good(
        "neuron-cpu-noise",
        _NEURON,
        "Noise is drawn on the CPU and moved.",
        good_snippets.move_cpu_noise,
    ),
    _good(
        "neuron-cpu-timesteps",
        _DIFFUSERS + "pull/13718",
        "With timesteps on the CPU and set_begin_index(0), the loop runs.",
        good_snippets.step_with_cpu_timesteps,
    ),
    _good("neuron-token-ids", _NEURON, "The text encoders of SDXL accept int64 IDs.", good_snippets.embed_tokens),
    _good(
        "neuron-bfloat16",
        _NEURON,
        "The validated pipelines ran in bfloat16.",
        good_snippets.run_layer_in(torch.bfloat16),
    ),
    _good("mps-stable-diffusion", _MPS, "One image per call works.", good_snippets.generate_with("stable-diffusion")),
    _good("mps-float16", _MPS, "The examples use float16.", good_snippets.run_layer_in(torch.float16)),
    _good(
        "mps-ddim",
        _DIFFUSERS + "issues/501",
        "Text to image works with DDIM.",
        good_snippets.generate_with_scheduler("DDIMScheduler", "stable-diffusion"),
    ),
    _good(
        "mps-pndm",
        _DIFFUSERS + "issues/501",
        "Text to image works with PNDM.",
        good_snippets.generate_with_scheduler("PNDMScheduler", "stable-diffusion"),
    ),
    _good(
        "mps-image-to-image",
        _DIFFUSERS + "issues/501",
        "Image to image works with DDIM.",
        good_snippets.generate_with_scheduler("DDIMScheduler", "stable-diffusion-image-to-image"),
    ),
    _good(
        "mps-stable-video-diffusion",
        _DIFFUSERS + "pull/6220",
        "Running the pipeline in float32 works.",
        good_snippets.generate_with("stable-video-diffusion"),
    ),
    _good(
        "mps-model-offload",
        _DIFFUSERS + "issues/14438",
        "SDXL with model offload and without attention slicing gives a valid image.",
        good_snippets.offload_sdxl,
    ),
    _good(
        "mps-contiguous-attention",
        "https://github.com/pytorch/pytorch/issues/181133",
        "With contiguous inputs the error is 8e-7.",
        good_snippets.attend_to_contiguous_inputs,
    ),
    _good(
        "mps-conv-transpose3d",
        "https://github.com/pytorch/pytorch/pull/154696",
        "ConvTranspose3D runs in float32 on macOS 14 and 15.",
        good_snippets.upsample_video,
    ),
    _good(
        "mps-unet-layers",
        "https://github.com/zjx0101/ObjectClear/pull/32",
        "Attention, Conv2d, GroupNorm and randn_tensor with a CPU generator were verified.",
        good_snippets.run_unet_layers,
    ),
    _good(
        "mps-rotary", _DIFFUSERS + "pull/12665", "A rotary embedding in float32 works.", good_snippets.rotate_in_float32
    ),
    _good(
        "mps-complex64-rotary",
        "https://github.com/google/gemma_pytorch/issues/11",
        "torch supports complex tensors on MPS since 2.3, and rotary embeddings use them.",
        good_snippets.rotate_in_complex64,
    ),
    _good(
        "hpu-sana",
        _GAUDI,
        "Sana runs in bfloat16 with .to('hpu'), and the example passes no generator.",
        good_snippets.generate_with("sana", torch.bfloat16, generator=None),
    ),
    _good(
        "hpu-flux",
        "https://huggingface.co/docs/diffusers/optimization/habana",
        "FLUX runs in bfloat16 with .to('hpu').",
        good_snippets.generate_with("flux", torch.bfloat16),
    ),
    _good(
        "hpu-batch",
        "https://github.com/huggingface/optimum-habana/pull/1682",
        "Stable Diffusion 3 was measured in batches of 1 to 8.",
        good_snippets.generate_with("stable-diffusion-3", num_images_per_prompt=2),
    ),
    _good(
        "hpu-real-rotary",
        "https://github.com/vllm-project/vllm-gaudi/pull/1617",
        "A real-valued rotary embedding works.",
        good_snippets.rotate_in_real_numbers,
    ),
    _good(
        "hpu-gaudi1-position-ids",
        "https://github.com/huggingface/transformers/pull/36424",
        "int32 position IDs work on first-generation Gaudi.",
        good_snippets.fill_position_ids_in_int32,
        "gaudi1",
    ),
    _good(
        "xpu-inpaint-float16",
        _DIFFUSERS + "pull/11264",
        "Inpainting in float16 gives the same image as an A100.",
        good_snippets.generate_with("stable-diffusion-inpaint", torch.float16),
        "max-1550",
    ),
    _good(
        "xpu-animate-diff",
        _DIFFUSERS + "pull/9399",
        "The AnimateDiff tests pass on a Max 1550.",
        good_snippets.generate_with("animate-diff"),
        "max-1550",
    ),
    _good(
        "xpu-flux",
        _DIFFUSERS + "pull/11245",
        "FLUX generates an image like that of an A100.",
        good_snippets.generate_with("flux", torch.bfloat16),
        "max-1550",
    ),
    _good(
        "xpu-layerwise-casting",
        _DIFFUSERS + "pull/11406",
        "All 46 tests of layerwise casting, with weights stored in fp8, passed on XPU.",
        good_snippets.store_layers_in_fp8,
    ),
    _good(
        "xpu-b580-gradient-scaler",
        "https://github.com/pytorch/pytorch/issues/147731",
        "GradScaler works on the newer Arc, which has float64.",
        good_snippets.scale_gradients,
        "arc-b580",
    ),
    _good(
        "npu-flux",
        _DIFFUSERS + "pull/10123",
        "FLUX works once its rotary embedding is in float32.",
        good_snippets.generate_with("flux", torch.bfloat16),
    ),
    _good(
        "npu-stable-diffusion",
        "https://github.com/Comfy-Org/ComfyUI/pull/10050",
        "Stable Diffusion 1.5 generates an image in 40 s.",
        good_snippets.generate_with("stable-diffusion"),
    ),
    _good(
        "npu-complex64-rotary",
        "https://github.com/modelscope/DiffSynth-Studio/pull/1191",
        "Wan's rotary embedding runs in complex64.",
        good_snippets.rotate_in_complex64,
    ),
    _good(
        "npu-token-ids",
        _DIFFUSERS + "issues/10428",
        "The kernels' dtype list includes DT_INT64.",
        good_snippets.embed_tokens,
    ),
    _good(
        "mlu-real-rotary",
        "https://github.com/ModelTC/LightX2V/pull/1163",
        "Z-Image runs with a real-valued rotary embedding.",
        good_snippets.rotate_in_real_numbers,
    ),
    _good(
        "mlu-bfloat16",
        "https://github.com/huggingface/transformers/pull/44381",
        "MLU devices support bfloat16.",
        good_snippets.run_layer_in(torch.bfloat16),
        "mlu590",
    ),
    _good(
        "mlu-training",
        _DIFFUSERS + "issues/14779",
        "A training test of diffusers runs on MLU.",
        good_snippets.train_one_step,
        "mlu590",
    ),
    _good(
        "mlu-token-ids",
        "https://github.com/huggingface/transformers/pull/29627",
        "Transformers models run as on CUDA, including int64 IDs.",
        good_snippets.embed_tokens,
    ),
)
