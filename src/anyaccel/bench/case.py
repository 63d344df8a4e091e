"""The work that is measured: a model, a device, and one call."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

__all__ = ["FAST", "OURS", "STOCK", "USUAL", "VARIANTS", "BenchCase"]

STOCK = ("stock eager", "stock compiled")
OURS, FAST = "anyaccel", "anyaccel fast"
VARIANTS = (*STOCK, OURS, FAST)
USUAL = (*STOCK, OURS)


@dataclass(frozen=True, kw_only=True)
class BenchCase:
    """One call of one pipeline; plain data, so that it goes to another process."""

    model: str
    """`embedded`, a folder, a hub id; with `random`, one whose config files are known."""
    title: str = ""
    device: str = "auto"
    dtype: str | None = None
    random: bool = False
    """Whether denoiser and autoencoder have their full size and random weights, and there are no text encoders."""
    embeds: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The shapes of what stands for the prompt where there are no text encoders."""
    call: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    """What of the denoiser's config differs."""
    scheduler: str = ""
    """Another scheduler's class, with its defaults."""
    options: dict[str, Any] = field(default_factory=dict)
    """For anyaccel alone."""
    variants: tuple[str, ...] = USUAL
    floor_s: float | None = None
    """What the device's arithmetic allows, where somebody counted."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, kept: dict[str, Any]) -> BenchCase:
        """From what `to_dict` gave, through JSON."""
        made = cls(**kept)
        embeds = {name: tuple(shape) for name, shape in made.embeds.items()}
        return replace(made, embeds=embeds, variants=tuple(made.variants))
