"""Training data: glyphs, the list of things with their groups, and the tokenizer. Needs the font but no GPU."""

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
from anyaccel.errors import UsageError
from training.captions import Scene, jitter, single
from training.colors import add_recolors
from training.glyphs import draw_glyph, name_color
from training.scenes import Composer, as_batch
from training.things import Thing, list_things
from training.tokenizer import make_tokenizer

__all__ = ["EMBEDDED", "Glyphs", "draw_glyphs", "load_data", "load_glyphs", "load_things", "prepare", "render"]

EMBEDDED = Path(__file__).parents[1] / "src" / "anyaccel" / "embedded"
_TILE, _COLUMNS = 48, 36
_JUDGED_IMAGES = 3  # images per thing for finding groups

Glyphs = np.ndarray[Any, np.dtype[np.uint8]]


def prepare(font: Path, folder: Path) -> None:
    """Write the training data into a folder, and the judge's data next to the embedded model."""
    drawn: dict[str, Glyphs] = {}

    def has_glyph(glyph: str) -> bool:
        image = draw_glyph(glyph, font)
        if image is not None:
            drawn[glyph] = image
        return image is not None

    things = add_recolors(_add_colors(list_things(has_glyph), drawn))
    glyphs = np.stack([drawn[thing.glyph] for thing in things])
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "glyphs.npz", glyphs=glyphs)
    tokenizer = make_tokenizer(things, folder / "tokenizer")
    tiles = [Image.fromarray(glyph).convert("RGBa").resize((_TILE, _TILE), Image.Resampling.BOX) for glyph in glyphs]
    _write_sheet([tile.convert("RGBA") for tile in tiles], EMBEDDED / "glyphs.webp")
    groups = _find_groups(things, glyphs, tiles, tokenizer)
    entries = [
        {"glyph": thing.glyph, "names": list(thing.names), "colour": thing.color, "group": group}
        for thing, group in zip(things, groups, strict=True)
    ]
    lines = ",\n".join(f"  {json.dumps(thing, ensure_ascii=False)}" for thing in entries)
    (EMBEDDED / "things.json").write_text(f'{{"things": [\n{lines}\n]}}\n', encoding="utf-8")
    lookalikes = len(things) - len(set(groups))
    print(f"{len(things)} things, {lookalikes} of them look like another; data in {folder}")


def load_things() -> tuple[Thing, ...]:
    """Return the things that the embedded model was trained on."""
    entries = json.loads((EMBEDDED / "things.json").read_text(encoding="utf-8"))["things"]
    return add_recolors(tuple(Thing(entry["glyph"], tuple(entry["names"]), entry["colour"]) for entry in entries))


def draw_glyphs(font: Path, folder: Path) -> None:
    """Write the glyphs of the embedded model's things into a folder; its list of things stays as it is."""
    glyphs = [draw_glyph(thing.glyph, font) for thing in load_things()]
    missing = [thing.name for thing, glyph in zip(load_things(), glyphs, strict=True) if glyph is None]
    if missing:
        raise UsageError(f"the font has no glyph for {missing[0]}", hint="use Noto Color Emoji 2.042 from Debian 12")
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "glyphs.npz", glyphs=np.stack([glyph for glyph in glyphs if glyph is not None]))


def load_data(folder: Path) -> tuple[tuple[Thing, ...], Glyphs, Any]:
    """Return the things, their glyphs and the tokenizer written by `prepare`."""
    from transformers import CLIPTokenizer

    return load_things(), load_glyphs(folder), CLIPTokenizer.from_pretrained(folder / "tokenizer")


def load_glyphs(folder: Path) -> Glyphs:
    """Return the glyphs written by `prepare`."""
    path = folder / "glyphs.npz"
    if not path.is_file():
        raise UsageError(f"no glyphs in {folder}", hint="run `python -m training prepare --glyphs-only`")
    with np.load(path) as arrays:
        glyphs: Glyphs = arrays["glyphs"]
    return glyphs


def render(scenes: list[Scene], composer: Composer, tokenizer: Any) -> list[Image.Image]:
    """Return the images of scenes, composed from the glyphs."""
    images = composer.draw(as_batch(scenes, tokenizer).to(composer.levels.device))
    pixels = ((images.permute(0, 2, 3, 1) + 1) * 127.5).round().clamp(0, 255).byte().cpu().numpy()
    return [Image.fromarray(image) for image in pixels]


def _add_colors(things: tuple[Thing, ...], drawn: dict[str, Glyphs]) -> tuple[Thing, ...]:
    """Return the things with their color, unless color and name are the name of another thing, such as `red heart`."""
    taken = {name: thing.glyph for thing in things for name in thing.names}
    result = []
    for thing in things:
        color = name_color(drawn[thing.glyph])
        clash = any(taken.get(f"{color} {name}", thing.glyph) != thing.glyph for name in thing.names)
        result.append(thing if clash else dataclasses.replace(thing, color=color))
    return tuple(result)


def _write_sheet(tiles: list[Image.Image], path: Path) -> None:
    rows = -(-len(tiles) // _COLUMNS)
    sheet = Image.new("RGBA", (_COLUMNS * _TILE, rows * _TILE))
    for index, tile in enumerate(tiles):
        sheet.paste(tile, (index % _COLUMNS * _TILE, index // _COLUMNS * _TILE))
    sheet.save(path, lossless=True, quality=100, method=6)


def _find_groups(things: tuple[Thing, ...], glyphs: Glyphs, tiles: list[Image.Image], tokenizer: Any) -> list[int]:
    """Return the group of each thing: things that the judge confuses share the smallest of their indices."""
    references = np.stack([np.asarray(tile.convert("RGBA"), np.float32) / 255 for tile in tiles])
    judge = Judge(references, [thing.name for thing in things], list(range(len(things))))
    composer, rng = Composer(glyphs, torch.device("cpu")), random.Random(0)
    group = list(range(len(things)))
    for _ in range(_JUDGED_IMAGES):
        for start in range(0, len(things), 64):
            indices = range(start, min(start + 64, len(things)))
            scenes = [single(things, index) for index in indices]
            jittered = [dataclasses.replace(s, objects=tuple(jitter(o, rng) for o in s.objects)) for s in scenes]
            for index, image in zip(indices, render(jittered, composer, tokenizer), strict=True):
                answer = judge.classify(image).groups[0]
                if group[answer] != group[index]:
                    old, new = max(group[answer], group[index]), min(group[answer], group[index])
                    group = [new if number == old else number for number in group]
    return group
