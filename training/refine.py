"""Fine-tuning of a trained image model: `python -m training refine`, which resumes when it is run again.

The autoencoder's encoder stays as it is, so the latent space does not change. The denoiser with the text encoder, and
the decoder, can therefore be trained at the same time, in two processes.
"""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from anyaccel.errors import AnyaccelError
from training.autoencoder import refine_decoder
from training.denoiser import train_denoiser
from training.model import assemble, save
from training.prepare import load_glyphs, load_things
from training.scenes import Composer

__all__ = ["RefineSettings", "refine"]

_RATE = 5e-4  # of the denoiser; less than half of the rate of the first training
_DECODER_SEED, _DENOISER_SEED = 50_000, 60_000  # of scenes, other than those of the first training


@dataclass(frozen=True)
class RefineSettings:
    """Settings of a run."""

    data: Path
    model: Path
    out: Path
    device: str = "cuda"
    minutes: float = 7.5
    decoder_minutes: float = 5.0
    stop_after_minutes: float | None = None
    workers: int = 4
    batch: int | None = None
    """Batch size of both parts, for tests."""


def refine(settings: RefineSettings) -> bool:
    """Train both parts and save the model in `out/model`; return whether training is finished."""
    settings.out.mkdir(parents=True, exist_ok=True)
    decoder = multiprocessing.get_context("spawn").Process(target=_refine_decoder, args=(settings,))
    decoder.start()
    try:
        pipe, denoiser_done = _refine_denoiser(settings)
    except BaseException:
        decoder.terminate()
        raise
    decoder.join()
    if decoder.exitcode:
        raise AnyaccelError("the decoder could not be trained", hint="the traceback is above this message")
    states = torch.load(_decoder_path(settings), map_location="cpu", weights_only=True)
    pipe.vae.load_state_dict(states["autoencoder"])
    save(pipe, settings.out / "model", shard="12MB")
    return denoiser_done and bool(states["finished"])


def _decoder_path(settings: RefineSettings) -> Path:
    return settings.out / "refined_decoder.pt"


def _start(settings: RefineSettings) -> tuple[Any, Composer, float | None]:
    """Return the model to refine, the composer and the time at which this process stops."""
    stop = settings.stop_after_minutes
    deadline = time.monotonic() + 60 * stop if stop else None
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    composer = Composer(load_glyphs(settings.data), torch.device(settings.device))
    return DiffusionPipeline.from_pretrained(settings.model), composer, deadline


def _refine_denoiser(settings: RefineSettings) -> tuple[Any, bool]:
    """Train the denoiser and the text encoder; return the pipeline with them, and whether training is finished."""
    pipe, composer, deadline = _start(settings)
    autoencoder = pipe.vae.to(settings.device).requires_grad_(False)
    sizes = {"batch": settings.batch} if settings.batch else {}
    denoiser, text_encoder, done = train_denoiser(
        load_things(), composer, pipe.tokenizer, autoencoder, settings.out, 60 * settings.minutes, deadline,
        settings.workers, initial=(pipe.unet, pipe.text_encoder), rate=_RATE, seed=_DENOISER_SEED, **sizes,
    )  # fmt: skip
    denoiser = denoiser.to("cpu", memory_format=torch.contiguous_format)
    return assemble(autoencoder.to("cpu"), text_encoder.to("cpu"), pipe.tokenizer, denoiser), done


def _refine_decoder(settings: RefineSettings) -> None:
    """Train the decoder and store the whole autoencoder."""
    pipe, composer, deadline = _start(settings)
    sizes = {"batch": settings.batch} if settings.batch else {}
    autoencoder, done = refine_decoder(
        pipe.vae, load_things(), composer, pipe.tokenizer, settings.out, 60 * settings.decoder_minutes, deadline,
        settings.workers, seed=_DECODER_SEED, **sizes,
    )  # fmt: skip
    state = autoencoder.to("cpu", memory_format=torch.contiguous_format).state_dict()
    torch.save({"autoencoder": state, "finished": done}, _decoder_path(settings))
