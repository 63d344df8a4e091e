"""Colors that a caption can request for a thing, and the glyphs in these colors."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from training.things import Thing

__all__ = ["COLORS", "ColorTable", "add_recolors", "differs_from"]

# RGB values of a recolored thing. White is darker than the white background, so that its outline remains visible.
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (214, 40, 40),
    "orange": (247, 135, 25),
    "yellow": (252, 214, 60),
    "green": (60, 165, 75),
    "blue": (45, 115, 225),
    "purple": (130, 65, 185),
    "pink": (250, 150, 190),
    "brown": (120, 76, 46),
    "white": (224, 225, 231),
    "black": (44, 44, 48),
    "grey": (142, 142, 146),
}
_COLOR_WORDS = {*COLORS, "gray", "golden", "gold", "silver"}
_LUMA = (0.299, 0.587, 0.114)
_RADIUS, _SOFTNESS = 0.18, 0.08  # distances between chromas that count as the same color, and of the transition
_MIN_COVERAGE = 0.75  # fraction of a glyph that changes its color
_HIGHLIGHTS = 0.6  # how much of the way to white the brightest pixels go
_SAMPLES = 16  # per side, for the main color of a glyph


def add_recolors(things: tuple[Thing, ...]) -> tuple[Thing, ...]:
    """Return the things with the colors that a caption can request, and the names that it can use with each.

    A name with a color is not used, nor one that is another thing's name with the color: `green apple`, `blue heart`.
    """
    taken = {name for thing in things for name in thing.names}
    result = []
    for thing in things:
        plain = [name for name in thing.names if not _COLOR_WORDS & set(name.replace("-", " ").split())]
        usable = {
            color: tuple(name for name in plain if not {f"{word} {name}" for word in spellings(color)} & taken)
            for color in COLORS
            if color != thing.color
        }
        result.append(dataclasses.replace(thing, recolors={color: names for color, names in usable.items() if names}))
    return tuple(result)


def spellings(color: str) -> tuple[str, ...]:
    """Return the words for a color."""
    return ("grey", "gray") if color == "grey" else (color,)


def differs_from(color: str, background: str) -> bool:
    """Return whether a thing in a color is visible on a background; white on white is, by its shades."""
    return color not in background.split() or color == "white"


class ColorTable:
    """Recolors glyphs: the pixels with about the main color of the glyph get the requested color, by their luma."""

    def __init__(self, glyphs: torch.Tensor) -> None:
        """`glyphs` [N, 4, height, width], from 0 to 1, not premultiplied."""
        rows = [_find_main_color(chunk) for chunk in glyphs.split(64)]
        self.main = torch.cat(rows)
        """Chroma (two numbers), radius and mean luma of every glyph's main color."""
        self.targets = torch.tensor(list(COLORS.values()), device=glyphs.device) / 255

    def apply(self, drawn: torch.Tensor, thing: torch.Tensor, color: torch.Tensor) -> torch.Tensor:
        """Return drawn glyphs (premultiplied) in the colors with these indices [B]; -1 keeps the colors."""
        main = self.main[thing][:, :, None, None]
        target = self.targets[color.clamp(min=0)][:, :, None, None]
        alpha = drawn[:, 3:]
        rgb = drawn[:, :3] / alpha.clamp(min=1e-3)
        luma, chroma = _split(rgb)
        distance = (chroma - main[:, :2]).square().sum(1, keepdim=True).sqrt()
        share = (1 - (distance - main[:, 2:3]) / _SOFTNESS).clamp(0, 1) * (color >= 0)[:, None, None, None]
        mean = main[:, 3:]
        shade = target * (luma / mean).clamp(max=1)
        brighter = ((luma - mean) / (1.02 - mean)).clamp(0, 1) * target.amax(1, keepdim=True)
        highlight = _HIGHLIGHTS * brighter * (1 - target)
        return torch.cat([torch.lerp(rgb, shade + highlight, share) * alpha, alpha], 1)


def _split(rgb: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the luma [B, 1, …] and the chroma [B, 2, …]."""
    luma: torch.Tensor = sum(weight * rgb[:, i : i + 1] for i, weight in enumerate(_LUMA))  # type: ignore[assignment]
    return luma, torch.cat([rgb[:, :1] - luma, rgb[:, 2:] - luma], 1)


def _find_main_color(glyphs: torch.Tensor) -> torch.Tensor:
    """Return chroma, radius and mean luma [N, 4] of the most frequent chroma."""
    alpha = F.adaptive_avg_pool2d(glyphs[:, 3:], _SAMPLES)
    rgb = F.adaptive_avg_pool2d(glyphs[:, :3] * glyphs[:, 3:], _SAMPLES) / alpha.clamp(min=1e-3)
    luma, chroma = (values.flatten(2).transpose(1, 2) for values in _split(rgb))
    weight = alpha.flatten(1) / alpha.flatten(1).sum(1, keepdim=True).clamp(min=1e-3)
    distances = torch.cdist(chroma, chroma)
    neighbors = ((distances < _RADIUS) * weight[:, None]).sum(2) * (weight > 0.5 / _SAMPLES**2)
    best = neighbors.argmax(1)
    row = torch.arange(len(glyphs), device=glyphs.device)
    order = distances[row, best].argsort(1)
    covered = weight.gather(1, order).cumsum(1)
    last = (covered < _MIN_COVERAGE).sum(1).clamp(max=_SAMPLES**2 - 1)
    radius = distances[row, best].gather(1, order).gather(1, last[:, None]).clamp(min=_RADIUS)
    inside = weight * (distances[row, best] <= radius)
    mean = (inside * luma[..., 0]).sum(1, keepdim=True) / inside.sum(1, keepdim=True)
    return torch.cat([chroma[row, best], radius, mean.clamp(0.08, 0.98)], 1)
