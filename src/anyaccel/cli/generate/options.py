"""What the options of `anyaccel generate` ask for, read and checked before anything is loaded."""

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

if TYPE_CHECKING:
    from anyaccel.generation.metadata import ImageMetadata
    from anyaccel.generation.output_files import Destination

__all__ = ["STDOUT", "Options", "read_prompts_file"]

STDOUT = "-"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options as they were given; None where one was not."""

    prompts: Sequence[str] = ()
    prompts_file: str | None = None
    source: str | None = None
    model: str | None = None
    device: str | None = None
    seed: int | None = None
    steps: int | None = None
    size: str | None = None
    count: int = 1
    negative: str | None = None
    guidance: float | None = None
    dtype: str | None = None
    speed: str | None = None
    output: str | None = None
    grid: bool = False
    force: bool = False
    as_json: bool = False
    explain: bool = False
    show: str = "auto"

    def read_call(self) -> dict[str, Any]:
        """The arguments of a pipeline's call that were given."""
        width, height = (None, None) if self.size is None else parse_image_size(self.size)
        call = {
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance,
            "negative_prompt": self.negative,
            "width": width,
            "height": height,
            "num_images_per_prompt": self.count,
        }
        return {name: value for name, value in call.items() if value is not None}

    def read_prompts(self) -> list[str]:
        """Every prompt, those of the file after those of the command."""
        return [*self.prompts, *(read_prompts_file(self.prompts_file) if self.prompts_file else ())]

    def check(self) -> None:
        """Raise if two options do not go together, or a number makes no sense."""
        if self.source and (self.prompts or self.prompts_file):
            raise UsageError(
                "--from makes a picture again with the prompt that it was made with, and another prompt is given",
                hint="leave one of the two out",
            )
        if not (self.source or self.prompts or self.prompts_file or self.explain):
            raise UsageError("nothing says what the picture is to show", hint='anyaccel generate "a red apple"')
        if self.seed is not None:
            read_seed(self.seed, hint="for example --seed 7; without --seed one is drawn")
        if self.count < 1:
            raise UsageError(f"at least one picture is made of each prompt, not {self.count}", hint="-n 1")
        if self.steps is not None:
            check_steps(self.steps, hint="for example --steps 20")
        if self.guidance is not None and not math.isfinite(self.guidance):
            raise UsageError(f"guidance is a number, not {self.guidance}", hint="for example --guidance 5")
        self.read_call()
        check_protocol(self.show)
        if self.output == STDOUT and self.as_json:
            raise UsageError("-o - and --json both want stdout", hint="write the picture to a file: -o picture.png")

    def read_destination(self, pictures: int) -> Destination | None:
        """Where the pictures go, which is looked at before the long work begins; None is stdout."""
        if self.output == STDOUT:
            if sys.stdout.isatty():
                raise UsageError("a picture is no text for a terminal", hint="-o picture.png, or send it on with |")
            if pictures > 1 and not self.grid:
                raise UsageError(
                    f"{pictures} pictures do not fit into one stream", hint="--grid puts them on one; or -o FOLDER/"
                )
            return None
        from anyaccel.generation.output_files import read_destination

        return read_destination(self.output, pictures=pictures, sheet=self.grid, force=self.force)

    def read_metadata(self) -> tuple[ImageMetadata, ...]:
        """How the pictures of `--from` were made; none without it."""
        from anyaccel.generation.image_format import read_metadata

        return () if self.source is None else read_metadata(self.source)


def read_prompts_file(name: str) -> list[str]:
    """The prompts of a file, one a line; blank lines and lines that begin with # are left out; - is stdin."""
    try:
        content = sys.stdin.buffer.read() if name == STDOUT else Path(name).expanduser().read_bytes()
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UsageError(f"line {line} of {name} is not UTF-8", hint="save the file as UTF-8") from error
    except OSError as error:
        raise UsageError(
            f"{name} cannot be read: {error.strerror}", hint="give a text file, a prompt a line"
        ) from error
    lines = [line.strip() for line in text.splitlines()]
    prompts = [line for line in lines if line and not line.startswith("#")]
    if not prompts:
        raise UsageError(f"{name} has no prompt", hint="a prompt a line; lines that begin with # are left out")
    return prompts
