"""Benchmark cases: a model, a device and one pipeline call."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

__all__ = ["FAST", "OURS", "STOCK", "USUAL", "VARIANTS", "BenchCase"]

STOCK = ("stock eager", "stock compiled")
OURS, FAST = "anyaccel", "anyaccel fast"
VARIANTS = (*STOCK, OURS, FAST)
# Default variants of a case.
USUAL = (*STOCK, OURS)


@dataclass(frozen=True, kw_only=True)
class BenchCase:
    """One pipeline call to benchmark.

    A case contains only JSON-serializable data, because each variant runs in its own process.
    """

    model: str
    """`embedded`, a folder or a Hub ID; with `random`, a model for which the package has config files."""
    title: str = ""
    device: str = "auto"
    dtype: str | None = None
    random: bool = False
    """Whether to use a full-size denoiser and autoencoder with random weights and no text encoders."""
    embeds: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the prompt embeddings, for cases without text encoders."""
    call: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    """Overrides for the denoiser's config."""
    scheduler: str = ""
    """Name of a scheduler class that replaces the default one."""
    options: dict[str, Any] = field(default_factory=dict)
    """Placement options of the anyaccel variants."""
    variants: tuple[str, ...] = USUAL
    floor_s: float | None = None
    """Lower bound of the time, computed from the FLOPs and the peak rate of the device."""

    def to_dict(self) -> dict[str, Any]:
        """Return the case as a JSON-serializable dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> BenchCase:
        """Create a case from the output of `to_dict`."""
        case = cls(**data)
        # JSON turns tuples into lists.
        embeds = {name: tuple(shape) for name, shape in case.embeds.items()}
        return replace(case, embeds=embeds, variants=tuple(case.variants))
