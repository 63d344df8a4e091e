"""Notes that `anyaccel generate` prints before the first image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyaccel.generation.model_loading import LoadedModel

__all__ = ["find_notes"]

# Side in pixels of the training images of the embedded model.
_EMBEDDED_SIDE = 128
_MAX_WORDS = 5


def find_notes(loaded: LoadedModel, call: Mapping[str, Any], prompts: Sequence[str]) -> Iterator[str]:
    """Yield notes about a slow dtype, an unsuitable image size or unknown words in a prompt."""
    from anyaccel.backends.cpu_half_precision_speed import SLOWDOWN_LIMIT, measure_half_precision
    from anyaccel.backends.device_type_checks import is_host
    from anyaccel.embedded.vocabulary import find_unknown_words

    plan, dtype = loaded.pipe.plan, loaded.pipe.plan.dtype.value
    # A virtual device computes on the CPU as well.
    on_cpu = plan.virtual or is_host(loaded.pipe.device)
    slowdown = measure_half_precision().get(dtype, 1.0) if on_cpu else 1.0
    if slowdown > SLOWDOWN_LIMIT:
        yield f"{dtype} is {slowdown:.0f} times slower than float32 on this CPU"
    sides = {call.get(name, _EMBEDDED_SIDE) for name in ("width", "height")}
    if loaded.model.kind == "embedded" and sides != {_EMBEDDED_SIDE}:
        yield f"the embedded model supports only {_EMBEDDED_SIDE}x{_EMBEDDED_SIDE} pixels; other sizes look distorted"
    if loaded.model.kind != "embedded":
        return
    unknown = find_unknown_words(" ".join(prompts))
    if unknown:
        supported = "names of emoji and words for motions" if loaded.model.with_motion else "names of emoji"
        listed = ", ".join(unknown[:_MAX_WORDS]) + (", …" if len(unknown) > _MAX_WORDS else "")
        yield f"the embedded model does not know these words: {listed}; it supports only {supported}"
