"""Usages of caching, offloading and attention backends of diffusers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from diffusers.models.attention_dispatch import attention_backend

from tests.differential.session import Session, usage

GROUP = "caching, offloading and attention"


NO_CACHE = {"served": "a cache holds the state of one call, and the server enables none"}


def cached(name: str, document: str, recipe: str, make: Callable[[Any], Any], **fields: Any) -> None:
    """Register a usage with `enable_cache` before the first and `disable_cache` before the second call."""

    def run(session: Session) -> Any:
        pipe = session.make(recipe)
        pipe.transformer.enable_cache(make(pipe))
        first = session.run(pipe, recipe, num_inference_steps=6)
        pipe.transformer.disable_cache()
        return {"cached": first, "disabled": session.run(pipe, recipe, num_inference_steps=6)}

    run.__name__, run.__doc__ = name, document
    usage(GROUP, skip=NO_CACHE, **fields)(run)


cached("first_block_cache", "`enable_cache(FirstBlockCacheConfig)` and `disable_cache`.", "flux",
       lambda pipe: diffusers.FirstBlockCacheConfig(threshold=0.2))  # fmt: skip
cached("taylorseer_cache", "`enable_cache(TaylorSeerCacheConfig)` and `disable_cache`.", "flux",
       lambda pipe: diffusers.TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1,
                                                    taylor_factors_dtype=torch.float32))  # fmt: skip
cached("mag_cache", "`enable_cache(MagCacheConfig)` and `disable_cache`.", "flux",
       lambda pipe: diffusers.MagCacheConfig(threshold=0.5, num_inference_steps=6, mag_ratios=[1.0] * 6))  # fmt: skip
cached("pyramid_attention_broadcast", "`enable_cache(PyramidAttentionBroadcastConfig)`.", "cogvideo",
       lambda pipe: diffusers.PyramidAttentionBroadcastConfig(
           spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(-1, 1000),
           current_timestep_callback=lambda: pipe.current_timestep))  # fmt: skip
cached("faster_cache", "`enable_cache(FasterCacheConfig)` and `disable_cache`.", "cogvideo",
       lambda pipe: diffusers.FasterCacheConfig(
           spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(-1, 1000),
           unconditional_batch_skip_range=2, unconditional_batch_timestep_skip_range=(-1, 1000),
           attention_weight_callback=lambda module: 0.3, tensor_format="BFCHW",
           current_timestep_callback=lambda: pipe.current_timestep))  # fmt: skip


@usage(GROUP, skip=NO_CACHE)
def first_block_cache_called_twice(session: Session) -> Any:
    """Two calls with first-block caching: the cache starts empty in each call."""
    pipe = session.make("flux")
    pipe.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.2))
    return {
        "first": session.run(pipe, "flux", num_inference_steps=4),
        "second": session.run(pipe, "flux", num_inference_steps=4, prompt="another prompt"),
    }


@usage(GROUP)
def attention_backend_set(session: Session) -> Any:
    """`set_attention_backend` and `reset_attention_backend` of a transformer."""
    pipe = session.make("flux")
    first = session.run(pipe, "flux")
    pipe.transformer.set_attention_backend("_native_math")
    second = session.run(pipe, "flux")
    pipe.transformer.reset_attention_backend()
    return {"default": first, "math": second, "reset": session.run(pipe, "flux")}


@usage(GROUP)
def attention_backend_context(session: Session) -> Any:
    """A call inside diffusers' `attention_backend` context."""
    pipe = session.make("flux")
    with attention_backend("_native_math"):
        inside = session.run(pipe, "flux")
    return {"inside": inside, "outside": session.run(pipe, "flux")}


@usage(GROUP, fails=True)
def xformers_enabled(session: Session) -> Any:
    """`enable_xformers_memory_efficient_attention` without xformers."""
    pipe = session.make()
    pipe.enable_xformers_memory_efficient_attention()
    return session.run(pipe)


NO_STOCK_OFFLOAD = dict.fromkeys(("cpu", "split", "served"), "diffusers does not offload from the CPU to the CPU")


@usage(GROUP, skip=NO_STOCK_OFFLOAD)
def model_cpu_offload_by_the_user(session: Session) -> Any:
    """`enable_model_cpu_offload` after placing."""
    pipe = session.make()
    if session.device != "cpu":
        pipe.enable_model_cpu_offload(device=session.device)
    return {"first": session.run(pipe), "second": session.run(pipe)}


@usage(GROUP, skip=NO_STOCK_OFFLOAD)
def sequential_cpu_offload_by_the_user(session: Session) -> Any:
    """`enable_sequential_cpu_offload` after placing."""
    pipe = session.make()
    if session.device != "cpu":
        pipe.enable_sequential_cpu_offload(device=session.device)
    return {"first": session.run(pipe), "second": session.run(pipe)}


@usage(GROUP)
def group_offloading_of_blocks(session: Session) -> Any:
    """`enable_group_offload` of the pipeline, by blocks, without streams."""
    pipe = session.make()
    pipe.enable_group_offload(
        onload_device=torch.device(pipe.device), offload_device=torch.device("cpu"), offload_type="block_level",
        num_blocks_per_group=1, exclude_modules=["text_encoder"],
    )  # fmt: skip
    return {"first": session.run(pipe), "second": session.run(pipe)}


@usage(GROUP)
def layerwise_casting_to_bfloat16(session: Session) -> Any:
    """`enable_layerwise_casting` that stores weights in bfloat16."""
    pipe = session.make()
    pipe.unet.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    return session.run(pipe)


@usage(GROUP)
def vae_tiles_smaller_than_the_image(session: Session) -> Any:
    """`vae.enable_tiling` with tiles smaller than the image."""
    pipe = session.make()
    pipe.vae.enable_tiling()
    pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = 16, 8
    return session.run(pipe, height=32, width=32)


@usage(GROUP)
def gradient_checkpointing(session: Session) -> Any:
    """`enable_gradient_checkpointing` on the UNet."""
    pipe = session.make()
    pipe.unet.enable_gradient_checkpointing()
    return session.run(pipe)


@usage(GROUP)
def channels_last(session: Session) -> Any:
    """`pipe.unet.to(memory_format=torch.channels_last)` after placing."""
    pipe = session.make()
    pipe.unet.to(memory_format=torch.channels_last)
    layout = pipe.unet.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    return {"result": session.run(pipe), "channels_last": layout}
