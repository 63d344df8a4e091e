"""What a user of `anyaccel generate` should know before the wait, and would not expect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyaccel.generation.model_cache import LoadedModel

__all__ = ["find_notes"]

_MUCH_SLOWER = 4
_EMBEDDED_SIDE = 128
_MOST_WORDS = 5


def find_notes(loaded: LoadedModel, call: Mapping[str, Any], prompts: Sequence[str]) -> Iterator[str]:
    """Each in a sentence."""
    from anyaccel.backends.half_precision_probe import measure_half_precision
    from anyaccel.backends.torch_device import is_host
    from anyaccel.embedded.vocabulary import find_unknown_words

    plan, dtype = loaded.pipe.plan, loaded.pipe.plan.dtype.value
    on_host = plan.virtual or is_host(loaded.pipe.device)
    times = measure_half_precision().get(dtype, 1.0) if on_host else 1.0
    if times > _MUCH_SLOWER:
        yield f"this host computes {dtype} {times:.0f} times slower than float32"
    sides = {call.get(name, _EMBEDDED_SIDE) for name in ("width", "height")}
    if loaded.model.kind == "embedded" and sides != {_EMBEDDED_SIDE}:
        yield f"the embedded model knows pictures of {_EMBEDDED_SIDE}x{_EMBEDDED_SIDE} alone: others are muddles"
    unknown = find_unknown_words(" ".join(prompts)) if loaded.model.kind == "embedded" else []
    if unknown:
        told = ", ".join(unknown[:_MOST_WORDS]) + (", …" if len(unknown) > _MOST_WORDS else "")
        yield f"the embedded model was not taught: {told}; it draws emoji by their names"
