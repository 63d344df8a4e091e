"""Recipe for a tiny Nucleus-Image pipeline."""

from __future__ import annotations

from typing import Any

from anyaccel.recipes.families.flux import flow_scheduler
from anyaccel.recipes.families.qwen_image import CHANNELS, autoencoder_qwen
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import prompted
from anyaccel.recipes.parts.language_models import qwen_3_vl
from anyaccel.recipes.parts.processors import qwen_3_vl_processor
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16


def parts() -> dict[str, Any]:
    """Return the components of a tiny Nucleus-Image pipeline: the transformer has a dense and two expert blocks."""
    return {
        "transformer": diffusers.NucleusMoEImageTransformer2DModel(
            in_channels=4 * CHANNELS,
            out_channels=CHANNELS,
            num_layers=3,
            attention_head_dim=16,
            num_attention_heads=2,
            num_key_value_heads=1,
            joint_attention_dim=TEXT_WIDTH,
            axes_dims_rope=(4, 6, 6),
            dense_moe_strategy="leave_first_block_dense",
            num_experts=4,
            moe_intermediate_dim=37,
            capacity_factors=2.0,
        ),
        "scheduler": flow_scheduler(),
        "vae": autoencoder_qwen(),
        "text_encoder": qwen_3_vl(),
        "processor": qwen_3_vl_processor(),
    }


RECIPES = (
    make_recipe(
        name="nucleus-image",
        pipeline="NucleusMoEImagePipeline",
        family="nucleus-image",
        parts=parts,
        # By default, the pipeline reads the eighth layer from the end.
        call=lambda: prompted(
            negative_prompt="blue", height=SIZE, width=SIZE, return_index=-1, max_sequence_length=512
        ),
    ),
)
