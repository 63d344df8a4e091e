"""Usages of other pipelines: video, audio, editing, several stages, modular."""

from __future__ import annotations

import copy
from typing import Any

import diffusers
import diffusers.modular_pipelines
import torch

from anyaccel.recipes import recipes
from tests.differential.session import HALF_PRECISION, Session, as_array, usage
from tests.differential.usages.calls import generator, generators, simple

GROUP = "other pipelines"
modular: Any = diffusers.modular_pipelines

for recipe in (
    "animate-diff", "audio-ldm-2", "cogvideo", "cogview-4", "flux-2-klein", "flux-kontext", "hunyuan-video",
    "instruct-pix2pix", "ip-adapter-from-image", "ltx-image-to-video", "lumina-2", "marigold-depth", "mochi",
    "qwen-image-inpaint", "stable-cascade-combined", "stable-diffusion-upscale", "t2i-adapter", "unclip",
    "wan-image-to-video", "wan-vace", "z-image-inpaint",
):  # fmt: skip
    other = {"mps": "diffusers itself interpolates the image in another way on MPS"} if recipe == "unclip" else {}
    simple(f"recipe_{recipe.replace('-', '_')}", f"The recipe {recipe} as it is.", GROUP, recipe=recipe, skip=other)

simple("video_as_tensor", "`output_type='pt'` of a video pipeline.", GROUP, recipe="wan", output_type="pt")
simple("video_as_latents", "`output_type='latent'` of a video pipeline.", GROUP, recipe="wan", output_type="latent")
simple("video_as_images", "`output_type='pil'` of a video pipeline.", GROUP, recipe="ltx", output_type="pil")
simple("flux_latents", "`output_type='latent'` of Flux.", GROUP, recipe="flux", output_type="latent")
simple("flux_true_cfg", "`true_cfg_scale` and a negative prompt for Flux.", GROUP, recipe="flux",
       true_cfg_scale=3.0, negative_prompt="blurry")  # fmt: skip
simple("flux_size_that_is_rounded", "A size that the pipeline rounds.", GROUP, recipe="flux", height=17, width=17)
simple("sdxl_micro_conditioning", "`original_size`, `target_size` and `crops_coords_top_left`.", GROUP,
       recipe="stable-diffusion-xl", original_size=(64, 32), target_size=(32, 32),
       crops_coords_top_left=(4, 2))  # fmt: skip
simple("sdxl_second_prompt", "`prompt_2` and `negative_prompt_2`.", GROUP, recipe="stable-diffusion-xl",
       prompt_2="a bird", negative_prompt_2="dark")  # fmt: skip
simple("image_to_image_strength", "`strength=0.4` with more steps.", GROUP,
       recipe="stable-diffusion-image-to-image", strength=0.4, num_inference_steps=6)  # fmt: skip
simple("image_to_image_two_generators", "Image to image with two generators.", GROUP,
       recipe="stable-diffusion-image-to-image", num_images_per_prompt=2, generator=generators(1, 2))  # fmt: skip
simple("controlnet_guess_mode", "`guess_mode=True`.", GROUP, recipe="controlnet", guess_mode=True)
simple("two_videos", "`num_videos_per_prompt=2` with one generator.", GROUP, recipe="wan", num_videos_per_prompt=2,
       generator=generator(4))  # fmt: skip


@usage(GROUP)
def base_and_refiner(session: Session) -> Any:
    """SDXL with `denoising_end`, and the refiner with `denoising_start` on its latents."""
    base, refiner = session.make("stable-diffusion-xl"), session.make("stable-diffusion-xl-image-to-image")
    steps = {"num_inference_steps": 6}
    latents = session.call(
        base, **session.arguments("stable-diffusion-xl", denoising_end=0.6, output_type="latent", **steps)
    ).images
    arguments = session.arguments("stable-diffusion-xl-image-to-image", image=latents, denoising_start=0.6, **steps)
    arguments.pop("strength", None)
    return {"latents": latents, "image": as_array(session.call(refiner, **arguments).images)}


@usage(GROUP)
def prior_and_decoder(session: Session) -> Any:
    """The Kandinsky prior, and its embeddings as arguments of the decoder."""
    prior, decoder = session.make("kandinsky-2-2-prior"), session.make("kandinsky-2-2")
    output = session.call(prior, **session.arguments("kandinsky-2-2-prior", output_type="pt"))
    embeddings = {"image_embeds": output.image_embeds, "negative_image_embeds": output.negative_image_embeds}
    return {"embeddings": output.image_embeds, "image": session.run(decoder, "kandinsky-2-2", **embeddings)}


@usage(GROUP)
def several_controlnets(session: Session) -> Any:
    """Two ControlNets with two images and two scales."""
    source = session.make("controlnet", place=False)
    other = recipes()["controlnet"].make().controlnet  # type: ignore[attr-defined]
    components = {**source.components, "controlnet": [source.controlnet, other]}
    pipe = session.place(type(source)(**components, requires_safety_checker=False))
    pipe.set_progress_bar_config(disable=True)
    image = session.arguments("controlnet")["image"]
    return session.run(pipe, "controlnet", image=[image, image], controlnet_conditioning_scale=[0.7, 0.3])


def make_modular(session: Session) -> Any:
    """Return a tiny modular SDXL pipeline, placed."""
    pipe = modular.StableDiffusionXLAutoBlocks().init_pipeline()
    plain: Any = session.make("stable-diffusion-xl", place=False)
    components = {name: value for name, value in plain.components.items() if value is not None}
    pipe.update_components(**{name: value for name, value in components.items() if hasattr(pipe, name)})
    pipe.set_progress_bar_config(disable=True)
    return session.place(pipe)


def call_modular(pipe: Any, seed: int = 0) -> Any:
    """Call a modular pipeline and return its images."""
    source = torch.Generator().manual_seed(seed)
    return as_array(
        pipe(prompt="a red fox", height=16, width=16, num_inference_steps=2, generator=source, output_type="np",
             output="images")
    )  # fmt: skip


@usage(GROUP)
def modular_pipeline(session: Session) -> Any:
    """A modular SDXL pipeline, called twice."""
    pipe = make_modular(session)
    return {"first": call_modular(pipe), "second": call_modular(pipe, 1)}


@usage(GROUP)
def modular_pipeline_with_a_guider(session: Session) -> Any:
    """A modular pipeline with other guiders between calls."""
    pipe = make_modular(session)
    values = {}
    for scale in (3.0, 9.0):
        pipe.update_components(guider=diffusers.ClassifierFreeGuidance(guidance_scale=scale))
        values[str(scale)] = call_modular(pipe)
    pipe.update_components(guider=diffusers.AdaptiveProjectedGuidance(guidance_scale=5.0))
    return {**values, "projected": call_modular(pipe)}


@usage(GROUP)
def tiny_vae(session: Session) -> Any:
    """`pipe.vae = AutoencoderTiny(…)` between calls."""
    pipe = session.make()
    first = session.run(pipe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        vae = diffusers.AutoencoderTiny(
            encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1), latent_channels=4,
        ).eval()  # fmt: skip
    pipe.vae = vae.to(pipe.device)
    return {"before": first, "after": session.run(pipe)}


@usage(GROUP, compiled_tolerance=HALF_PRECISION)
def model_assigned_in_another_dtype(session: Session) -> Any:
    """`pipe.vae = vae`, with a VAE in bfloat16 and the other models in float32."""
    pipe = session.make("wan")
    first = session.run(pipe, "wan")
    pipe.vae = copy.deepcopy(pipe.vae).to(torch.bfloat16)
    return {"first": first, "second": session.run(pipe, "wan"), "dtype": str(pipe.vae.dtype)}


@usage(GROUP, compiled_tolerance=HALF_PRECISION)
def model_cast_before_the_pipeline_is_moved(session: Session) -> Any:
    """`pipe.vae.to(torch.bfloat16)`, then `pipe.to(device)` without a dtype."""
    pipe = session.make("wan")
    first = session.run(pipe, "wan")
    pipe.vae.to(torch.bfloat16)
    pipe.to(pipe.device)
    return {"first": first, "second": session.run(pipe, "wan"), "dtype": str(pipe.vae.dtype)}
