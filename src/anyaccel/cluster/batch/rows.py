"""Batch rows, read from a JSONL file: each line has a prompt, and optional inputs, adapters and pipeline arguments."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anyaccel.call_limits import SIDES, check_side, check_steps, read_seed
from anyaccel.errors import UsageError, nearest
from anyaccel.generation.inputs import GENERIC_INPUTS, INPUT_PARAMETERS
from anyaccel.runtime.durations import DURATION_OPTIONS, check_duration

__all__ = ["BatchRow", "check_parameters", "read_rows"]

# Arguments of a pipeline's call that a row cannot have, and what to do instead.
_UNSUPPORTED = {
    "generator": "set seed instead",
    "num_images_per_prompt": "write one row per image, each with its own seed",
    "num_videos_per_prompt": "write one row per video, each with its own seed",
    "num_waveforms_per_prompt": "write one row per audio file, each with its own seed",
    "output_type": "a batch always writes files",
    "return_dict": "a batch always writes files",
    "callback_on_step_end": "JSON cannot contain a function",
}
# Names of the options of `anyaccel generate`, which rows can have as well.
_SHORT_NAMES = {"mask": "mask_image", "control": "control_image", "ip_image": "ip_adapter_image"}
# Keys of LoRAs, IP-Adapters, ControlNets and the scheduler.
_ADDITIONS = ("lora", "ip_adapter", "controlnet", "scheduler")
_MAX_REPORTED = 5
_EXAMPLE = 'write one JSON object per line, for example {"prompt": "a red apple", "seed": 7}'


@dataclass(frozen=True, kw_only=True)
class BatchRow:
    """A line of the input file, which describes one image, video or audio to generate."""

    number: int
    """Line number, starting at 1; blank lines count."""
    prompt: str
    seed: int
    call: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of the pipeline's call; the paths of inputs are absolute."""
    additions: Mapping[str, Any] = field(default_factory=dict)
    """LoRAs, IP-Adapters, ControlNets and the scheduler; the paths are absolute."""

    @functools.cached_property
    def shape(self) -> str:
        """Pipeline arguments as a JSON string; rows with equal strings can share a pipeline call."""
        return json.dumps([self.call, self.additions], sort_keys=True)


def read_rows(source: str) -> tuple[list[BatchRow], str]:
    """Read rows from a JSONL file (`-` for stdin); return them with the SHA-256 digest of the input.

    Raises UsageError if there are no rows, or with a list of the first invalid lines. A row without a
    seed gets one that depends only on its line number and prompt, so a resumed batch generates the same
    image. Paths of inputs and adapters are relative to the folder of the file, or the current folder for stdin.
    """
    content, name = _read(source), "stdin" if source == "-" else source
    folder = Path.cwd() if source == "-" else Path(source).expanduser().absolute().parent
    rows, problems = [], []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(_read_row(number, line, folder))
        except ValueError as error:  # UsageError is a ValueError
            problems.append(f"line {number}: {error.message if isinstance(error, UsageError) else error}")
    if problems:
        listed = "\n".join(problems[:_MAX_REPORTED]) + _format_remaining(problems)
        raise UsageError(f"{name} contains invalid rows:\n{listed}", hint=_EXAMPLE)
    if not rows:
        raise UsageError(f"{name} contains no rows", hint=_EXAMPLE)
    return rows, hashlib.sha256(content).hexdigest()


def check_parameters(rows: Iterable[BatchRow], parameters: Iterable[str], pipeline: str) -> None:
    """Raise UsageError if a row has an argument that the pipeline does not accept."""
    # Inputs may select another pipeline class; whether it takes them is checked for each row.
    general = (*GENERIC_INPUTS, *DURATION_OPTIONS, "strength")
    names = list(dict.fromkeys([name for name in parameters if name not in _UNSUPPORTED] + list(general)))
    unknown = [(row.number, name) for row in rows for name in row.call if name not in names]
    if unknown:
        listed = "\n".join(
            f"line {number}: unknown argument {name!r} for {pipeline}" for number, name in unknown[:_MAX_REPORTED]
        )
        raise UsageError(
            listed + _format_remaining(unknown), hint=f"remove or rename the argument; {nearest(unknown[0][1], names)}"
        )


def _format_remaining(problems: Sequence[object]) -> str:
    return f"\n… and {len(problems) - _MAX_REPORTED} more" if len(problems) > _MAX_REPORTED else ""


def _read(source: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if source == "-" else Path(source).expanduser().read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot read {source}: {error.strerror}", hint="pass a JSONL file with one JSON object per line"
        ) from error


def _read_row(number: int, line: bytes, folder: Path) -> BatchRow:
    try:
        # Editors on Windows write a byte order mark at the start of the file.
        fields = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"), parse_constant=_reject_constant)
    except UnicodeDecodeError as error:
        raise ValueError("not valid UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    fields = {_SHORT_NAMES.get(name, name): value for name, value in fields.items()}
    # A model without a prompt may have only an input.
    prompt = fields.pop("prompt", "" if set(fields) & set(INPUT_PARAMETERS) else None)
    if not isinstance(prompt, str):
        raise ValueError(f"prompt must be a string, not {json.dumps(prompt)[:60]}" if prompt else "prompt is missing")
    _check_values({"prompt": prompt, **fields})
    for name, advice in _UNSUPPORTED.items():
        if name in fields:
            raise ValueError(f"{name} is not supported in a batch: {advice}")
    seed = fields.pop("seed", None)
    if seed is None:
        # Not `hash`, which is salted per process.
        seed = int.from_bytes(hashlib.sha256(f"{number}\0{prompt}".encode()).digest()[:4], "big")
    additions = {name: _find_files(fields.pop(name), folder, name) for name in _ADDITIONS if name in fields}
    call = {
        name: _find_files(value, folder, name) if name in INPUT_PARAMETERS else value for name, value in fields.items()
    }
    return BatchRow(number=number, prompt=prompt, seed=read_seed(seed), call=call, additions=additions)


def _find_files(value: Any, folder: Path, name: str) -> Any:
    """Return a path, or a list of paths, relative to a folder; raise ValueError if an input does not exist."""
    if isinstance(value, list):
        return [_find_files(item, folder, name) for item in value]
    if not isinstance(value, str) or name == "scheduler":
        return value
    path = folder / Path(value).expanduser()
    if name in INPUT_PARAMETERS:
        if not path.exists():
            raise ValueError(f"the file {value} of {name} does not exist")
        return str(path)
    # An adapter may be a Hub ID, and may end with a weight.
    head, colon, tail = value.rpartition(":")
    weighted = folder / Path(head).expanduser() if colon else path
    if path.exists():
        return str(path)
    return f"{weighted}:{tail}" if colon and weighted.exists() else value


def _reject_constant(text: str) -> Any:
    """Raise ValueError for NaN and Infinity, which Python's JSON parser accepts by default."""
    raise ValueError(f"{text} is not a valid JSON number")


def _check_values(call: Mapping[str, Any]) -> None:
    """Raise ValueError if an argument is invalid or cannot be written to the manifest.

    For example, a string with an unpaired surrogate cannot be encoded as UTF-8.
    """
    for name, value in call.items():
        # Encoding is the check: it visits nested values too.
        try:
            json.dumps({name: value}, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name!a} contains an unpaired surrogate") from error
        except ValueError as error:
            raise ValueError(f"{name} is too large for a float") from error
        if name in SIDES and value is not None:
            check_side(name, value)
        if name == "num_inference_steps" and value is not None:
            check_steps(value)
        if name in DURATION_OPTIONS and value is not None:
            check_duration(name, value)
