"""The blocks of modular pipelines in diffusers 0.42.1. File paths are relative to its package."""

from __future__ import annotations

from typing import Any

__all__ = ["BLOCKS_ATTRIBUTE", "configure_progress_bars", "disable_progress_bars", "list_blocks"]

# Attribute of a modular pipeline that contains its blocks (modular_pipelines/modular_pipeline.py).
BLOCKS_ATTRIBUTE = "_blocks"


def disable_progress_bars(pipe: Any) -> None:
    """Disable the progress bars of a pipeline's calls, including those of nested blocks in a modular pipeline."""
    configure_progress_bars(pipe, disable=True)


def configure_progress_bars(pipe: Any, **config: Any) -> None:
    """Call `set_progress_bar_config` of a pipeline, and of the nested blocks in a modular pipeline.

    `ModularPipeline.set_progress_bar_config` does not change blocks inside of blocks
    (modular_pipelines/modular_pipeline.py).
    """
    pipe.set_progress_bar_config(**config)
    for block in list_blocks(pipe):
        if hasattr(block, "set_progress_bar_config"):
            block.set_progress_bar_config(**config)


def list_blocks(pipe: Any) -> list[Any]:
    """Return the blocks of a modular pipeline with the blocks inside of them; none for other pipelines."""
    remaining = [block] if (block := getattr(pipe, BLOCKS_ATTRIBUTE, None)) is not None else []
    blocks: list[Any] = []
    while remaining:
        block = remaining.pop()
        blocks.append(block)
        remaining += (getattr(block, "sub_blocks", None) or {}).values()
    return blocks
