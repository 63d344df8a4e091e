"""Cases of `benchmarks.models`: one full-size model of each kind."""

from pathlib import Path

from anyaccel.bench.case import BenchCase

__all__ = ["CASES", "GIB", "MODELS"]

MODELS = Path(__file__).parent / "models"
SIDE = {"height": 1024, "width": 1024}
CASES = {
    "sd35": BenchCase(
        model=str(MODELS / "stable-diffusion-3.5-medium"),
        title="Stable Diffusion 3.5 medium, 1024², 28 steps, guidance",
        embeds={"prompt_embeds": (1, 333, 4096), "negative_prompt_embeds": (1, 333, 4096),
                "pooled_prompt_embeds": (1, 2048), "negative_pooled_prompt_embeds": (1, 2048)},
        call={"num_inference_steps": 28, "guidance_scale": 4.5, **SIDE}),
    "sana": BenchCase(
        model=str(MODELS / "sana-1600m-1024px"), title="Sana 1.6B, 1024², 20 steps, guidance",
        embeds={"prompt_embeds": (1, 300, 2304), "negative_prompt_embeds": (1, 300, 2304),
                "prompt_attention_mask": (1, 300), "negative_prompt_attention_mask": (1, 300)},
        call={"num_inference_steps": 20, "guidance_scale": 4.5, "use_resolution_binning": False,
              "negative_prompt": None, **SIDE}),
    "audio": BenchCase(
        model=str(MODELS / "stable-audio-open-1.0"), title="Stable Audio Open, 47 s, 50 steps, guidance",
        embeds={"prompt_embeds": (1, 128, 768), "negative_prompt_embeds": (1, 128, 768),
                "attention_mask": (1, 128), "negative_attention_mask": (1, 128)},
        call={"num_inference_steps": 50, "guidance_scale": 7.0}),
    "inpaint": BenchCase(
        model="stabilityai/sdxl-turbo", title="SDXL inpainting, 1024², 20 steps, guidance",
        pipeline="StableDiffusionXLInpaintPipeline", config={"unet": {"in_channels": 9}},
        scheduler="EulerDiscreteScheduler", images={"image": (1024, 1024), "mask_image": (1024, 1024)},
        embeds={"prompt_embeds": (1, 77, 2048), "negative_prompt_embeds": (1, 77, 2048),
                "pooled_prompt_embeds": (1, 1280), "negative_pooled_prompt_embeds": (1, 1280)},
        call={"num_inference_steps": 20, "guidance_scale": 8.0, "strength": 1.0, **SIDE}),
    "edit": BenchCase(
        model="black-forest-labs/FLUX.2-klein-4B", title="FLUX.2-klein-4B edit of an image, 1024², 4 steps",
        images={"image": (1024, 1024)}, embeds={"prompt_embeds": (1, 512, 7680)},
        call={"num_inference_steps": 4, "guidance_scale": 1.0, **SIDE}),
    "zimage": BenchCase(
        model=str(MODELS / "z-image-turbo"), title="Z-Image-Turbo, 1024², 9 steps", offload="layer",
        embeds={"prompt_embeds": (1, 128, 2560)}, call={"num_inference_steps": 9, "guidance_scale": 0.0, **SIDE}),
    "wan": BenchCase(
        model=str(MODELS / "wan2.1-t2v-1.3b"), title="Wan 2.1 T2V 1.3B, 480x832, 33 frames, 20 steps, guidance",
        stock_compile=("denoiser",),
        embeds={"prompt_embeds": (1, 512, 4096), "negative_prompt_embeds": (1, 512, 4096)},
        call={"num_inference_steps": 20, "guidance_scale": 5.0, "height": 480, "width": 832, "num_frames": 33}),
    "hunyuan": BenchCase(
        model=str(MODELS / "hunyuanvideo-1.5-480p-t2v"),
        title="HunyuanVideo 1.5, 480x848, 33 frames, 4 steps, guidance",
        stock_compile=("blocks",), offload="layer",
        embeds={f"{sign}prompt_embeds{which}": shape for sign in ("", "negative_") for which, shape in
                {"": (1, 256, 3584), "_mask": (1, 256), "_2": (1, 256, 1472), "_mask_2": (1, 256)}.items()},
        call={"num_inference_steps": 4, "height": 480, "width": 848, "num_frames": 33}),
    "ltx2": BenchCase(
        model=str(MODELS / "ltx-2"), title="LTX-2 video and audio, 512x768, 121 frames, 6 steps, guidance",
        stock_compile=("blocks",),
        embeds={"prompt_embeds": (1, 256, 188160), "negative_prompt_embeds": (1, 256, 188160),
                "prompt_attention_mask": (1, 256), "negative_prompt_attention_mask": (1, 256)},
        # Other kinds of guidance, which LTX-2.3 uses, are off.
        call={"num_inference_steps": 6, "guidance_scale": 4.0, "audio_guidance_scale": 4.0, "stg_scale": 0.0,
              "audio_stg_scale": 0.0, "modality_scale": 1.0, "audio_modality_scale": 1.0, "guidance_rescale": 0.0,
              "audio_guidance_rescale": 0.0, "height": 512, "width": 768, "num_frames": 121}),
    "qwen": BenchCase(
        model=str(MODELS / "qwen-image"), title="Qwen-Image, 1024², 6 steps, guidance",
        stock_compile=("blocks", "vae"), offload="layer",
        embeds={"prompt_embeds": (1, 256, 3584), "negative_prompt_embeds": (1, 256, 3584),
                "prompt_embeds_mask": (1, 256), "negative_prompt_embeds_mask": (1, 256)},
        call={"num_inference_steps": 6, "true_cfg_scale": 4.0, **SIDE}),
}  # fmt: skip
"""The cases; large models take fewer steps than usual, so that an image takes at most 10 s on an H200."""

GIB = {"sd35": 10, "sana": 8, "audio": 7, "inpaint": 11, "edit": 14, "zimage": 18, "wan": 11, "hunyuan": 66,
       "ltx2": 54, "qwen": 47}  # fmt: skip
"""Device memory that one process of a case requires: the forecast with captured graphs, and a reserve."""
