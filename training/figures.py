"""Metrics of a model on a device, with the versions and settings."""

from __future__ import annotations

import math
import platform
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import anyaccel
from anyaccel.embedded.model import CALL_DEFAULTS, find_embedded_model
from training.captions import Scene, draw_scene
from training.evaluate import evaluate
from training.prepare import load_glyphs, load_things
from training.scenes import Composer, as_batch

__all__ = ["Measurement", "machine_name", "measure", "open_model"]

# Prompts of the contact sheet: what people try first, and what misled them in the first model.
_PROMPTS = (
    "a cat", "a dog", "a fox", "a red apple", "a rocket", "a castle", "a large elephant", "a small star",
    "a cat and a pizza", "a dog and a cat", "a rocket on a dark blue background", "a car on a green background",
    "a white cat", "a black cat", "a gray cat", "a green fox", "a purple banana", "a blue apple", "a pink elephant",
    "a blue rocket", "a green car", "a yellow dragon", "a red elephant", "an orange guitar", "a brown bear",
    "a white horse on a dark green background", "a blue apple and a red banana", "a green cat and a purple dog",
    "three cats", "three red apples", "three rockets", "three small stars on black", "two dogs", "three blue fish",
    "a rocket flying to the left", "a cat bouncing", "a guitar spinning", "a red apple growing", "a cat shaking",
    "a rocket fading away",
)  # fmt: skip
_SEED, _COLUMNS = 7, 8
_ROUND_TRIPS, _ROUND_TRIP_SEED = 400, 20261119


@dataclass(frozen=True)
class Measurement:
    """What to measure."""

    model: Path | None = None
    device: str = "auto"
    dtype: str = "float32"
    things: int = 300
    steps: int | None = None
    guidance: float | None = None
    batch: int = 100
    workers: int = 1
    glyphs: Path | None = None
    """Folder with the glyphs, to measure the autoencoder."""
    sheet: Path | None = None
    """PNG file for the images of fixed prompts."""


def open_model(model: Path | None, device: str, dtype: str) -> Any:
    """Return a model placed by anyaccel, without progress bars."""
    pipe = anyaccel.DiffusionPipeline.from_pretrained(model or find_embedded_model())
    pipe.to(device, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def measure(settings: Measurement) -> dict[str, Any]:
    """Return the metrics of the model card, with everything that was not recognized."""
    pipe = open_model(settings.model, settings.device, settings.dtype)
    call = dict(CALL_DEFAULTS)
    call |= {"num_inference_steps": settings.steps} if settings.steps else {}
    call |= {"guidance_scale": settings.guidance} if settings.guidance is not None else {}

    def draw(prompts: list[str], seeds: list[int]) -> list[Image.Image]:
        images: list[Image.Image] = pipe(prompts, seed=seeds, **call).images
        return images

    if settings.sheet:
        _arrange(draw(list(_PROMPTS), [_SEED] * len(_PROMPTS))).save(settings.sheet)
    figures, missed = evaluate(load_things(), draw, settings.things, batch=settings.batch, workers=settings.workers)
    return {
        "device": str(pipe.device),
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "machine": machine_name(pipe.device),
        "torch": torch.__version__,
        **call,
        **figures,
        **(_measure_round_trip(pipe, settings.glyphs) if settings.glyphs else {}),
        "missed": missed,
    }


def _arrange(images: list[Image.Image]) -> Image.Image:
    """Return one image with all images in rows."""
    side = images[0].width
    sheet = Image.new("RGB", (_COLUMNS * side, -(-len(images) // _COLUMNS) * side))
    for index, image in enumerate(images):
        sheet.paste(image, (index % _COLUMNS * side, index // _COLUMNS * side))
    return sheet


@torch.no_grad()
def _measure_round_trip(pipe: Any, folder: Path) -> dict[str, float]:
    """Return the PSNR of noisy latents, decoded, in the whole images and in the boxes of the things."""
    things, rng = load_things(), random.Random(_ROUND_TRIP_SEED)
    composer = Composer(load_glyphs(folder), pipe.device)
    scenes = [draw_scene(things, rng) for _ in range(_ROUND_TRIPS)]
    generator = torch.Generator("cpu").manual_seed(_ROUND_TRIP_SEED)
    errors: dict[str, list[float]] = {"psnr_db": [], "psnr_natural_box_db": [], "psnr_recolored_box_db": []}
    for start in range(0, len(scenes), 50):
        part = scenes[start : start + 50]
        images = composer.draw(as_batch(part, pipe.tokenizer).to(pipe.device))
        moments = pipe.vae.encode(images.to(pipe.vae.dtype)).latent_dist
        noise = torch.randn(moments.mean.shape, generator=generator).to(moments.mean)
        decoded = pipe.vae.decode(moments.mean + moments.std * noise).sample.float()
        squared = (decoded.clamp(-1, 1) - images).square().mean(1).cpu()
        for scene, error in zip(part, squared, strict=True):
            errors["psnr_db"].append(error.mean().item())
            for box, color in _boxes(scene):
                errors["psnr_recolored_box_db" if color else "psnr_natural_box_db"].append(error[box].mean().item())
    return {name: round(10 * math.log10(4 * len(rows) / sum(rows)), 2) for name, rows in errors.items() if rows}


def _boxes(scene: Scene) -> list[tuple[tuple[slice, slice], str | None]]:
    """Return the box (rows, columns) and the color of every object."""
    return [
        ((slice(max(0, int(o.y - o.size / 2)), int(o.y + o.size / 2)),
          slice(max(0, int(o.x - o.size / 2)), int(o.x + o.size / 2))), o.color)
        for o in scene.objects
    ]  # fmt: skip


def machine_name(device: torch.device) -> str:
    """Return the name of a device's hardware."""
    if device.type == "cpu":
        return f"{platform.machine()}, {torch.get_num_threads()} threads"
    return str(torch.get_device_module(device).get_device_name(device))
