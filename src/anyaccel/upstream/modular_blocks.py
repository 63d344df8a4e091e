"""The blocks of modular pipelines in diffusers 0.42.1. File paths are relative to its package."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = [
    "BLOCKS_ATTRIBUTE",
    "STATE_ARGUMENT",
    "configure_progress_bars",
    "disable_progress_bars",
    "find_blocks",
    "list_blocks",
    "list_workflows",
    "progress_bars_disabled",
    "read_progress_bar_config",
    "read_state",
]

# Attribute of a modular pipeline that contains its blocks (modular_pipelines/modular_pipeline.py).
BLOCKS_ATTRIBUTE = "_blocks"
# Argument of a modular pipeline's call: the values of an earlier call.
STATE_ARGUMENT = "state"
# The arguments of the last `set_progress_bar_config` call of a pipeline (pipelines/pipeline_utils.py) or block.
_BAR_CONFIG = "_progress_bar_config"


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


def read_progress_bar_config(pipe: Any) -> dict[str, Any]:
    """Return the configuration of a pipeline's progress bars; that of a modular pipeline is the one of its blocks."""
    configs = (vars(owner).get(_BAR_CONFIG) for owner in [pipe, *list_blocks(pipe)])
    return next((config for config in configs if config), {})


@contextmanager
def progress_bars_disabled(pipe: Any) -> Iterator[None]:
    """Disable the progress bars of a pipeline's calls inside the `with` block."""
    owners = [pipe, *list_blocks(pipe)]
    before = [vars(owner).get(_BAR_CONFIG) for owner in owners]
    disable_progress_bars(pipe)
    try:
        yield
    finally:
        for owner, config in zip(owners, before, strict=True):
            vars(owner).pop(_BAR_CONFIG, None)
            if config is not None:
                vars(owner)[_BAR_CONFIG] = config


def find_blocks(pipe: Any) -> Any:
    """Return the blocks of a modular pipeline, or None for another pipeline."""
    # Not the attribute `blocks`, which returns a deep copy. Pipelines of users may have attributes of both names.
    library: Any = importlib.import_module("diffusers")
    return getattr(pipe, BLOCKS_ATTRIBUTE) if isinstance(pipe, library.ModularPipeline) else None


def list_workflows(pipe: Any) -> list[str]:
    """Return the names of the workflows that the blocks of a modular pipeline declare."""
    # `available_workflows` raises `NotImplementedError` if there are none (modular_pipelines/modular_pipeline.py).
    return list(getattr(find_blocks(pipe), "_workflow_map", None) or ())


def read_state(pipe: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in the state that a call of a modular pipeline continues; none for other calls."""
    state = arguments.get(STATE_ARGUMENT)  # a `PipelineState` (modular_pipelines/modular_pipeline.py)
    return {} if state is None or find_blocks(pipe) is None else dict(state.values)


def list_blocks(pipe: Any) -> list[Any]:
    """Return the blocks of a modular pipeline with the blocks inside of them; none for other pipelines."""
    remaining = [block] if (block := find_blocks(pipe)) is not None else []
    blocks: list[Any] = []
    while remaining:
        block = remaining.pop()
        blocks.append(block)
        remaining += (getattr(block, "sub_blocks", None) or {}).values()
    return blocks
