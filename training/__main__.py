"""`python -m training COMMAND`: train and evaluate the embedded model and its motion module."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anyaccel.errors import AnyaccelError, UsageError
from training.motion.commands import add_motion_commands

__all__ = ["main"]

_DATA, _OUT = Path("runs/data"), Path("runs/embedded")


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return 1 if training is not finished."""
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare", help="draw the glyphs, list the things, train the tokenizer (no GPU)")
    prepare.add_argument("--font", type=Path, default=None, help="NotoColorEmoji.ttf")
    prepare.add_argument(
        "--glyphs-only", action="store_true", help="keep the things and tokenizer of the embedded model"
    )
    train = commands.add_parser("train", help="train on one GPU, or resume")
    train.add_argument("--out", type=Path, default=_OUT)
    train.add_argument("--device", default="cuda")
    train.add_argument("--autoencoder-minutes", type=float, default=4.0)
    train.add_argument("--denoiser-minutes", type=float, default=18.0)
    train.add_argument("--stop-after-minutes", type=float, help="exit after this time; run again to resume")
    train.add_argument("--workers", type=int, default=6, help="processes that draw scenes")
    train.add_argument("--batch", type=int, help="batch size, for tests")
    refine = commands.add_parser("refine", help="fine-tune a trained model on one GPU, or resume")
    refine.add_argument("--model", type=Path, help="model folder (default: the embedded model)")
    refine.add_argument("--out", type=Path, default=Path("runs/refined"))
    refine.add_argument("--device", default="cuda")
    refine.add_argument("--minutes", type=float, default=7.5, help="for the denoiser and text encoder (default: 7.5)")
    refine.add_argument("--decoder-minutes", type=float, default=5.0, help="at the same time (default: 5)")
    refine.add_argument("--stop-after-minutes", type=float, help="exit after this time; run again to resume")
    refine.add_argument("--workers", type=int, default=4, help="processes that draw scenes, for each of the two parts")
    refine.add_argument("--batch", type=int, help="batch size, for tests")
    evaluate = commands.add_parser("evaluate", help="compute the metrics of the model card")
    evaluate.add_argument("--model", type=Path, help="model folder (default: the embedded model)")
    evaluate.add_argument("--device", default="auto")
    evaluate.add_argument("--dtype", default="float32")
    evaluate.add_argument("--things", type=int, default=300)
    evaluate.add_argument("--steps", type=int)
    evaluate.add_argument("--guidance", type=float)
    evaluate.add_argument("--batch", type=int, default=100)
    evaluate.add_argument("--sheet", type=Path, help="write images of fixed prompts to this PNG file")
    evaluate.add_argument("--workers", type=int, default=1, help="processes that judge images (default: 1)")
    evaluate.add_argument("--json", type=Path, help="write the metrics to this file")
    install = commands.add_parser("install", help="replace the embedded model with a trained one")
    install.add_argument("model", type=Path, nargs="?", default=_OUT / "model")
    motion = add_motion_commands(commands)
    evaluate.add_argument("--data", type=Path, help="folder with the glyphs, to measure the autoencoder as well")
    for command in (prepare, train, refine, motion):
        command.add_argument("--data", type=Path, default=_DATA)
    functions = {prepare: _prepare, train: _train, refine: _refine, evaluate: _evaluate, install: _install}
    for command, function in functions.items():
        command.set_defaults(run=function)
    options = parser.parse_args(arguments)
    try:
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except AnyaccelError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status


def _prepare(options: argparse.Namespace) -> int:
    from training.glyphs import FONT
    from training.prepare import draw_glyphs, prepare

    (draw_glyphs if options.glyphs_only else prepare)(options.font or FONT, options.data)
    return 0


def _train(options: argparse.Namespace) -> int:
    from training.train import train

    if not (options.data / "glyphs.npz").is_file():
        raise UsageError(f"no training data in {options.data}", hint="run `python -m training prepare`")
    done = train(
        options.data, options.out, options.device, options.autoencoder_minutes, options.denoiser_minutes,
        options.stop_after_minutes, options.workers, options.batch,
    )  # fmt: skip
    print("done" if done else "not finished: run the same command again", flush=True)
    return 0 if done else 1


def _refine(options: argparse.Namespace) -> int:
    from anyaccel.embedded.model import find_embedded_model
    from training.refine import RefineSettings, refine

    settings = RefineSettings(
        options.data, options.model or find_embedded_model(), options.out, options.device, options.minutes,
        options.decoder_minutes, options.stop_after_minutes, options.workers, options.batch,
    )  # fmt: skip
    done = refine(settings)
    print("done" if done else "not finished: run the same command again", flush=True)
    return 0 if done else 1


def _install(options: argparse.Namespace) -> int:
    if not (options.model / "model_index.json").is_file():
        raise UsageError(f"no model in {options.model}", hint="run `python -m training train`")
    import torch
    from diffusers import DiffusionPipeline

    from training.model import save
    from training.prepare import EMBEDDED

    card = EMBEDDED / "weights" / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else None
    save(DiffusionPipeline.from_pretrained(options.model).to(torch.float16), EMBEDDED / "weights")
    if text is not None:
        card.write_text(text, encoding="utf-8")
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from training.figures import Measurement, measure

    for path in (options.json, options.sheet):
        if path and not path.parent.is_dir():
            raise UsageError(f"the folder {path.parent} does not exist", hint=f"mkdir -p {path.parent}")
    start = time.monotonic()
    figures: dict[str, Any] = measure(
        Measurement(
            options.model, options.device, options.dtype, options.things, options.steps, options.guidance,
            options.batch, options.workers, options.data, options.sheet,
        )
    )  # fmt: skip
    figures["trains"] = round(time.monotonic() - start, 1)
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
