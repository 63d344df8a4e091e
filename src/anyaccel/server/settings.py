"""The settings of one service: what it serves, where, and how much it takes on."""

from __future__ import annotations

import hashlib
import ipaddress
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from anyaccel.errors import UsageError, nearest

__all__ = [
    "ServedName",
    "ServerLimits",
    "ServerSettings",
    "count_in_hand",
    "is_loopback",
    "name_owner",
    "read_limits",
    "read_lora",
    "read_served_names",
]


@dataclass(frozen=True)
class ServedName:
    """A model, and what clients call it."""

    name: str
    model: str
    """The embedded one, a folder or a hub id."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What one request may ask for, and how many may wait."""

    max_queue: int = 64
    """Jobs that wait; the next one is answered with 429."""
    max_pixels: int = 2048 * 2048
    """Of one picture, made or sent."""
    max_steps: int = 150
    max_n: int = 10
    max_prompt: int = 8_000
    """Characters."""
    max_body: int = 24 * 2**20
    """Bytes of one request, whatever is in it."""
    deadline_s: float = 600.0
    """From a request's coming in to its picture."""
    body_s: float = 20.0
    """How long a client may take to send a request."""
    send_s: float = 60.0
    """How long a client may take to read a part of an answer."""
    hang_s: float = 300.0
    """A worker that says nothing for so long, or works and takes no step, is ended and replaced."""
    drain_s: float = 60.0
    """How long what is under way may take after the service was told to end."""
    keep_s: float = 7 * 24 * 3600.0
    """How long results are kept."""
    keep_bytes: int = 4 * 2**30


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """One service."""

    models: tuple[ServedName, ...]
    data: Path
    device: str = "auto"
    dtype: str | None = None
    speed: str = "exact"
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    """Those that may ask; with none anybody may who reaches the address."""
    max_batch: int = 8
    """Pictures that are made at the same time."""
    max_models: int | None = None
    """Models in memory at once; None for as many as fit."""
    sizes: tuple[tuple[int, int], ...] = ()
    """Widths and heights that are made ready ahead; with none, the model's own size."""
    loras: tuple[ServedName, ...] = ()
    limits: ServerLimits = field(default_factory=ServerLimits)
    otlp: str | None = None
    """Where traces go."""

    @property
    def in_hand(self) -> int:
        """Pictures that a worker is given: some more than it makes at once, as `count_in_hand` says."""
        return count_in_hand(self.max_batch)


def count_in_hand(at_once: int) -> int:
    """How many calls may be under way where so many run as one: while one is decoded, another takes its place."""
    return at_once + at_once // 4


def read_served_names(texts: Iterable[str]) -> tuple[ServedName, ...]:
    """The models of a command line, each under a name of its own."""
    served = tuple(_read_served_name(text) for text in texts)
    names = [one.name for one in served]
    if len(set(names)) < len(names):
        raise UsageError("two models have one name", hint="give each its own: NAME=MODEL")
    return served


def _read_served_name(text: str) -> ServedName:
    """`NAME=MODEL`, or a model that is called by its own name; of a folder, its last part."""
    name, separator, model = text.partition("=")
    if separator and name and model:
        return ServedName(name, model)
    path = Path(text).expanduser()
    return ServedName(path.resolve().name if path.exists() else text, text)


def read_lora(text: str) -> ServedName:
    """`NAME=PATH`."""
    name, separator, path = text.partition("=")
    if not separator or not name or not path:
        raise UsageError(f"{text!r:.60} is no adapter", hint="--lora NAME=PATH, such as --lora ink=./ink.safetensors")
    return ServedName(name, path)


def read_limits(texts: Iterable[str], max_queue: int) -> ServerLimits:
    """`NAME=NUMBER`, by the names that `ServerLimits` has."""
    kinds = {one.name: one.type for one in fields(ServerLimits)}
    found: dict[str, Any] = {"max_queue": max_queue}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in kinds:
            raise UsageError(f"there is no limit {name!r:.40}", hint=nearest(name, kinds))
        try:
            value = int(number) if kinds[name] == "int" else float(number)
        except ValueError:
            value = -1
        if not 0 <= value < math.inf:
            raise UsageError(f"{name} is a number, not {number!r:.40}", hint=f"--limit {name}=10")
        found[name] = value
    return ServerLimits(**found)


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def name_owner(key: str) -> str:
    """What stands in the place of a key wherever something is kept or told: never the key."""
    return hashlib.sha256(key.encode()).hexdigest()[:16] if key else ""
