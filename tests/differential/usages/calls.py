"""Usages that differ in how a pipeline is called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import numpy
import torch
from diffusers.utils.outputs import BaseOutput

from tests.differential.session import CPU_NOISE, Session, as_array, usage

CALL = "ways to call"
BATCH = "generators and batches"


def simple(
    name: str, document: str, group: str = CALL, recipe: str = "stable-diffusion", fails: bool = False,
    skip: dict[str, str] | None = None, **changes: Any,
) -> None:  # fmt: skip
    """Register a usage that calls a recipe with changed arguments."""

    def run(session: Session) -> Any:
        arguments = {key: value() if callable(value) else value for key, value in changes.items()}
        return session.run(session.make(recipe), recipe, **arguments)

    run.__name__, run.__doc__ = name, document
    usage(group, fails=fails, skip=skip or {})(run)


def generator(seed: int = 0) -> Any:
    """Return a factory for a CPU generator."""
    return lambda: torch.Generator().manual_seed(seed)


def generators(*seeds: int) -> Any:
    """Return a factory for a list of CPU generators."""
    return lambda: [torch.Generator().manual_seed(seed) for seed in seeds]


simple("default_call", "A call with keyword arguments.")
simple("more_steps", "Five steps.", num_inference_steps=5)
simple("no_guidance", "`guidance_scale=1`.", guidance_scale=1.0)
simple("negative_prompt", "A negative prompt.", negative_prompt="blurry")
simple("guidance_rescale", "`guidance_rescale`.", guidance_rescale=0.7)
simple("eta", "`eta`, which PNDM ignores.", eta=0.5)
simple("output_latents", "`output_type='latent'`.", output_type="latent")
simple("output_tensor", "`output_type='pt'`.", output_type="pt")
simple("output_pil", "`output_type='pil'`.", output_type="pil")
simple(
    "custom_timesteps",
    "A list of timesteps with a scheduler that does not accept it.",
    fails=True,
    timesteps=[999, 500, 1],
)
simple("numpy_integer_sizes", "Sizes as NumPy integers.", height=numpy.int64(16), width=numpy.int64(16))
simple("other_size", "A size that is not square.", height=16, width=24)
simple("invalid_size", "A size that is not a multiple of 8.", fails=True, height=17, width=16)
simple("empty_prompt", "An empty prompt.", prompt="")
simple("long_prompt", "A prompt longer than the tokenizer's limit.", prompt="red fox " * 60)
simple("prompt_of_wrong_type", "A prompt that is an integer.", fails=True, prompt=3)
simple("unknown_argument", "An argument that the pipeline does not have.", frobnicate=1)
simple("missing_prompt", "No prompt.", fails=True, prompt=None)
simple("return_tuple", "`return_dict=False`.", return_dict=False)
simple("two_images", "`num_images_per_prompt=2` with one generator.", BATCH, num_images_per_prompt=2)
simple("three_images_from_a_list", "Three generators.", BATCH, num_images_per_prompt=3, generator=generators(1, 2, 3))
simple("two_prompts", "A list of two prompts with one generator.", BATCH, prompt=["a red fox", "a blue bird"])
simple("two_prompts_two_images", "Two prompts with two images each.", BATCH, prompt=["fox", "bird"],
       num_images_per_prompt=2)  # fmt: skip
simple("two_prompts_two_generators", "Two prompts and two generators.", BATCH, prompt=["fox", "bird"],
       generator=generators(5, 6))  # fmt: skip
simple("prompts_of_different_length", "Prompts of different lengths.", BATCH, prompt=["a", "a red fox in the snow"])
simple("too_few_generators", "Two generators for three images.", BATCH, fails=True, num_images_per_prompt=3,
       generator=generators(1, 2))  # fmt: skip
simple("negative_prompts", "One negative prompt per prompt.", BATCH, prompt=["fox", "bird"],
       negative_prompt=["blurry", "dark"])  # fmt: skip
simple("global_generator", "No generator: noise from the global one.", BATCH, skip=CPU_NOISE, generator=None)
simple("global_generator_two_images", "No generator, two images.", BATCH, skip=CPU_NOISE, generator=None,
       num_images_per_prompt=2)  # fmt: skip
simple("generator_with_large_seed", "A seed above 2**32.", BATCH, generator=generator(2**40 + 1))

for recipe in (
    "stable-diffusion-xl", "stable-diffusion-3", "flux", "sana", "pixart-sigma", "wan", "ltx", "z-image", "qwen-image",
    "stable-audio", "amused", "dit", "ddpm", "kandinsky-2-2", "latent-consistency", "stable-video-diffusion",
):  # fmt: skip
    simple(f"recipe_{recipe.replace('-', '_')}", f"The recipe {recipe} as it is.", recipe=recipe)

for recipe in (
    "stable-diffusion-image-to-image", "stable-diffusion-inpaint", "stable-diffusion-xl-image-to-image", "flux",
    "flux-image-to-image", "sana", "amused", "controlnet", "latent-consistency", "stable-diffusion-3", "pixart-sigma",
):  # fmt: skip
    simple(
        f"two_images_{recipe.replace('-', '_')}", f"Two images with one generator: {recipe}.", BATCH, recipe=recipe,
        num_images_per_prompt=2, generator=generator(4),
    )  # fmt: skip


@usage(CALL)
def positional_arguments(session: Session) -> Any:
    """Prompt, height and width by position."""
    arguments = session.arguments()
    prompt, height, width = (arguments.pop(name) for name in ("prompt", "height", "width"))
    return session.make()(prompt, height, width, **arguments).images


@usage(CALL)
def three_calls(session: Session) -> Any:
    """Three calls with one generator object, which continues."""
    pipe, source = session.make(), torch.Generator().manual_seed(3)
    values: dict[str, Any] = {str(index): session.run(pipe, generator=source) for index in range(3)}
    return {**values, "generator": source}


@usage(BATCH)
def generator_state_after_two_images(session: Session) -> Any:
    """The state of the user's generator after a call with two images."""
    source = torch.Generator().manual_seed(3)
    result = session.run(session.make(), generator=source, num_images_per_prompt=2)
    return {"result": result, "generator": source}


@usage(BATCH)
def generator_states_of_a_list(session: Session) -> Any:
    """The states of a list of generators after a call."""
    sources = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    result = session.run(session.make(), generator=sources, num_images_per_prompt=2)
    return {"result": result, "first": sources[0], "second": sources[1]}


@usage(BATCH)
def ancestral_sampling_of_two_images(session: Session) -> Any:
    """Two images with a scheduler that draws noise in every step."""
    pipe = session.make()
    pipe.scheduler = diffusers.EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)
    source = torch.Generator().manual_seed(3)
    result = session.run(pipe, generator=source, num_images_per_prompt=2, num_inference_steps=3)
    return {"result": result, "generator": source}


@usage(BATCH)
def latents_given(session: Session) -> Any:
    """Latents drawn by the user."""
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(9))
    before = latents.clone()
    pipe = session.make()
    size = {"height": 8 * pipe.vae_scale_factor, "width": 8 * pipe.vae_scale_factor}
    result = session.run(pipe, latents=latents.to(pipe.device), **size)
    return {"result": result, "unchanged": bool(torch.equal(latents, before))}


@usage(BATCH)
def latents_for_two_images(session: Session) -> Any:
    """Latents for two images."""
    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(9))
    pipe = session.make()
    size = {"height": 8 * pipe.vae_scale_factor, "width": 8 * pipe.vae_scale_factor}
    return session.run(pipe, latents=latents.to(pipe.device), num_images_per_prompt=2, **size)


@usage(BATCH, fails=True)
def latents_of_wrong_shape(session: Session) -> Any:
    """Latents for one image with two prompts."""
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(9))
    pipe = session.make()
    return session.run(pipe, latents=latents.to(pipe.device), prompt=["fox", "bird"])


@usage(CALL)
def embeddings_given(session: Session) -> Any:
    """`encode_prompt`, then `prompt_embeds` and `negative_prompt_embeds`."""
    pipe = session.make()
    with torch.no_grad():
        positive, negative = pipe.encode_prompt("a red fox", pipe.device, 1, True, negative_prompt="blurry")
    return session.run(pipe, prompt=None, prompt_embeds=positive, negative_prompt_embeds=negative)


@usage(CALL)
def embeddings_for_two_prompts(session: Session) -> Any:
    """`prompt_embeds` for two prompts with two images each."""
    pipe = session.make()
    with torch.no_grad():
        positive, negative = pipe.encode_prompt(["fox", "bird"], pipe.device, 1, True, negative_prompt=["", ""])
    return session.run(
        pipe, prompt=None, prompt_embeds=positive, negative_prompt_embeds=negative, num_images_per_prompt=2
    )


@usage(CALL)
def subclass_with_any_signature(session: Session) -> Any:
    """A subclass with `__call__(self, *args, **kwargs)`."""

    class Pipeline(diffusers.StableDiffusionPipeline):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    pipe = session.place(Pipeline(**session.make(place=False).components))
    pipe.set_progress_bar_config(disable=True)
    arguments = session.arguments()
    return {
        "keywords": as_array(pipe(**arguments).images),
        "positional": as_array(pipe(arguments.pop("prompt"), **{**arguments, "generator": generator(0)()}).images),
    }


@usage(CALL)
def subclass_with_own_arguments(session: Session) -> Any:
    """A subclass with its own arguments, and two images."""

    class Pipeline(diffusers.StableDiffusionPipeline):
        def __call__(self, prompt: str, strength_of_style: float = 1.0, **kwargs: Any) -> Any:
            output = super().__call__(prompt, **kwargs)
            output.images = output.images * strength_of_style
            return output

    pipe = session.place(Pipeline(**session.make(place=False).components))
    pipe.set_progress_bar_config(disable=True)
    arguments = session.arguments(num_images_per_prompt=2, generator=[generator(1)(), generator(2)()])
    return pipe(strength_of_style=0.5, **arguments).images


@usage(CALL)
def call_with_a_decorator(session: Session) -> Any:
    """A subclass whose `__call__` has a decorator that passes an argument of its own."""

    def add_style(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return function(self, "in watercolor", *args, **kwargs)

        return call

    class Pipeline(diffusers.StableDiffusionPipeline):
        @add_style
        def __call__(self, style: str, prompt: str | None = None, **kwargs: Any) -> Any:
            return super().__call__(f"{prompt} {style}", **kwargs)

    pipe = session.place(Pipeline(**session.make(place=False).components))
    pipe.set_progress_bar_config(disable=True)
    arguments = session.arguments()
    return {
        "keywords": as_array(pipe(**arguments).images),
        "positional": as_array(pipe(arguments.pop("prompt"), **{**arguments, "generator": generator(0)()}).images),
    }


@usage(CALL)
def decorator_changes_positional_arguments(session: Session) -> Any:
    """A decorator of `__call__` that changes a prompt which was passed by position."""

    def add_style(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if args:
                args = (f"{args[0]} in watercolor", *args[1:])
            return function(self, *args, **kwargs)

        return call

    class Pipeline(diffusers.StableDiffusionPipeline):
        __call__ = add_style(diffusers.StableDiffusionPipeline.__call__)

    pipe = session.place(Pipeline(**session.make(place=False).components))
    pipe.set_progress_bar_config(disable=True)
    arguments = session.arguments()
    return pipe(arguments.pop("prompt"), **arguments).images


@usage(CALL)
def negative_defaults_of_a_subclass(session: Session) -> Any:
    """A subclass in which a width and a number of steps of -1 mean a default."""

    class Pipeline(diffusers.StableDiffusionPipeline):
        def __call__(self, height: int = 16, width: int = -1, num_inference_steps: int = -1, **kwargs: Any) -> Any:
            width = height if width < 0 else width
            steps = 2 if num_inference_steps < 0 else num_inference_steps
            return super().__call__(height=height, width=width, num_inference_steps=steps, **kwargs)

    pipe = session.place(Pipeline(**session.make(place=False).components))
    pipe.set_progress_bar_config(disable=True)
    return session.run(pipe, width=-1, num_inference_steps=-1)


@usage(CALL)
def output_with_slots(session: Session) -> Any:
    """A subclass whose output has `to_tuple` and cannot have new attributes."""

    @dataclass(slots=True)
    class Output:
        images: Any

        def to_tuple(self) -> tuple[Any]:
            return (self.images,)

    class Pipeline(diffusers.StableDiffusionPipeline):
        def __call__(self, **kwargs: Any) -> Any:
            return Output(super().__call__(**kwargs).images)

    pipe = session.place(Pipeline(**session.make(place=False).components))
    pipe.set_progress_bar_config(disable=True)
    return session.run(pipe)


@usage(CALL)
def subclass_overrides_a_step(session: Session) -> Any:
    """A subclass that overrides `prepare_latents`."""

    class Pipeline(diffusers.StableDiffusionPipeline):
        def prepare_latents(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().prepare_latents(*args, **kwargs) * 0.5

    pipe = session.place(Pipeline(**session.make(place=False).components))
    pipe.set_progress_bar_config(disable=True)
    return session.run(pipe)


@usage(CALL)
def output_with_own_fields(session: Session) -> Any:
    """A subclass whose output has fields named `seeds` and `plan`."""

    @dataclass
    class Output(BaseOutput):
        images: Any
        seeds: list[int]
        plan: str

    class Pipeline(diffusers.StableDiffusionPipeline):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return Output(images=super().__call__(*args, **kwargs).images, seeds=[3, 4], plan="mine")

    pipe = session.place(Pipeline(**session.make(place=False).components))
    pipe.set_progress_bar_config(disable=True)
    output = pipe(**session.arguments())
    return {"images": as_array(output.images), "seeds": output.seeds, "plan": output.plan, "names": list(output)}


@usage(CALL)
def own_error_of_check_inputs(session: Session) -> Any:
    """A subclass whose `check_inputs` raises an exception class of its own."""

    class SizeError(ValueError):
        pass

    class Pipeline(diffusers.StableDiffusionPipeline):
        def check_inputs(self, *args: Any, **kwargs: Any) -> None:
            raise SizeError("too large", 5)

    pipe = session.place(Pipeline(**session.make(place=False).components))
    try:
        pipe(**session.arguments())
    except SizeError as error:
        return {"arguments": list(error.args)}
    return {"arguments": []}


@usage(CALL)
def error_then_another_call(session: Session) -> Any:
    """A call that fails inside the UNet, then one that works."""
    pipe = session.make()
    handle = pipe.unet.conv_out.register_forward_hook(lambda *_: 1 / 0)
    error = ""
    try:
        session.run(pipe)
    except ZeroDivisionError as raised:
        error = str(raised)
    handle.remove()
    return {"error": error, "next": session.run(pipe)}


@usage(CALL)
def models_called_directly(session: Session) -> Any:
    """`unet(…)` and `vae.decode(…)` without the pipeline."""
    pipe = session.make()
    source = torch.Generator().manual_seed(2)
    latents = torch.randn(1, 4, 8, 8, generator=source).to(pipe.device)
    states = torch.randn(1, 7, pipe.text_encoder.config.hidden_size, generator=source).to(pipe.device)
    with torch.no_grad():
        noise = pipe.unet(latents, 10, encoder_hidden_states=states).sample
        image = pipe.vae.decode(latents).sample
    return {"noise": noise, "image": image}


@usage(CALL)
def denoising_loop_written_out(session: Session) -> Any:
    """The denoising loop written by the user, as in diffusers' tutorial."""
    pipe = session.make()
    with torch.no_grad():
        positive, negative = pipe.encode_prompt("a red fox", pipe.device, 1, True)
        embeddings = torch.cat([negative, positive])
        pipe.scheduler.set_timesteps(3, device=pipe.device)
        latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(2)).to(pipe.device)
        latents = latents * pipe.scheduler.init_noise_sigma
        for timestep in pipe.scheduler.timesteps:
            doubled = pipe.scheduler.scale_model_input(torch.cat([latents] * 2), timestep)
            uncond, cond = pipe.unet(doubled, timestep, encoder_hidden_states=embeddings).sample.chunk(2)
            latents = pipe.scheduler.step(uncond + 5.0 * (cond - uncond), timestep, latents).prev_sample
        image = pipe.vae.decode(latents / pipe.vae.config.scaling_factor).sample
    return {"latents": latents, "image": image}


@usage(CALL)
def two_pipelines_alternating(session: Session) -> Any:
    """Two pipelines called in turn."""
    first, second = session.make(), session.make("flux")
    return {
        "a": session.run(first),
        "b": session.run(second, "flux"),
        "c": session.run(first),
        "d": session.run(second, "flux"),
    }


@usage(CALL)
def progress_bar(session: Session) -> Any:
    """`pipe.progress_bar` wrapped by the user."""
    pipe = session.make()
    pipe.set_progress_bar_config(disable=True, leave=False, desc="generate")
    return session.run(pipe)


@usage(CALL)
def ip_adapter_scale(session: Session) -> Any:
    """`set_ip_adapter_scale` between calls."""
    pipe = session.make("ip-adapter")
    first = session.run(pipe, "ip-adapter")
    pipe.set_ip_adapter_scale(0.2)
    return {"before": first, "after": session.run(pipe, "ip-adapter")}


@usage(CALL)
def controlnet_scale(session: Session) -> Any:
    """`controlnet_conditioning_scale` and guidance start and end."""
    pipe = session.make("controlnet")
    return {
        "half": session.run(pipe, "controlnet", controlnet_conditioning_scale=0.5),
        "late": session.run(pipe, "controlnet", control_guidance_start=0.4, control_guidance_end=0.9),
    }


simple("clip_skip", "`clip_skip=1`, which fails with transformers 5.", fails=True, clip_skip=1)
simple("numpy_scalars", "Steps and guidance as NumPy scalars.", num_inference_steps=numpy.int64(3),
       guidance_scale=numpy.float32(5))  # fmt: skip
simple("unknown_output_type", "An output type that does not exist.", output_type="gif")
simple("one_generator_in_a_list", "A list with one generator.", BATCH, generator=generators(3))


@usage(BATCH, skip=CPU_NOISE)
def seeded_globally(session: Session) -> Any:
    """`torch.manual_seed` before each call without a generator."""
    pipe = session.make()
    values: dict[str, Any] = {}
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        values[f"{len(values)}: seed {seed}"] = session.run(pipe, generator=None)
    return values


@usage(CALL)
def output_edited(session: Session) -> Any:
    """Edits of a returned image do not change the next call."""
    pipe = session.make()
    images = session.call(pipe, **session.arguments(output_type="pt")).images
    first = images.clone()
    images.zero_()
    return {"first": first, "second": session.run(pipe)}


@usage(CALL)
def latents_saved_and_decoded(session: Session) -> Any:
    """`output_type='latent'`, then `vae.decode` and `image_processor.postprocess` by the user."""
    pipe = session.make()
    latents = session.call(pipe, **session.arguments(output_type="latent")).images
    with torch.no_grad():
        image = pipe.vae.decode(latents / pipe.vae.config.scaling_factor, return_dict=False)[0]
    return pipe.image_processor.postprocess(image, output_type="np")


@usage(CALL)
def text_encoder_removed(session: Session) -> Any:
    """`encode_prompt`, then a pipeline without text encoder and tokenizer."""
    source = session.make()
    with torch.no_grad():
        positive, negative = source.encode_prompt("a red fox", source.device, 1, True)
    source.text_encoder = source.tokenizer = None
    return session.run(source, prompt=None, prompt_embeds=positive, negative_prompt_embeds=negative)


@usage(CALL)
def embeddings_from_numpy(session: Session) -> Any:
    """`prompt_embeds` made with `torch.from_numpy`."""
    pipe = session.make()
    source = torch.Generator().manual_seed(4)
    embeddings = torch.randn(2, 7, pipe.text_encoder.config.hidden_size, generator=source)
    rows = numpy.asarray(embeddings, dtype=numpy.float32)
    return session.run(
        pipe, prompt=None, prompt_embeds=torch.from_numpy(rows[:1]), negative_prompt_embeds=torch.from_numpy(rows[1:])
    )


@usage(CALL, skip={"served": "the server sets the generator"})
def seed_read_from_keywords(session: Session) -> Any:
    """A subclass that takes `seed` from its `**kwargs`."""

    class Pipeline(diffusers.StableDiffusionPipeline):
        def __call__(self, prompt: str, **kwargs: Any) -> Any:
            return super().__call__(prompt, generator=generator(kwargs.pop("seed", 0))(), **kwargs)

    pipe = session.place(Pipeline(**session.make(place=False).components))
    pipe.set_progress_bar_config(disable=True)
    return as_array(pipe(**session.arguments(generator=None), seed=7).images)


@usage(CALL)
def nan_repaired_by_a_subclass(session: Session) -> Any:
    """A subclass that replaces NaN in the prompt embeddings, which the text encoder returns."""

    class Pipeline(diffusers.StableDiffusionPipeline):
        def encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
            return tuple(torch.nan_to_num(value) for value in super().encode_prompt(*args, **kwargs))

    pipe = Pipeline(**session.make(place=False).components)
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad():
        norms = [layer for name, layer in pipe.text_encoder.named_modules() if name.endswith("final_layer_norm")]
        norms[0].bias[0] = float("nan")
    return session.run(session.place(pipe))


@usage(CALL)
def numpy_integers_in_a_subclass(session: Session) -> Any:
    """A subclass that gets NumPy integers as they are."""
    kinds: list[str] = []

    class Pipeline(diffusers.StableDiffusionPipeline):
        def __call__(self, prompt: str, height: Any = None, **kwargs: Any) -> Any:
            kinds.append(type(height).__name__)
            return super().__call__(prompt, height=int(height), **kwargs)

    pipe = session.place(Pipeline(**session.make(place=False).components))
    pipe.set_progress_bar_config(disable=True)
    return {"result": session.run(pipe, height=numpy.int64(16)), "kinds": tuple(sorted(set(kinds)))}
