"""Benchmark cases: a model, a device and one pipeline call."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

__all__ = ["ANYACCEL", "FAST", "OFFLOADED", "OURS", "STOCK", "USUAL", "VARIANTS", "BenchCase"]

STOCK = ("stock eager", "stock compiled")
OURS, FAST, OFFLOADED = "anyaccel", "anyaccel fast", "anyaccel offloaded"
ANYACCEL = (OURS, FAST, OFFLOADED)
VARIANTS = (*STOCK, *ANYACCEL)
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
    """Whether to use full-size models with random weights and no text encoders."""
    pipeline: str = ""
    """Name of a pipeline class that replaces the one in the model's index; only with `random`."""
    embeds: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the prompt embeddings and their masks, for cases without text encoders."""
    images: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Width and height of the input images, by argument name; a name with `mask` gets a mask."""
    call: dict[str, Any] = field(default_factory=dict)
    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Overrides for the config files, by component name."""
    scheduler: str = ""
    """Name of a scheduler class that replaces the default one."""
    options: dict[str, Any] = field(default_factory=dict)
    """Placement options of the anyaccel variants."""
    offload: str = "component"
    """The `memory` option of the variant `anyaccel offloaded`."""
    stock_compile: tuple[str, ...] = ("denoiser", "vae")
    """What `stock compiled` compiles: `denoiser`, `vae`, or `blocks` for only the repeated blocks of the denoiser."""
    profile: bool = True
    """Whether to profile one more call of the anyaccel variants."""
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
        images = {name: (width, height) for name, (width, height) in case.images.items()}
        return replace(
            case,
            embeds=embeds,
            images=images,
            variants=tuple(case.variants),
            stock_compile=tuple(case.stock_compile),
        )
