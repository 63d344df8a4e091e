"""Evaluation of the motion module, and of the judge on ground-truth videos."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image

from anyaccel.embedded.model import find_embedded_model
from anyaccel.embedded.motion import FRAMES, VIDEO_CALL_DEFAULTS, load_video_pipeline
from anyaccel.errors import UsageError
from training.figures import machine_name
from training.motion.judge import VideoVerdict, is_turnable, judge_video
from training.motion.scenes import VideoScene, as_frames, draw_scene_frames, plain_scene
from training.motion.tracks import STILL
from training.pool import map_in_processes
from training.prepare import load_things
from training.scenes import Composer
from training.things import Thing

__all__ = ["choose_scenes", "evaluate_model", "judge_ground_truth", "judge_scenes"]

_SEED = 20261119

Generate = Callable[[VideoScene, int], list[Image.Image]]
"""Function that returns the frames for a scene and a seed."""


def choose_scenes(
    things: tuple[Thing, ...], motions: tuple[str, ...], count: int, names: tuple[str, ...] = (), frames: int = FRAMES
) -> list[VideoScene]:
    """Return `count` evaluation scenes per motion, from a fixed seed; only turnable things spin."""
    rng = random.Random(_SEED)
    known = {name: index for index, thing in enumerate(things) for name in thing.names}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"unknown thing {unknown[0]!r}", hint="see src/anyaccel/embedded/things.json")
    indices = [known[name] for name in names] or list(range(len(things)))
    scenes = []
    for motion in motions:
        shuffled = rng.sample(indices, len(indices))
        chosen: list[int] = []
        for index in shuffled:
            if len(chosen) < count and (motion != "spin" or is_turnable(things[index].name)):
                chosen.append(index)
        scenes += [plain_scene(things, index, motion, rng, frames) for index in chosen]
    return scenes


def judge_scenes(
    things: tuple[Thing, ...],
    scenes: list[VideoScene],
    generate: Generate,
    save: Path | None = None,
    workers: int = 1,
    seeds: int = 1,
) -> dict[str, Any]:
    """Return the share of correct videos, of all motions and of each one, and every video that is not correct.

    Every scene is generated once per seed, from 0.
    """
    requests = [(scene, seed) for seed in range(seeds) for scene in scenes]
    shares: dict[str, list[tuple[bool, bool, bool]]] = {}
    missed = []

    def videos() -> Iterator[tuple[list[Image.Image], str, str]]:
        for scene, seed in requests:
            frames = generate(scene, seed)
            if save:
                path = save / f"{scene.caption.replace(' ', '-')}-{seed}.gif"
                frames[0].save(path, save_all=True, append_images=frames[1:], duration=100, loop=0)
            yield frames, things[scene.thing].name, scene.motion

    verdicts = map_in_processes(judge_video, videos(), workers)
    for (scene, seed), verdict in zip(requests, verdicts, strict=True):
        shares.setdefault(scene.motion, []).append((verdict.correct, verdict.same_thing, verdict.moves))
        if not verdict.correct:
            missed.append(_describe(scene, seed, verdict))
    # Videos of things that stay still have their own row.
    rows = [row for motion in shares if motion != STILL or len(shares) == 1 for row in shares[motion]]
    return {"all": _summarize(rows), **{motion: _summarize(rows) for motion, rows in shares.items()}, "missed": missed}


def _describe(scene: VideoScene, seed: int, verdict: VideoVerdict) -> dict[str, Any]:
    return {
        "caption": scene.caption,
        "seed": seed,
        "frames_recognized": sum(verdict.recognized),
        "frames_judged": len(verdict.recognized),
        "moves": verdict.moves,
    }


def _summarize(rows: list[tuple[bool, bool, bool]]) -> dict[str, float | int]:
    correct, same_thing, moves = (round(float(np.mean(column)), 4) for column in zip(*rows, strict=True))
    return {"videos": len(rows), "correct": correct, "same_thing": same_thing, "moves": moves}


def judge_ground_truth(
    data: Path, motions: tuple[str, ...], count: int, names: tuple[str, ...], frames: int, encoded: bool = False
) -> dict[str, Any]:
    """Judge videos of the training data, which should all be correct; optionally after the autoencoder."""
    with np.load(data / "glyphs.npz") as arrays:
        composer = Composer(arrays["glyphs"], torch.device("cpu"))
    things = load_things()
    autoencoder: Any = AutoencoderKL.from_pretrained(find_embedded_model() / "vae") if encoded else None

    def generate(scene: VideoScene, seed: int) -> list[Image.Image]:
        images = draw_scene_frames(composer, scene)
        if autoencoder:
            with torch.no_grad():
                images = autoencoder.decode(autoencoder.encode(images).latent_dist.mean).sample
        return as_frames(images)

    return judge_scenes(things, choose_scenes(things, motions, count, names, frames), generate)


def evaluate_model(
    model: Path | None,
    device: str,
    dtype: str,
    motions: tuple[str, ...],
    count: int,
    names: tuple[str, ...],
    frames: int,
    save: Path | None = None,
    image_model: Path | None = None,
    workers: int = 1,
    seeds: int = 1,
) -> dict[str, Any]:
    """Generate and judge videos with a motion module, placed by anyaccel."""
    import anyaccel

    pipe: Any = anyaccel.place(load_video_pipeline(model, image_model), device, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    call = {**VIDEO_CALL_DEFAULTS, "num_frames": frames}

    def generate(scene: VideoScene, seed: int) -> list[Image.Image]:
        images: list[Image.Image] = pipe(scene.caption, seed=seed, **call).frames[0]
        return images

    things = load_things()
    scenes = choose_scenes(things, motions, count, names, frames)
    run, start = _describe_run(), time.monotonic()
    figures = judge_scenes(things, scenes, generate, save, workers, seeds)
    return {
        **run,
        "device": str(pipe.device),
        "machine": machine_name(pipe.device),
        "dtype": str(pipe.dtype).removeprefix("torch."),
        **call,
        "things_per_motion": count,
        "seeds": seeds,
        **figures,
        "seconds": round(time.monotonic() - start, 1),
    }


def _describe_run() -> dict[str, Any]:
    """Return the fields that every result file has; the commit is None if git is not available."""
    from benchmarks.provenance import describe_run, read_commit

    try:
        commit = read_commit()
    except (OSError, subprocess.CalledProcessError):
        return {**describe_run(""), "commit": None}
    return describe_run(commit)
