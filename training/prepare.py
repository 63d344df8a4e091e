"""The data: glyphs drawn once, the list of things with their groups, the tokenizer. Needs the font, and no GPU."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from anyaccel.embedded.judge import Judge
from training.captions import Scene, jitter, single
from training.glyphs import draw_glyph, name_colour
from training.scenes import Composer, as_batch
from training.things import Thing, list_things
from training.tokenizer import make_tokenizer

__all__ = ["EMBEDDED", "load_data", "load_things", "prepare", "render"]

EMBEDDED = Path(__file__).parents[1] / "src" / "anyaccel" / "embedded"
_TILE, _COLUMNS = 48, 36
_LOOKS = 3  # how often each thing is drawn and judged before groups are written down

Glyphs = np.ndarray[Any, np.dtype[np.uint8]]


def prepare(font: Path, folder: Path) -> None:
    """Write what training needs into a folder, and what the judge needs beside the embedded model."""
    drawn: dict[str, Glyphs] = {}

    def has_glyph(glyph: str) -> bool:
        picture = draw_glyph(glyph, font)
        if picture is not None:
            drawn[glyph] = picture
        return picture is not None

    things = _with_colours(list_things(has_glyph), drawn)
    glyphs = np.stack([drawn[thing.glyph] for thing in things])
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "glyphs.npz", glyphs=glyphs)
    tokenizer = make_tokenizer(things, folder / "tokenizer")
    tiles = [Image.fromarray(one).convert("RGBa").resize((_TILE, _TILE), Image.Resampling.BOX) for one in glyphs]
    _write_sheet([tile.convert("RGBA") for tile in tiles], EMBEDDED / "glyphs.webp")
    groups = _find_groups(things, glyphs, tiles, tokenizer)
    listed = [
        {"glyph": thing.glyph, "names": list(thing.names), "colour": thing.colour, "group": group}
        for thing, group in zip(things, groups, strict=True)
    ]
    lines = ",\n".join(f"  {json.dumps(thing, ensure_ascii=False)}" for thing in listed)
    (EMBEDDED / "things.json").write_text(f'{{"things": [\n{lines}\n]}}\n', encoding="utf-8")
    alike = len(things) - len(set(groups))
    print(f"{len(things)} things, {alike} of them alike to another; data in {folder}")


def load_things() -> tuple[Thing, ...]:
    """The things that the embedded model was trained on."""
    listed = json.loads((EMBEDDED / "things.json").read_text(encoding="utf-8"))["things"]
    return tuple(Thing(one["glyph"], tuple(one["names"]), one["colour"]) for one in listed)


def load_data(folder: Path) -> tuple[tuple[Thing, ...], Glyphs, Any]:
    """The things, their glyphs and the tokenizer, as `prepare` left them."""
    from transformers import CLIPTokenizer

    with np.load(folder / "glyphs.npz") as kept:
        glyphs = kept["glyphs"]
    return load_things(), glyphs, CLIPTokenizer.from_pretrained(folder / "tokenizer")


def render(scenes: list[Scene], composer: Composer, tokenizer: Any) -> list[Image.Image]:
    """Scenes drawn from the glyphs themselves, as pictures."""
    made = composer.draw(as_batch(scenes, tokenizer).to(composer.levels.device))
    pixels = ((made.permute(0, 2, 3, 1) + 1) * 127.5).round().clamp(0, 255).byte().cpu().numpy()
    return [Image.fromarray(one) for one in pixels]


def _with_colours(things: tuple[Thing, ...], drawn: dict[str, Glyphs]) -> tuple[Thing, ...]:
    """Things with their colour, unless it would give them another's name: a `red heart` is one of its own."""
    taken = {name: thing.glyph for thing in things for name in thing.names}
    made = []
    for thing in things:
        colour = name_colour(drawn[thing.glyph])
        clash = any(taken.get(f"{colour} {name}", thing.glyph) != thing.glyph for name in thing.names)
        made.append(thing if clash else dataclasses.replace(thing, colour=colour))
    return tuple(made)


def _write_sheet(tiles: list[Image.Image], path: Path) -> None:
    rows = -(-len(tiles) // _COLUMNS)
    sheet = Image.new("RGBA", (_COLUMNS * _TILE, rows * _TILE))
    for index, tile in enumerate(tiles):
        sheet.paste(tile, (index % _COLUMNS * _TILE, index // _COLUMNS * _TILE))
    sheet.save(path, lossless=True, quality=100, method=6)


def _find_groups(things: tuple[Thing, ...], glyphs: Glyphs, tiles: list[Image.Image], tokenizer: Any) -> list[int]:
    """Things that the judge takes for one another when they are drawn: they share the smallest of their numbers."""
    known = np.stack([np.asarray(tile.convert("RGBA"), np.float32) / 255 for tile in tiles])
    judge = Judge(known, [thing.name for thing in things], list(range(len(things))))
    composer, chance = Composer(glyphs, torch.device("cpu")), random.Random(0)
    group = list(range(len(things)))
    for _ in range(_LOOKS):
        for start in range(0, len(things), 64):
            indices = range(start, min(start + 64, len(things)))
            scenes = [single(things, index) for index in indices]
            moved = [dataclasses.replace(s, objects=tuple(jitter(o, chance) for o in s.objects)) for s in scenes]
            for index, picture in zip(indices, render(moved, composer, tokenizer), strict=True):
                seen = judge.classify(picture).groups[0]
                if group[seen] != group[index]:
                    old, new = max(group[seen], group[index]), min(group[seen], group[index])
                    group = [new if one == old else one for one in group]
    return group
