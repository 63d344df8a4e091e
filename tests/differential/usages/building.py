"""Usages that differ in how a pipeline is built."""

from __future__ import annotations

import copy
import pickle
import tempfile
from typing import Any

import diffusers
import torch

import anyaccel
from tests.differential.session import Session, usage

BUILD = "ways to build"


@usage(BUILD)
def components_constructor(session: Session) -> Any:
    """`SomePipeline(**pipe.components)`, placed afterwards."""
    source = session.make(place=False)
    pipe = session.place(diffusers.StableDiffusionPipeline(**source.components))
    pipe.set_progress_bar_config(disable=True)
    return session.run(pipe)


@usage(BUILD)
def from_pipe_before_placing(session: Session) -> Any:
    """Diffusers' `from_pipe`, placed afterwards."""
    pipe = session.place(diffusers.AutoPipelineForImage2Image.from_pipe(session.make(place=False)))
    pipe.set_progress_bar_config(disable=True)
    return session.run(pipe, "stable-diffusion-image-to-image")


@usage(BUILD)
def from_pipe_of_anyaccel(session: Session) -> Any:
    """`from_pipe` of a placed pipeline, with anyaccel's class."""
    source = session.make()
    kind: Any = anyaccel if session.placed else diffusers
    pipe = kind.AutoPipelineForImage2Image.from_pipe(source)
    pipe.set_progress_bar_config(disable=True)
    return session.run(pipe, "stable-diffusion-image-to-image")


@usage(BUILD)
def saved_and_loaded(session: Session) -> Any:
    """`save_pretrained` of a placed pipeline, and `from_pretrained`."""
    source = session.make()
    with tempfile.TemporaryDirectory() as folder:
        source.save_pretrained(folder)
        pipe = session.place(diffusers.DiffusionPipeline.from_pretrained(folder))
    pipe.set_progress_bar_config(disable=True)
    return session.run(pipe)


@usage(BUILD)
def loaded_by_anyaccel(session: Session) -> Any:
    """`DiffusionPipeline.from_pretrained` of anyaccel, and `.to(…)`."""
    with tempfile.TemporaryDirectory() as folder:
        session.make(place=False).save_pretrained(folder)
        if not session.placed:
            pipe: Any = diffusers.DiffusionPipeline.from_pretrained(folder)
        else:
            pipe = anyaccel.DiffusionPipeline.from_pretrained(folder)
            pipe.to(session.device, dtype=torch.float32, **session.variant.options)
    pipe.set_progress_bar_config(disable=True)
    return session.run(pipe)


@usage(BUILD)
def optional_components_missing(session: Session) -> Any:
    """A pipeline without its optional components."""
    components = session.make(place=False).components
    pipe = session.place(
        diffusers.StableDiffusionPipeline(
            **{**components, "safety_checker": None, "feature_extractor": None}, requires_safety_checker=False
        )
    )
    pipe.set_progress_bar_config(disable=True)
    return session.run(pipe)


@usage(BUILD)
def deepcopy_of_a_pipeline(session: Session) -> Any:
    """`copy.deepcopy` of a placed pipeline; the copy is independent."""
    pipe = session.make()
    first = session.run(pipe)
    other = copy.deepcopy(pipe)
    other.unet.conv_in.weight.data.mul_(1.5)
    return {"first": first, "copy": session.run(other), "original": session.run(pipe)}


@usage(BUILD)
def deepcopy_of_a_model(session: Session) -> Any:
    """`copy.deepcopy` of a placed model."""
    pipe = session.make()
    session.run(pipe)
    model = copy.deepcopy(pipe.unet)
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(2)).to(pipe.device)
    states = torch.zeros(1, 7, pipe.text_encoder.config.hidden_size).to(pipe.device)
    with torch.no_grad():
        return model(latents, 10, encoder_hidden_states=states).sample


@usage(BUILD, skip={"mps": "a virtual tensor cannot be pickled", "neuron": "a virtual tensor cannot be pickled"})
def pickled_model(session: Session) -> Any:
    """`pickle` of a placed model."""
    pipe = session.make()
    session.run(pipe)
    model = pickle.loads(pickle.dumps(pipe.unet))
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(2))
    states = torch.zeros(1, 7, pipe.text_encoder.config.hidden_size)
    with torch.no_grad():
        return model(latents, 10, encoder_hidden_states=states).sample


@usage(BUILD)
def placed_twice(session: Session) -> Any:
    """A pipeline placed twice on the same device."""
    pipe = session.make()
    first = session.run(pipe)
    return {"first": first, "second": session.run(session.place(pipe))}


@usage(BUILD)
def shared_components(session: Session) -> Any:
    """Two pipelines that share their components, both placed."""
    source = session.make(place=False)
    first = session.place(source)
    second = session.place(diffusers.StableDiffusionImg2ImgPipeline(**source.components))
    for pipe in (first, second):
        pipe.set_progress_bar_config(disable=True)
    return {
        "text": session.run(first),
        "image": session.run(second, "stable-diffusion-image-to-image"),
        "again": session.run(first),
    }


@usage(BUILD)
def built_under_inference_mode(session: Session) -> Any:
    """A pipeline built under `inference_mode` and called outside."""
    with torch.inference_mode():
        pipe = session.make()
    return session.run(pipe)


@usage(BUILD)
def layerwise_casting(session: Session) -> Any:
    """`enable_layerwise_casting` with float32 for storage and computation."""
    pipe = session.make()
    pipe.unet.enable_layerwise_casting(storage_dtype=torch.float32, compute_dtype=torch.float32)
    return session.run(pipe)


@usage(BUILD)
def compiled_by_the_user(session: Session) -> Any:
    """`unet.compile(backend='eager')` by the user."""
    pipe = session.make()
    pipe.unet.compile(backend="eager")
    return session.run(pipe)


@usage(BUILD)
def torch_compiled_by_the_user(session: Session) -> Any:
    """`pipe.unet = torch.compile(pipe.unet, backend='eager')`."""
    pipe = session.make()
    pipe.unet = torch.compile(pipe.unet, backend="eager")
    return session.run(pipe)


@usage(BUILD)
def faster_cache(session: Session) -> Any:
    """`enable_cache` with first-block caching on a transformer."""
    pipe = session.make("flux")
    pipe.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.2))
    return session.run(pipe, "flux", num_inference_steps=4)


@usage(BUILD)
def model_moved_to_the_cpu(session: Session) -> Any:
    """`pipe.unet.to('cpu')` between calls, moved back by the user."""
    pipe = session.make()
    first = session.run(pipe)
    device = pipe.device
    pipe.unet.to("cpu")
    pipe.unet.to(device)
    return {"before": first, "after": session.run(pipe)}


@usage(BUILD)
def pipeline_moved_to_the_cpu(session: Session) -> Any:
    """`pipe.to('cpu')` after a call."""
    pipe = session.make()
    first = session.run(pipe)
    pipe.to("cpu")
    return {"before": first, "after": session.run(pipe)}


@usage(BUILD)
def group_offloading_by_the_user(session: Session) -> Any:
    """`enable_group_offload` of a model by the user."""
    pipe = session.make()
    pipe.unet.enable_group_offload(
        onload_device=torch.device(pipe.device), offload_device=torch.device("cpu"), offload_type="leaf_level"
    )
    return session.run(pipe)


@usage(BUILD)
def eval_and_train_flags(session: Session) -> Any:
    """The training flags of the models stay as they were."""
    pipe = session.make()
    pipe.vae.train()
    session.run(pipe)
    return {"unet": pipe.unet.training, "vae": pipe.vae.training, "text_encoder": pipe.text_encoder.training}


@usage(BUILD)
def components_and_config_unchanged(session: Session) -> Any:
    """Names of components, parameter names and config after placing and a call."""
    pipe = session.make()
    session.run(pipe)
    return {
        "components": tuple(sorted(pipe.components)),
        "parameters": tuple(name for name, _ in pipe.unet.named_parameters()),
        "config": str(sorted(pipe.unet.config.items())),
        "name": type(pipe).__name__,
        "repr": repr(pipe),
    }


@usage(BUILD)
def arguments_unchanged(session: Session) -> Any:
    """Lists and dicts that the user passes stay as they were."""
    pipe = session.make()
    prompts, extra = ["fox", "bird"], {"scale": 1.0}
    result = session.run(pipe, prompt=prompts, cross_attention_kwargs=extra)
    return {"result": result, "prompts": tuple(prompts), "extra": str(extra)}
