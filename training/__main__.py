"""`python -m training prepare | train | install | evaluate`: make the embedded model, and measure it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from anyaccel.errors import AnyaccelError, UsageError

__all__ = ["main"]

_DATA, _OUT = Path("runs/data"), Path("runs/embedded")


def main(words: list[str] | None = None) -> int:
    """Run one step; exit status 1 where training stopped before its end."""
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("prepare", help="draw the glyphs, list the things, learn the words (no GPU)")
    first.add_argument("--font", type=Path, default=None, help="NotoColorEmoji.ttf")
    second = commands.add_parser("train", help="train on one GPU, or go on where it was stopped")
    second.add_argument("--out", type=Path, default=_OUT)
    second.add_argument("--device", default="cuda")
    second.add_argument("--autoencoder-minutes", type=float, default=4.0)
    second.add_argument("--denoiser-minutes", type=float, default=18.0)
    second.add_argument("--stop-after-minutes", type=float, help="end the process then, to go on later")
    second.add_argument("--workers", type=int, default=6, help="processes that draw scenes")
    second.add_argument("--batch", type=int, help="smaller, to try things out")
    third = commands.add_parser("evaluate", help="the figures of the model card")
    third.add_argument("--model", type=Path, help="a folder; the embedded model otherwise")
    third.add_argument("--device", default="auto")
    third.add_argument("--dtype", default="float32")
    third.add_argument("--things", type=int, default=300)
    third.add_argument("--steps", type=int)
    third.add_argument("--guidance", type=float)
    third.add_argument("--batch", type=int, default=100)
    third.add_argument("--json", type=Path, help="keep the figures")
    fourth = commands.add_parser("install", help="make a trained model the embedded one")
    fourth.add_argument("model", type=Path, nargs="?", default=_OUT / "model")
    for command in (first, second):
        command.add_argument("--data", type=Path, default=_DATA)
    asked = parser.parse_args(words)
    try:
        return _run(asked)
    except AnyaccelError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status


def _run(asked: argparse.Namespace) -> int:
    return {"prepare": _prepare, "train": _train, "install": _install, "evaluate": _evaluate}[asked.command](asked)


def _prepare(asked: argparse.Namespace) -> int:
    from training.glyphs import FONT
    from training.prepare import prepare

    prepare(asked.font or FONT, asked.data)
    return 0


def _train(asked: argparse.Namespace) -> int:
    from training.train import train

    if not (asked.data / "glyphs.npz").is_file():
        raise UsageError(f"there is no data at {asked.data}", hint="python -m training prepare makes it")
    done = train(
        asked.data, asked.out, asked.device, asked.autoencoder_minutes, asked.denoiser_minutes,
        asked.stop_after_minutes, asked.workers, asked.batch,
    )  # fmt: skip
    print("done" if done else "not done yet: run the same command again", flush=True)
    return 0 if done else 1


def _install(asked: argparse.Namespace) -> int:
    if not (asked.model / "model_index.json").is_file():
        raise UsageError(f"there is no model at {asked.model}", hint="python -m training train makes one")
    import torch
    from diffusers import DiffusionPipeline

    from training.model import save
    from training.prepare import EMBEDDED

    save(DiffusionPipeline.from_pretrained(asked.model).to(torch.float16), EMBEDDED / "weights")
    return 0


def _evaluate(asked: argparse.Namespace) -> int:
    from training.figures import measure

    if asked.json and not asked.json.parent.is_dir():
        raise UsageError(f"there is no folder {asked.json.parent}", hint=f"mkdir -p {asked.json.parent}")
    begun = time.monotonic()
    figures: dict[str, Any] = measure(
        asked.model, asked.device, asked.dtype, asked.things, asked.steps, asked.guidance, asked.batch
    )
    figures["seconds"] = round(time.monotonic() - begun, 1)
    print(json.dumps(figures, indent=2))
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
