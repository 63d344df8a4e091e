"""Single-file checkpoints of Stable Diffusion, in the format of the original code, written from a pipeline.

The inverse of the conversion in diffusers/loaders/single_file_utils.py, for models with one attention layer per block.
"""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

UNET = {
    "time_embedding.linear_1.": "time_embed.0.", "time_embedding.linear_2.": "time_embed.2.",
    "conv_in.": "input_blocks.0.0.", "conv_norm_out.": "out.0.", "conv_out.": "out.2.",
    "mid_block.resnets.0.": "middle_block.0.", "mid_block.attentions.0.": "middle_block.1.",
    "mid_block.resnets.1.": "middle_block.2.",
}  # fmt: skip
UNET_LAYERS = {
    ".norm1.": ".in_layers.0.", ".conv1.": ".in_layers.2.", ".norm2.": ".out_layers.0.", ".conv2.": ".out_layers.3.",
    ".time_emb_proj.": ".emb_layers.1.", ".conv_shortcut.": ".skip_connection.",
}  # fmt: skip
VAE = {
    "mid_block.resnets.0.": "mid.block_1.", "mid_block.resnets.1.": "mid.block_2.",
    "mid_block.attentions.0.": "mid.attn_1.", "conv_norm_out.": "norm_out.", "conv_shortcut.": "nin_shortcut.",
    "group_norm.": "norm.", "to_q.": "q.", "to_k.": "k.", "to_v.": "v.", "to_out.0.": "proj_out.",
}  # fmt: skip


def write_checkpoint(pipe: Any, path: Path) -> None:
    """Write the UNet, the VAE and the text encoder of a pipeline to a file."""
    unet, vae = pipe.unet, pipe.vae
    tensors = {f"model.diffusion_model.{_name_unet(unet, key)}": value for key, value in unet.state_dict().items()}
    blocks = len(vae.config.block_out_channels)
    for key, value in vae.state_dict().items():
        name = _name_vae(key, blocks)
        is_matrix = ".attn_1." in name and value.dim() == 2  # 1x1 convolutions in the original code
        tensors[f"first_stage_model.{name}"] = value[:, :, None, None] if is_matrix else value
    for key, value in pipe.text_encoder.state_dict().items():
        prefix = "" if key.startswith("text_model.") else "text_model."
        tensors[f"cond_stage_model.transformer.{prefix}{key}"] = value
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)


def _name_unet(unet: Any, key: str) -> str:
    layers = unet.config.layers_per_block
    for name, original in UNET.items():
        if key.startswith(name):
            return _replace(original + key[len(name) :], UNET_LAYERS if "resnets" in name else {})
    kind, block, part, layer, rest = key.split(".", 4)
    rest = _replace(f".{rest}", UNET_LAYERS)[1:] if part == "resnets" else rest
    down = kind == "down_blocks"
    first, parts = (1, layers + 1) if down else (0, layers + 1)
    position = first + int(block) * parts
    if part in ("resnets", "attentions"):
        index = 0 if part == "resnets" else 1
        return f"{'input' if down else 'output'}_blocks.{position + int(layer)}.{index}.{rest}"
    if down:
        return f"input_blocks.{position + layers}.0.op.{rest.removeprefix('conv.')}"
    has_attention = "CrossAttn" in unet.config.up_block_types[int(block)]
    return f"output_blocks.{position + layers}.{2 if has_attention else 1}.{rest}"


def _name_vae(key: str, blocks: int) -> str:
    half, *words = key.split(".")
    if words[0] in ("down_blocks", "up_blocks"):
        kind, block, part, layer, *rest = words
        up = kind == "up_blocks"
        number = blocks - 1 - int(block) if up else int(block)
        name = "up" if up else "down"
        words = [name, str(number), *(["block", layer] if part == "resnets" else [f"{name}sample"]), *rest]
    return _replace(".".join((half, *words)), VAE)


def _replace(key: str, names: dict[str, str]) -> str:
    for name, original in names.items():
        key = key.replace(name, original)
    return key
