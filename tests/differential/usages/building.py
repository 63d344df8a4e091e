"""Usages that differ in how a pipeline is built."""

from __future__ import annotations

import copy
import pickle
import tempfile
from pathlib import Path
from typing import Any

import diffusers
import huggingface_hub
import torch

import anyaccel
from tests.differential.session import CUDA_VARIANTS, Session, usage

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
def copy_of_a_pipeline_that_refers_to_itself(session: Session) -> Any:
    """`pipe.encode = pipe.encode_prompt`, then `copy.deepcopy` and pickle."""
    pipe = session.make()
    pipe.encode = pipe.encode_prompt
    copies = [copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))]
    return {
        "bound": [other.encode.__self__ is other for other in copies],
        "images": [session.run(other) for other in copies],
    }


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


@usage(BUILD, skip=dict.fromkeys(CUDA_VARIANTS, "stock diffusers raises an error: the other models are on the CPU"))
def placed_model_assigned_to_another_pipeline(session: Session) -> Any:
    """`other.unet = pipe.unet`, where only `pipe` was placed."""
    pipe, other = session.make(), session.make(place=False)
    pipe.unet.conv_in.weight.data.mul_(1.5)
    first = session.run(pipe)
    other.unet = pipe.unet
    return {"first": first, "other": session.run(other), "again": session.run(pipe)}


@usage(BUILD)
def shallow_copy_of_a_model(session: Session) -> Any:
    """`copy.copy` of a placed model with one replaced layer; the original is released."""
    pipe = session.make()
    first = session.run(pipe)
    unet = copy.copy(pipe.unet)
    unet._modules = dict(unet._modules)
    unet.conv_in = copy.deepcopy(unet.conv_in)
    unet.conv_in.weight.data.mul_(2)
    pipe.unet = unet
    return {"first": first, "copy": session.run(pipe)}


@usage(BUILD, skip={"mps": "a virtual tensor cannot be pickled", "neuron": "a virtual tensor cannot be pickled"})
def pickled_model(session: Session) -> Any:
    """`pickle` of a placed model."""
    pipe = session.make()
    session.run(pipe)
    model = pickle.loads(pickle.dumps(pipe.unet))
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(2)).to(pipe.device)
    states = torch.zeros(1, 7, pipe.text_encoder.config.hidden_size, device=pipe.device)
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


@usage(BUILD)
def from_pipe_after_placing(session: Session) -> Any:
    """Diffusers' own `from_pipe` of a placed pipeline."""
    pipe = diffusers.AutoPipelineForImage2Image.from_pipe(session.make())
    pipe.set_progress_bar_config(disable=True)
    return session.run(pipe, "stable-diffusion-image-to-image")


@usage(BUILD)
def class_from_pipe_after_placing(session: Session) -> Any:
    """`SomePipeline.from_pipe` of a placed pipeline, with another scheduler."""
    source = session.make()
    scheduler = diffusers.DDIMScheduler.from_config(source.scheduler.config)
    pipe = diffusers.StableDiffusionImg2ImgPipeline.from_pipe(source, scheduler=scheduler)
    pipe.set_progress_bar_config(disable=True)
    return {"image": session.run(pipe, "stable-diffusion-image-to-image"), "source": session.run(source)}


@usage(BUILD)
def components_constructor_after_placing(session: Session) -> Any:
    """`SomePipeline(**placed.components)`."""
    source = session.make()
    pipe = diffusers.StableDiffusionImg2ImgPipeline(**source.components, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return {"image": session.run(pipe, "stable-diffusion-image-to-image"), "source": session.run(source)}


def saved(name: str, document: str, save: dict[str, Any], load: dict[str, Any]) -> None:
    """Register a usage that saves and loads a pipeline with options."""

    def run(session: Session) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            session.make().save_pretrained(folder, **save)
            pipe = session.place(diffusers.DiffusionPipeline.from_pretrained(folder, **load))
        pipe.set_progress_bar_config(disable=True)
        return session.run(pipe)

    run.__name__, run.__doc__ = name, document
    usage(BUILD)(run)


saved("saved_as_variant", "`save_pretrained(variant='fp16')` and `from_pretrained(variant='fp16')`.",
      {"variant": "fp16"}, {"variant": "fp16"})  # fmt: skip
saved("saved_in_shards", "`save_pretrained(max_shard_size=…)`.", {"max_shard_size": "200KB"}, {})
saved("loaded_without_meta_tensors", "`from_pretrained(low_cpu_mem_usage=False)`.", {}, {"low_cpu_mem_usage": False})


@usage(BUILD)
def loaded_with_a_component(session: Session) -> Any:
    """`from_pretrained(folder, unet=model)`."""
    with tempfile.TemporaryDirectory() as folder:
        source = session.make(place=False)
        source.save_pretrained(folder)
        with torch.no_grad():
            source.unet.conv_in.weight.mul_(1.2)
        pipe = session.place(diffusers.DiffusionPipeline.from_pretrained(folder, unet=source.unet))
    pipe.set_progress_bar_config(disable=True)
    return session.run(pipe)


@usage(BUILD)
def model_from_single_file(session: Session) -> Any:
    """`UNet2DConditionModel.from_single_file`."""
    with tempfile.TemporaryDirectory() as folder:
        source = session.make()
        source.save_pretrained(folder)
        path = f"{folder}/unet/diffusion_pytorch_model.safetensors"
        model = diffusers.UNet2DConditionModel.from_single_file(path, config=folder, subfolder="unet")
    source.unet = model.to(source.device)
    return session.run(source)


@usage(BUILD, fails=True)
def dduf_file(session: Session) -> Any:
    """`from_pretrained(folder, dduf_file=…)`, which diffusers no longer supports."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as target:
        session.make(place=False).save_pretrained(folder)
        huggingface_hub.export_folder_as_dduf(f"{target}/tiny.dduf", folder_path=folder)
        pipe = session.place(diffusers.DiffusionPipeline.from_pretrained(target, dduf_file="tiny.dduf"))
    pipe.set_progress_bar_config(disable=True)
    return session.run(pipe)


@usage(BUILD)
def custom_pipeline(session: Session) -> Any:
    """`from_pretrained(folder, custom_pipeline=…)` with a class of the user."""
    code = (
        "import diffusers\n\n\nclass HalfGuidance(diffusers.StableDiffusionPipeline):\n"
        "    def __call__(self, prompt, guidance_scale=8.0, **kwargs):\n"
        "        return super().__call__(prompt, guidance_scale=guidance_scale / 2, **kwargs)\n"
    )
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as program:
        session.make(place=False).save_pretrained(folder)
        Path(program, "pipeline.py").write_text(code)
        pipe = session.place(
            diffusers.DiffusionPipeline.from_pretrained(folder, custom_pipeline=program, trust_remote_code=True)
        )
    pipe.set_progress_bar_config(disable=True)
    return session.run(pipe)


@usage(BUILD)
def model_saved_by_torch(session: Session) -> Any:
    """`torch.save(unet.state_dict())` of a placed model, loaded into another pipeline."""
    first, second = session.make(), session.make()
    with torch.no_grad():
        first.unet.conv_in.weight.mul_(1.2)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(first.unet.state_dict(), f"{folder}/unet.pt")
        second.unet.load_state_dict(torch.load(f"{folder}/unet.pt", map_location=second.device))
    return session.run(second)


@usage(BUILD)
def shared_memory(session: Session) -> Any:
    """`unet.share_memory()` before placing; another process sees edits."""
    source = session.make(place=False)
    source.unet.share_memory()
    pipe = session.place(source)
    first = session.run(pipe)
    return {"result": first, "shared": session.device != "cpu" or pipe.unet.conv_in.weight.is_shared()}


@usage(BUILD)
def int8_weights_of_the_user(session: Session) -> Any:
    """A layer of the user that stores its weight in int8."""

    class Int8Conv(torch.nn.Module):
        weight: torch.Tensor
        scale: torch.Tensor

        def __init__(self, layer: torch.nn.Conv2d) -> None:
            super().__init__()
            scale = layer.weight.detach().abs().amax() / 127
            self.register_buffer("weight", (layer.weight.detach() / scale).round().to(torch.int8))
            self.register_buffer("scale", scale)
            self.bias = layer.bias

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            weight = self.weight.to(value.dtype) * self.scale
            return torch.nn.functional.conv2d(value, weight, self.bias, padding=1)

    pipe = session.make(place=False)
    pipe.unet.conv_in = Int8Conv(pipe.unet.conv_in)
    return session.run(session.place(pipe))


@usage(BUILD)
def built_with_a_model_in_another_dtype(session: Session) -> Any:
    """`SomePipeline(**pipe.components)` of a placed pipeline with a new VAE in bfloat16."""
    source = session.make()
    vae = copy.deepcopy(source.vae).to(torch.bfloat16)
    pipe = diffusers.StableDiffusionPipeline(**{**source.components, "vae": vae})
    pipe.set_progress_bar_config(disable=True)
    return {"latents": session.run(pipe, output_type="latent"), "dtype": str(pipe.vae.dtype)}


@usage(BUILD)
def cast_model_in_a_deep_copy(session: Session) -> Any:
    """A deep copy of a pipeline in which a model was cast; on the CPU with `memory="layer"`."""
    options = {"memory": "layer"} if session.device == "cpu" else {}
    source = session.place(session.make(place=False), **options)
    source.vae.to(torch.bfloat16)
    pipe = copy.deepcopy(source)
    return {"latents": session.run(pipe, output_type="latent"), "dtype": str(pipe.vae.dtype)}


ON_THE_CPU = dict.fromkeys(("mps", "neuron", *CUDA_VARIANTS), "on the CPU only")


@usage(BUILD, skip=ON_THE_CPU)
def buffer_that_shares_memory_with_a_weight(session: Session) -> Any:
    """A buffer that is a view of a weight, which is edited after placing, with `memory="layer"`."""

    class Conv(torch.nn.Conv2d):
        view: torch.Tensor

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return super().forward(value) * (1 + self.view.mean())

    source = session.make(place=False)
    old = source.unet.conv_in
    layer = Conv(old.in_channels, old.out_channels, old.kernel_size, padding=old.padding)
    layer.load_state_dict(old.state_dict())
    layer.register_buffer("view", layer.weight.data, persistent=False)
    source.unet.conv_in = layer
    pipe = session.place(source, memory="layer")
    with torch.no_grad():
        layer.weight.mul_(1.5)
    return session.run(pipe)


@usage(BUILD, skip=ON_THE_CPU)
def sparse_weight(session: Session) -> Any:
    """A model with a sparse parameter, which it does not use."""
    source = session.make(place=False)
    source.unet.register_parameter("mask", torch.nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False))
    return session.run(session.place(source))


@usage(BUILD)
def reloaded_by_the_class_of_the_pipeline(session: Session) -> Any:
    """`type(pipe).from_pretrained(pretrained_model_name_or_path=…)` of a placed pipeline with `.bin` weights."""
    source = session.make()
    with tempfile.TemporaryDirectory() as folder:
        source.save_pretrained(folder, safe_serialization=False)
        pipe = session.place(type(source).from_pretrained(pretrained_model_name_or_path=folder))
    pipe.set_progress_bar_config(disable=True)
    return session.run(pipe)
