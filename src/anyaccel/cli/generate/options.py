"""Options for `anyaccel generate`, validated before a model is loaded."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel.call_limits import check_steps, parse_image_size, read_seed
from anyaccel.cli.terminal_image import check_protocol
from anyaccel.errors import UsageError
from anyaccel.generation.call_values import parse_settings
from anyaccel.generation.inputs import INPUT_OPTIONS
from anyaccel.runtime.durations import check_duration

if TYPE_CHECKING:
    from anyaccel.generation.metadata import MediaMetadata
    from anyaccel.generation.output_files import Destination

__all__ = ["STDOUT", "Options", "read_prompts_file"]

# Name of stdout for `--output`, and of stdin for `--prompts`.
STDOUT = "-"
# Call arguments that have an option.
_OWN_OPTIONS = {
    "prompt": "PROMPT", "num_inference_steps": "--steps", "guidance_scale": "--guidance",
    "negative_prompt": "--negative", "width": "--size", "height": "--size", "strength": "--strength",
    "num_images_per_prompt": "-n", "num_videos_per_prompt": "-n", "num_waveforms_per_prompt": "-n",
    "seed": "--seed", "generator": "--seed",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options for `anyaccel generate`; None means that an option is not set."""

    prompts: Sequence[str] = ()
    prompts_file: str | None = None
    source: str | None = None
    """Image file of `--from`."""
    model: str | None = None
    device: str | None = None
    seed: int | None = None
    steps: int | None = None
    size: str | None = None
    count: int = 1
    """Images per prompt."""
    negative: str | None = None
    guidance: float | None = None
    dtype: str | None = None
    speed: str | None = None
    weights: str | None = None
    images: Sequence[str] = ()
    mask: str | None = None
    control: Sequence[str] = ()
    control_models: Sequence[str] = ()
    video: str | None = None
    audio: str | None = None
    loras: Sequence[str] = ()
    ip_adapters: Sequence[str] = ()
    ip_images: Sequence[str] = ()
    scheduler: str | None = None
    frames: int | None = None
    fps: float | None = None
    seconds: float | None = None
    strength: float | None = None
    settings: Sequence[str] = ()
    """Further call arguments as `NAME=VALUE`, from `--set`."""
    output: str | None = None
    grid: bool = False
    force: bool = False
    as_json: bool = False
    explain: bool = False
    show: str = "auto"

    def read_call(self) -> dict[str, Any]:
        """Return the arguments for the pipeline call, without options that are not set and those of `--set`."""
        width, height = (None, None) if self.size is None else parse_image_size(self.size)
        call = {
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance,
            "negative_prompt": self.negative,
            "width": width,
            "height": height,
            "strength": self.strength,
            "frames": self.frames,
            "fps": self.fps,
            "seconds": self.seconds,
            "image": list(self.images) or None,
            "mask_image": self.mask,
            "control_image": list(self.control) or None,
            "video": self.video,
            "audio": self.audio,
            "ip_adapter_image": list(self.ip_images) or None,
            "num_images_per_prompt": self.count,
        }
        return {name: value for name, value in call.items() if value is not None}

    def read_additions(self) -> dict[str, Any]:
        """Return the arguments of `make_request` for LoRAs, IP-Adapters, ControlNets and the scheduler."""
        additions = {
            "lora": list(self.loras),
            "ip_adapter": list(self.ip_adapters),
            "controlnet": list(self.control_models),
            "scheduler": self.scheduler,
        }
        return {name: value for name, value in additions.items() if value}

    def read_prompts(self) -> list[str]:
        """Return the prompts from the command line, followed by those from the `--prompts` file."""
        return [*self.prompts, *(read_prompts_file(self.prompts_file) if self.prompts_file else ())]

    def check(self) -> None:
        """Raise if options conflict or a value is out of range."""
        if self.source and (self.prompts or self.prompts_file):
            raise UsageError(
                "--from reuses the prompt of the file and cannot be combined with a prompt",
                hint="omit --from or the prompt",
            )
        # --explain requires no prompt: a plan does not depend on it. Some models have none, which is checked later.
        if not (self.source or self.prompts or self.prompts_file or self.explain or self.model):
            raise UsageError("missing prompt", hint='pass a prompt, for example: anyaccel generate "a red apple"')
        if self.seed is not None:
            read_seed(self.seed, hint="for example --seed 7; omit --seed for a random one")
        if self.count < 1:
            raise UsageError(
                f"the number of images per prompt must be at least 1, not {self.count}", hint="for example -n 1"
            )
        if self.steps is not None:
            check_steps(self.steps, hint="for example --steps 20")
        if self.guidance is not None and not math.isfinite(self.guidance):
            raise UsageError(f"the guidance scale must be finite, not {self.guidance}", hint="for example --guidance 5")
        self._check_input_options()
        self.read_call()  # raises if --size is not valid
        self._check_settings()
        check_protocol(self.show)
        if self.output == STDOUT and self.as_json:
            raise UsageError(
                "-o - and --json cannot be combined: both write to stdout",
                hint="write the image to a file with -o image.png",
            )

    def _check_input_options(self) -> None:
        """Raise if the strength or the length of the result is out of range."""
        if self.strength is not None and not 0 <= self.strength <= 1:
            raise UsageError(
                f"the strength must be from 0 to 1, not {self.strength}", hint="for example --strength 0.6"
            )
        for name in ("frames", "fps", "seconds"):
            if getattr(self, name) is not None:
                check_duration(name, getattr(self, name))
        if self.frames is not None and self.seconds is not None:
            raise UsageError("--seconds and --frames cannot be combined", hint="pass one of them")

    def _check_settings(self) -> None:
        """Raise if `--set` is not valid or sets an argument that has an option of its own."""
        own = {**_OWN_OPTIONS, **INPUT_OPTIONS}
        for name in parse_settings(self.settings):
            if name in own:
                raise UsageError(f"--set {name}=… sets an argument with its own option", hint=f"use {own[name]}")

    def read_destination(self, images: int) -> Destination | None:
        """Return the destination for the files, or None for stdout; raise if it cannot be written."""
        if self.output == STDOUT:
            if sys.stdout.isatty():
                raise UsageError(
                    "refusing to write binary data to the terminal", hint="use -o image.png or pipe the output"
                )
            if images > 1 and not self.grid:
                raise UsageError(
                    f"cannot write {images} images to stdout",
                    hint="add --grid to combine them into one image, or write them to a folder with -o FOLDER/",
                )
            return None
        # Imported here: the option checks must not import Pillow.
        from anyaccel.generation.output_files import read_destination

        return read_destination(self.output, images=images, sheet=self.grid, force=self.force)

    def read_metadata(self) -> tuple[MediaMetadata, ...]:
        """Return the metadata stored in the `--from` file, or an empty tuple without `--from`.

        A contact sheet contains the metadata for each of its images.
        """
        if self.source is None:
            return ()
        from anyaccel.generation.image_format import read_metadata

        return read_metadata(self.source)


def read_prompts_file(name: str) -> list[str]:
    """Return the prompts from a file with one prompt per line; `-` reads from stdin.

    Blank lines and lines that start with `#` are skipped. Raise if there are no prompts.
    """
    try:
        content = sys.stdin.buffer.read() if name == STDOUT else Path(name).expanduser().read_bytes()
        text = content.decode("utf-8-sig")  # some Windows editors write a byte order mark
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UsageError(f"line {line} of {name} is not valid UTF-8", hint="save the file as UTF-8") from error
    except OSError as error:
        raise UsageError(
            f"cannot read {name}: {error.strerror}", hint="pass a text file with one prompt per line"
        ) from error
    lines = [line.strip() for line in text.splitlines()]
    prompts = [line for line in lines if line and not line.startswith("#")]
    if not prompts:
        raise UsageError(
            f"{name} contains no prompts", hint="write one prompt per line; lines that start with # are skipped"
        )
    return prompts
