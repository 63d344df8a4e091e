"""Recipe for a tiny RFD4-Proteina pipeline, which generates the structure and sequence of a protein."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers, torch
from anyaccel.recipes.parts.calls import embedding, generator
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

TOKENS = 8
ATOMS = 37
RESIDUE_TYPES = 24
TOKEN_TYPES = 7
LATENT_WIDTH = 8

recipe = functools.partial(make_recipe, family="protein")


def parts() -> dict[str, Any]:
    """Return the components of a tiny RFD4-Proteina pipeline with three steps.

    In the last one, the tokens pass the layers of the transformer twice.
    """
    widths = {"token_dim": 32, "nheads": 4, "dim_cond": 16, "pair_repr_dim": 16, "latent_dim": LATENT_WIDTH}
    return {
        "transformer": diffusers.RFD4ProteinaTransformer(
            nlayers=3,
            token_type_emb_dim=8,
            cath_emb_dim=8,
            t_emb_dim=16,
            seq_sep_dim=8,
            xt_pair_dist_dim=8,
            tri_mult_c=16,
            num_sequence_classes=RESIDUE_TYPES,
            num_token_types=TOKEN_TYPES,
            **widths,
        ),
        "vae": diffusers.RFD4ProteinaAutoencoder(
            # All atoms exist in every residue type, and every token may have any type but the mask, which is type 0.
            atom37_mask=[[True] * ATOMS] * RESIDUE_TYPES,
            allowed_residue_types=[[False] + [True] * (RESIDUE_TYPES - 1)] * TOKEN_TYPES,
            n_residue_types=RESIDUE_TYPES,
            num_token_types=TOKEN_TYPES,
            nlayers=2,
            token_type_emb_dim=8,
            **widths,
        ),
        "bb_ca_scheduler": scheduler("log", "1/t"),
        "local_latents_scheduler": scheduler("power", "tan"),
        "recycle_depths": [1, 1, 2],
    }


def scheduler(schedule_mode: str, noise_mode: str) -> Any:
    """Return a scheduler without the default ten additional final steps."""
    return diffusers.RFD4ProteinaScheduler(
        schedule_mode=schedule_mode, noise_mode=noise_mode, tsr_k=2.0, tsr_sigma=0.5, tail_steps=0
    )


def call() -> dict[str, Any]:
    """Return call arguments for a chain of eight tokens, with the residue type of the first one given."""
    tokens = torch.arange(TOKENS)[None]
    atoms = (embedding(1, TOKENS, ATOMS) > 0).long()
    interactions = ("hbond", "pistack", "pication", "saltbridge", "hydrophobic", "metal-coord")
    return {
        "padding_mask": torch.ones(1, TOKENS, dtype=torch.bool),
        "is_in_context_conditioning": torch.zeros(1, TOKENS, dtype=torch.bool),
        "supports_local_latent": torch.ones(1, TOKENS, dtype=torch.bool),
        "token_type": torch.zeros(1, TOKENS, dtype=torch.long),
        "atom37_mask": torch.ones(1, TOKENS, ATOMS, dtype=torch.bool),
        "conditioning_features": {
            "condition_sequence_1_residue": 5 * (tokens == 0).long(),
            "condition_index-group_1_token": tokens % 2,
            "molecule_iid": torch.zeros_like(tokens),
            "molecule_entity_id": torch.zeros_like(tokens),
            "token_bond_path_length": (tokens[:, :, None] - tokens[:, None, :]).abs(),
            "condition_CoordinateGroup_1_atom": atoms - 1,
            "condition_coordinate_1_atom": embedding(1, TOKENS, ATOMS, 3, seed=4),
            **{f"condition_{name}_1_atom": atoms for name in interactions},
        },
        "generator": generator(),
        "output_type": "np",
    }


RECIPES = (recipe(name="rfd4-proteina", pipeline="RFD4ProteinaPipeline", parts=parts, call=call),)
