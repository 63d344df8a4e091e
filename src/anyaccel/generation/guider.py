"""The guidance scale of modular pipelines in which it is a setting of the component `guider`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from anyaccel.runtime.call_parameters import read_blocks, read_call_parameters

__all__ = ["GUIDANCE_SCALE", "read_guider_scale", "using_guidance_scale"]

GUIDANCE_SCALE = "guidance_scale"
_GUIDER = "guider"


def read_guider_scale(pipe: Any) -> float | None:
    """Return the guidance scale of the guider, or None if it is a call argument or the pipeline has no such guider."""
    if read_blocks(pipe) is None or GUIDANCE_SCALE in read_call_parameters(pipe):
        return None
    guider = getattr(pipe, _GUIDER, None)
    scale = getattr(guider, "config", {}).get(GUIDANCE_SCALE)
    return float(scale) if isinstance(scale, int | float) and hasattr(guider, "new") else None


@contextmanager
def using_guidance_scale(pipe: Any, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments to pass to the pipeline, whose guider has the guidance scale of `call` in the `with` block.

    Calls that run at the same time would share the guider, so only one call may run inside of the block.
    """
    arguments = dict(call)
    if read_guider_scale(pipe) is None:
        yield arguments
        return
    scale, guider = arguments.pop(GUIDANCE_SCALE, None), getattr(pipe, _GUIDER)
    # Not `update_components`, which also changes the index that `save_pretrained` writes.
    if scale is not None:
        setattr(pipe, _GUIDER, guider.new(guidance_scale=scale))
    try:
        yield arguments
    finally:
        setattr(pipe, _GUIDER, guider)
