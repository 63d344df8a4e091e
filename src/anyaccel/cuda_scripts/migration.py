"""Migration: what a script that was written for CUDA means by its device's name, and where it said so.

A script says `cuda` in many places. Each of them asks one `Migration` which device that is here, and leaves its line:
nothing is mapped in silence.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from anyaccel.backends.device import OpenDevice, find_device
from anyaccel.backends.device import sheet as find_sheet
from anyaccel.backends.torch_device import is_host, is_on
from anyaccel.errors import UnmappedError
from anyaccel.planning.facts import PipelineFacts
from anyaccel.planning.options import PlacementOptions
from anyaccel.planning.plan import Plan, make_plan

__all__ = ["Migration", "ScriptLine", "is_device_aware_library", "read_site"]

_DEVICES_OWN = frozenset(
    {"torch", "torchvision", "torchaudio", "torchao", "diffusers", "transformers", "accelerate", "peft", "safetensors"}
    | {"huggingface_hub", "triton", "xformers", "bitsandbytes", "anyaccel"}
    | set(sys.stdlib_module_names)
)
"""Libraries that know of devices themselves: what they ask torch about CUDA is answered with the truth."""


@dataclass(frozen=True, order=True)
class ScriptLine:
    """A line of a script, or of a module that it brings along."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def is_device_aware_library(frame: FrameType) -> bool:
    """Whether code belongs to a library that knows of devices, and not to a script."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _DEVICES_OWN


def read_site(depth: int = 1) -> ScriptLine | None:
    """The line of the script that led here; None where a library's own thread did."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and is_device_aware_library(frame):
        frame = frame.f_back
    return None if frame is None else ScriptLine(frame.f_code.co_filename, frame.f_lineno)


@dataclass
class Migration:
    """The device that `cuda` means, and what was mapped to it."""

    opened: OpenDevice
    device: torch.device = field(init=False)
    """What the name means without a number; another one after the script chose it."""
    sites: dict[ScriptLine, dict[str, None]] = field(default_factory=dict)
    """Each line that named the device, with what it asked for."""
    notes: dict[str, ScriptLine | None] = field(default_factory=dict)
    """What was left out or answered in another way, with the first line of each."""
    pipelines: int = 0
    """How many pipelines were placed."""

    def __post_init__(self) -> None:
        self.foreign: str = find_sheet("cuda").torch_name
        """The name that scripts are written for; nothing else in this package knows it."""
        self.device = self.opened.tensor_device
        self.first = self.device

    @property
    def is_native(self) -> bool:
        """Whether the device is the one that scripts are written for, so that nothing needs to be mapped."""
        return is_on(self.device, self.foreign)

    @property
    def title(self) -> str:
        """The device as a reader knows it: `neuron:0 (virtual)`."""
        virtual = find_device(self.opened.sheet.name).virtual
        return f"{self.first}{' (virtual)' if virtual else ''}"

    def make_plan(self) -> Plan:
        """The plan for what runs outside of any pipeline: loops written by hand."""
        sheet = self.opened.sheet
        facts, options = PipelineFacts(pipeline="script"), PlacementOptions(dtype="float32")
        return make_plan(sheet, facts, options, device=f"{sheet.name}:{self.opened.index}")

    def means(self, value: Any) -> bool:
        """Whether a value is the name that is mapped: a string or a device, with a number or without."""
        return isinstance(value, str | torch.device) and is_on(value, self.foreign)

    def translate(self, value: Any, asked: str) -> Any:
        """What a device's name means here, with its line; anything that is not mapped comes back as it is."""
        found = self.find(value, asked)
        if found is not value:
            self.record(asked)
        return found

    def find(self, value: Any, asked: str) -> Any:
        """The same without the line; a bare number is a device's, as torch reads it."""
        if isinstance(value, int) and not isinstance(value, bool):
            return self.count_from(value, asked)
        if not self.means(value):
            return value
        index = torch.device(value).index
        return self.device if index is None else self.count_from(index, asked)

    def count_from(self, index: int, asked: str) -> torch.device:
        """The device of a number, counted from the one that was chosen."""
        if is_host(self.first):
            return self.first
        wanted, there = (self.first.index or 0) + index, self.opened.driver.count()
        if not 0 <= wanted < there:
            raise UnmappedError(
                f"{read_site()}: {asked} asks for {self.foreign}:{index}, and from {self.first} on there is no such "
                f"device: this process sees {there}",
                hint="give the script fewer devices, or start it where there are more",
            )
        return torch.device(self.first.type, wanted)

    def record(self, asked: str) -> None:
        """A line of the script asked for something that was mapped."""
        site = read_site()
        if site is not None:
            self.sites.setdefault(site, {})[asked] = None

    def note(self, words: str) -> None:
        """Something was left out, or answered in another way: said at the end."""
        self.notes.setdefault(words, read_site())

    def summarize(self, verbose: bool = False) -> list[str]:
        """What was mapped, in lines for a reader."""
        count = len(self.sites)
        placed = f"; {self.pipelines} pipeline{'s were' if self.pipelines != 1 else ' was'} placed"
        places = f"in {count} place{'s' if count != 1 else ''}"
        lines = [f"{self.foreign!r} meant {self.title} {places}{placed if self.pipelines else ''}"]
        if verbose:
            lines += [f"{site}: {', '.join(asked)}" for site, asked in sorted(self.sites.items())]
        lines += [f"{site}: {words}" if site else words for words, site in self.notes.items()]
        return lines
