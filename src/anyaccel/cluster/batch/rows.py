"""The rows of a batch: a prompt and any parameter of the pipeline's call on each line of a JSONL file."""

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

__all__ = ["BatchRow", "check_parameters", "read_rows"]

_NOT_TAKEN = {
    "generator": "give the row a seed",
    "num_images_per_prompt": "write the row as often as there shall be pictures, each with its seed",
    "output_type": "a batch writes pictures",
    "return_dict": "a batch writes pictures",
    "callback_on_step_end": "a file holds no function",
}
_MOST_TOLD = 5


@dataclass(frozen=True, kw_only=True)
class BatchRow:
    """One picture that is to be made."""

    number: int
    """Its line, the first being 1; blank lines count."""
    prompt: str
    seed: int
    call: Mapping[str, Any] = field(default_factory=dict)
    """The other parameters of the pipeline's call."""

    @functools.cached_property
    def shape(self) -> str:
        """What rows must have in common to be made in one call."""
        return json.dumps(self.call, sort_keys=True)


def read_rows(source: str) -> tuple[list[BatchRow], str]:
    """The rows of a file, `-` being stdin, and a digest of it; says what is wrong with the first lines that are.

    A row without a seed gets one that its line and its prompt decide, so that a second start means the same picture.
    """
    content, where = _read(source), "stdin" if source == "-" else source
    rows, wrong = [], []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(_read_row(number, line))
        except ValueError as error:
            wrong.append(f"line {number}: {error.message if isinstance(error, UsageError) else error}")
    if wrong:
        told = "\n".join(wrong[:_MOST_TOLD]) + _tell_more(wrong)
        raise UsageError(
            f"{where} has rows that cannot be read:\n{told}", hint='a row is {"prompt": "a red apple", "seed": 7}'
        )
    if not rows:
        raise UsageError(f"{where} has no row", hint='a row is {"prompt": "a red apple", "seed": 7}')
    return rows, hashlib.sha256(content).hexdigest()


def check_parameters(rows: Iterable[BatchRow], known: Iterable[str], pipeline: str) -> None:
    """Raise if a row has a parameter that the pipeline does not take."""
    names = [name for name in known if name not in _NOT_TAKEN]
    unknown = [(row.number, name) for row in rows for name in row.call if name not in names]
    if unknown:
        told = "\n".join(f"line {number}: {pipeline} takes no {name}" for number, name in unknown[:_MOST_TOLD])
        raise UsageError(told + _tell_more(unknown), hint=f"leave it out; {nearest(unknown[0][1], names)}")


def _tell_more(wrong: Sequence[object]) -> str:
    return f"\n… and {len(wrong) - _MOST_TOLD} more" if len(wrong) > _MOST_TOLD else ""


def _read(source: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if source == "-" else Path(source).expanduser().read_bytes()
    except OSError as error:
        raise UsageError(
            f"{source} cannot be read: {error.strerror}", hint="give a JSONL file, a row a line"
        ) from error


def _read_row(number: int, line: bytes) -> BatchRow:
    try:
        found = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("it is no object with a prompt")
    prompt = found.pop("prompt", None)
    if not isinstance(prompt, str):
        raise ValueError(f"its prompt is a text, not {json.dumps(prompt)[:60]}" if prompt else "it has no prompt")
    _check_values({"prompt": prompt, **found})
    for name, way in _NOT_TAKEN.items():
        if name in found:
            raise ValueError(f"{name} is not taken here: {way}")
    seed = found.pop("seed", None)
    if seed is None:
        seed = int.from_bytes(hashlib.sha256(f"{number}\0{prompt}".encode()).digest()[:4], "big")
    return BatchRow(number=number, prompt=prompt, seed=read_seed(seed), call=found)


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _check_values(call: Mapping[str, Any]) -> None:
    """What no manifest can hold is refused, however deep it is."""
    for name, value in call.items():
        try:
            json.dumps({name: value}, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name!a} has half characters") from error
        except ValueError as error:
            raise ValueError(f"{name} is larger than any number") from error
        if name in SIDES and value is not None:
            check_side(name, value)
        if name == "num_inference_steps" and value is not None:
            check_steps(value)
