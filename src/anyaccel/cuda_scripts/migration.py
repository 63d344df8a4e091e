"""Mapping of `cuda` in a script to the actual device, with a record of every line that used it.

All patches share one `Migration`, so that every mapped line appears in the summary.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from anyaccel.backends.device import OpenDevice, find_device
from anyaccel.backends.device import sheet as find_sheet
from anyaccel.backends.device_type_checks import is_host, is_on
from anyaccel.errors import UnmappedError
from anyaccel.planning.facts import PipelineFacts
from anyaccel.planning.options import PlacementOptions
from anyaccel.planning.plan import Plan, make_plan

__all__ = ["Migration", "ScriptLine", "is_device_aware_library", "read_site"]

# Libraries that support several devices themselves: their calls reach the real CUDA module.
_DEVICE_AWARE = frozenset(
    {"torch", "torchvision", "torchaudio", "torchao", "diffusers", "transformers", "accelerate", "peft", "safetensors"}
    | {"huggingface_hub", "triton", "xformers", "bitsandbytes", "anyaccel"}
    | set(sys.stdlib_module_names)
)


@dataclass(frozen=True, order=True)
class ScriptLine:
    """A source line in a script or in one of its modules."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def is_device_aware_library(frame: FrameType) -> bool:
    """Return whether a stack frame belongs to a multi-device library such as diffusers, not to a script."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _DEVICE_AWARE


def read_site(depth: int = 1) -> ScriptLine | None:
    """Return the innermost line of script code on the call stack, or None if there is none."""
    # Skip the frames of torch and diffusers between the script and this function.
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and is_device_aware_library(frame):
        frame = frame.f_back
    return None if frame is None else ScriptLine(frame.f_code.co_filename, frame.f_lineno)


@dataclass
class Migration:
    """The device that `cuda` is mapped to in a script, with a record of the mapped calls."""

    opened: OpenDevice
    device: torch.device = field(init=False)
    """The current device: `cuda` without an index."""
    sites: dict[ScriptLine, dict[str, None]] = field(default_factory=dict)
    """The mapped calls by line, in order."""
    notes: dict[str, ScriptLine | None] = field(default_factory=dict)
    """Notes about calls that are ignored or return something else than on CUDA, with the first line of each."""
    pipelines: int = 0
    """Number of placed pipelines."""

    def __post_init__(self) -> None:
        self.source_type: str = find_sheet("cuda").torch_name
        """The device type that scripts use."""
        self.device = self.opened.tensor_device
        # Script indices start at the selected device: with `--device hpu:2`, `cuda:1` is `hpu:3`.
        self.first = self.device

    @property
    def is_native(self) -> bool:
        """Whether the device is a CUDA device, in which case nothing needs to be mapped."""
        return is_on(self.device, self.source_type)

    @property
    def title(self) -> str:
        """The device name for messages, such as `neuron:0 (virtual)`."""
        virtual = find_device(self.opened.sheet.name).virtual
        return f"{self.first}{' (virtual)' if virtual else ''}"

    def make_plan(self) -> Plan:
        """Return the plan for code outside pipelines, such as hand-written denoising loops."""
        sheet = self.opened.sheet
        facts, options = PipelineFacts(pipeline="script"), PlacementOptions(dtype="float32")
        return make_plan(sheet, facts, options, device=f"{sheet.name}:{self.opened.index}")

    def is_source_device(self, value: Any) -> bool:
        """Return whether a string or device is `cuda`, with or without an index."""
        return isinstance(value, str | torch.device) and is_on(value, self.source_type)

    def translate(self, value: Any, call: str) -> Any:
        """Map a `cuda` device to the actual device and record the line; return other values unchanged."""
        mapped = self.map_device(value, call)
        if mapped is not value:
            self.record(call)
        return mapped

    def map_device(self, value: Any, call: str) -> Any:
        """Map a `cuda` device or a device index to the actual device, without recording the line.

        Other values are returned unchanged.
        """
        if isinstance(value, int) and not isinstance(value, bool):
            return self.device_at(value, call)
        if not self.is_source_device(value):
            return value
        index = torch.device(value).index
        return self.device if index is None else self.device_at(index, call)

    def device_at(self, index: int, call: str) -> torch.device:
        """Return the device at an index counted from the one set by `--device`.

        Raises UnmappedError if the device does not exist.
        """
        # All CUDA indices map to the only CPU.
        if is_host(self.first):
            return self.first
        absolute, count = (self.first.index or 0) + index, self.opened.driver.count()
        if not 0 <= absolute < count:
            raise UnmappedError(
                f"{read_site()}: {call} uses {self.source_type}:{index}, which does not exist: {self.source_type}:0 is "
                f"mapped to {self.first}, and the device count is {count}",
                hint="configure the script for fewer devices, or run it on a machine with more devices",
            )
        return torch.device(self.first.type, absolute)

    def record(self, call: str) -> None:
        """Record a mapped call with the script line that made it."""
        site = read_site()
        if site is not None:
            self.sites.setdefault(site, {})[call] = None

    def note(self, text: str) -> None:
        """Add a note to the summary; a repeated note is shown only once, with the first line that caused it."""
        self.notes.setdefault(text, read_site())  # a note in a loop would fill the screen

    def summarize(self, verbose: bool = False) -> list[str]:
        """Return the summary as lines of text; `verbose` adds a list of all mapped script lines."""
        count = len(self.sites)
        placed = f"; {self.pipelines} pipeline{'s' if self.pipelines != 1 else ''} placed"
        lines_used = f"on {count} line{'s' if count != 1 else ''}"
        lines = [f"mapped {self.source_type!r} to {self.title} {lines_used}{placed if self.pipelines else ''}"]
        if verbose:
            lines += [f"{site}: {', '.join(calls)}" for site, calls in sorted(self.sites.items())]
        lines += [f"{site}: {text}" if site else text for text, site in self.notes.items()]
        return lines
