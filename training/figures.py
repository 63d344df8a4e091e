"""Metrics of a model on a device, with the versions and settings."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import anyaccel
from anyaccel.embedded.model import CALL_DEFAULTS, find_embedded_model
from training.evaluate import evaluate
from training.prepare import load_things

__all__ = ["measure", "open_model"]


def open_model(model: Path | None, device: str, dtype: str) -> Any:
    """Return a model placed by anyaccel, without progress bars."""
    pipe = anyaccel.DiffusionPipeline.from_pretrained(model or find_embedded_model())
    pipe.to(device, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def measure(
    model: Path | None, device: str, dtype: str, count: int, steps: int | None, guidance: float | None, batch: int
) -> dict[str, Any]:
    """Return the metrics of the model card, with every thing that was not recognized."""
    pipe = open_model(model, device, dtype)
    call = dict(CALL_DEFAULTS)
    call |= {"num_inference_steps": steps} if steps else {}
    call |= {"guidance_scale": guidance} if guidance is not None else {}

    def draw(prompts: list[str], seeds: list[int]) -> list[Image.Image]:
        images: list[Image.Image] = pipe(prompts, seed=seeds, **call).images
        return images

    figures, missed = evaluate(load_things(), draw, count, batch=batch)
    return {
        "device": str(pipe.device),
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "machine": _machine_name(pipe.device),
        "torch": torch.__version__,
        **call,
        **figures.as_json(),
        "missed": missed,
    }


def _machine_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{platform.machine()}, {torch.get_num_threads()} threads"
    return str(torch.get_device_module(device).get_device_name(device))
