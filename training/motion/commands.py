"""Commands for the motion module: `motion`, `motion-evaluate` and `motion-install`."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from anyaccel.errors import UsageError

__all__ = ["add_motion_commands"]

_OUT = Path("runs/motion")


def add_motion_commands(commands: Any) -> argparse.ArgumentParser:
    """Add the commands to a parser; return the parser of `motion`."""
    train: argparse.ArgumentParser = commands.add_parser("motion", help="train the motion module, or resume")
    train.set_defaults(run=_train)
    train.add_argument("--out", type=Path, default=_OUT)
    train.add_argument("--device", default="cuda")
    train.add_argument("--minutes", type=float, default=24.0, help="training time (default: 24)")
    train.add_argument("--stop-after-minutes", type=float, help="exit after this time; run again to resume")
    train.add_argument("--batch", type=int, default=64, help="videos per step (default: 64)")
    train.add_argument("--rate", type=float, default=1e-3, help="peak learning rate (default: 0.001)")
    train.add_argument("--rank", type=int, default=16, help="rank of the updates of the UNet and text encoder")
    train.add_argument("--workers", type=int, default=6, help="processes that draw scenes")
    train.add_argument("--image-model", type=Path, help="folder of the image model (default: the embedded model)")
    train.add_argument("--no-compile", action="store_true", help="do not compile the models")
    train.add_argument("--frames", type=int, default=16, help="frames per video, for tests")
    train.add_argument("--motions", nargs="+", help="only these motions, for tests")
    train.add_argument("--things", nargs="+", default=[], help="only these things, for tests")
    train.add_argument("--scenes", type=int, default=0, help="train on this number of fixed videos, for tests")
    evaluate = commands.add_parser("motion-evaluate", help="generate videos and judge their things and motions")
    evaluate.set_defaults(run=_evaluate)
    evaluate.add_argument("--model", type=Path, help="motion module (default: the one in the package)")
    evaluate.add_argument("--image-model", type=Path, help="folder of the image model (default: the embedded model)")
    evaluate.add_argument("--workers", type=int, default=1, help="processes that judge videos (default: 1)")
    evaluate.add_argument("--ground-truth", action="store_true", help="judge the training data instead of a model")
    evaluate.add_argument("--encoded", action="store_true", help="encode and decode the ground truth first")
    evaluate.add_argument("--data", type=Path, default=Path("runs/data"), help="glyphs for --ground-truth")
    evaluate.add_argument("--device", default="auto")
    evaluate.add_argument("--dtype", default="float32")
    evaluate.add_argument("--videos", type=int, default=10, help="things per motion (default: 10)")
    evaluate.add_argument("--seeds", type=int, default=3, help="videos per thing (default: 3)")
    evaluate.add_argument("--frames", type=int, default=16, help="frames per video, for tests")
    evaluate.add_argument("--motions", nargs="+", help="only these motions")
    evaluate.add_argument("--things", nargs="+", default=[], help="only these things")
    evaluate.add_argument("--save", type=Path, help="write the videos into this folder, as GIF files")
    evaluate.add_argument("--json", type=Path, help="write the results to this file")
    install = commands.add_parser("motion-install", help="add a trained motion module to the package")
    install.set_defaults(run=_install)
    install.add_argument("model", type=Path, nargs="?", default=_OUT / "motion")
    return train


def _train(options: argparse.Namespace) -> int:
    import torch

    from anyaccel.embedded.motion import MOTIONS
    from training.motion.train import MotionSettings, train_motion
    from training.prepare import load_glyphs

    glyphs = load_glyphs(options.data)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    settings = MotionSettings(
        options.minutes, options.stop_after_minutes, options.batch, options.rate, options.rank, options.frames,
        _check_motions(options.motions, tuple(MOTIONS)), tuple(options.things), options.scenes,
        workers=options.workers, compiled=not options.no_compile and options.device != "cpu",
        image_model=options.image_model,
    )  # fmt: skip
    done = train_motion(glyphs, options.out, torch.device(options.device), settings)
    print("done" if done else "not finished: run the same command again", flush=True)
    return 0 if done else 1


def _check_motions(names: list[str] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise UsageError(f"unknown motion {unknown[0]!r}", hint=f"use some of {', '.join(known)}")
    return tuple(names) if names else known


def _evaluate(options: argparse.Namespace) -> int:
    from training.motion.evaluate import evaluate_model, judge_ground_truth
    from training.motion.tracks import KINDS

    for path in (options.json and options.json.parent, options.save):
        if path and not path.is_dir():
            raise UsageError(f"the folder {path} does not exist", hint=f"mkdir -p {path}")
    motions = _check_motions(options.motions, tuple(KINDS))
    scope = (motions, options.videos, tuple(options.things), options.frames)
    if options.ground_truth:
        figures = judge_ground_truth(options.data, *scope, encoded=options.encoded)
    else:
        figures = evaluate_model(
            options.model, options.device, options.dtype, *scope, save=options.save, image_model=options.image_model,
            workers=options.workers, seeds=options.seeds,
        )  # fmt: skip
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0


def _install(options: argparse.Namespace) -> int:
    from anyaccel.embedded.motion import find_motion_module
    from training.prepare import EMBEDDED

    folder = EMBEDDED / "motion"
    shutil.copytree(find_motion_module(options.model), folder, dirs_exist_ok=True)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes files that only their owner can read
    return 0
