"""Service settings, such as models, address and limits, and parsers for their command-line options."""

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
    "compute_max_in_flight",
    "hash_key",
    "is_loopback",
    "read_limits",
    "read_lora",
    "read_served_names",
]


@dataclass(frozen=True)
class ServedName:
    """A model or LoRA to serve, and the name by which clients request it."""

    name: str
    model: str
    """`embedded`, a folder or a Hugging Face Hub ID."""


# The field names are the names that `--limit NAME=NUMBER` accepts.
@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits on requests, clients, the worker and stored results."""

    max_queue: int = 64
    """Queued jobs; further requests are answered with 429."""
    max_pixels: int = 2048 * 2048
    """Pixels of one generated or uploaded image."""
    max_steps: int = 150
    max_n: int = 10
    max_inputs: int = 16
    """Input images of one request."""
    max_frames: int = 481
    """Frames of a video."""
    max_video_pixels: int = 2**28
    """Pixels in all frames of a video."""
    max_audio_s: float = 600.0
    """Seconds of audio."""
    max_prompt: int = 8_000
    """Characters of a prompt."""
    max_body: int = 24 * 2**20
    """Bytes of a request body."""
    deadline_s: float = 600.0
    """Seconds from accepting a request to its last image."""
    video_deadline_s: float = 7200.0
    """Seconds from accepting a request for a video or audio to its end."""
    body_s: float = 20.0
    """Seconds that a client may take to send a request."""
    send_s: float = 60.0
    """Seconds within which a client must read some of the response."""
    hang_s: float = 300.0
    """Seconds after which a worker that sends no message, or whose device makes no progress, is replaced."""
    drain_s: float = 60.0
    """Seconds that the shutdown waits for queued and running jobs."""
    keep_s: float = 7 * 24 * 3600.0
    """Seconds that results are stored."""
    keep_bytes: int = 4 * 2**30
    """Bytes of results that are stored; the oldest are deleted first."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings for one service, such as its models, device, address, API keys and limits."""

    models: tuple[ServedName, ...]
    data: Path
    device: str = "auto"
    dtype: str | None = None
    speeds: tuple[str, ...] = ("exact",)
    """Speed levels that requests can select; the first is the default. Each is a copy of every model."""
    weights: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    """Accepted API keys; if empty, no key is required."""
    max_batch: int = 8
    """Maximum number of images in one batch."""
    max_models: int | None = None
    """Maximum number of models in memory; None for as many as fit."""
    sizes: tuple[tuple[int, int], ...] = ()
    """Widths and heights to warm up; if empty, the model's default size."""
    loras: tuple[ServedName, ...] = ()
    controlnets: tuple[str, ...] = ()
    """Folders or Hub IDs of ControlNets, with which every model is loaded."""
    ip_adapters: tuple[str, ...] = ()
    """IP-Adapters as `PATH` or `PATH:SCALE`, with which every model is loaded."""
    lora_dir: Path | None = None
    """Folder with LoRA files that clients can add at run time."""
    limits: ServerLimits = field(default_factory=ServerLimits)
    otlp: str | None = None
    """OTLP endpoint for traces."""

    @property
    def max_in_flight(self) -> int:
        """Maximum number of images that a worker processes at the same time."""
        return compute_max_in_flight(self.max_batch)


def compute_max_in_flight(max_concurrent: int) -> int:
    """Return how many calls may run at the same time if a batch contains up to `max_concurrent` calls.

    The limit is a quarter higher than the batch size: while one call runs its decoder, another can take
    its slot in the batch.
    """
    return max_concurrent + max_concurrent // 4


def read_served_names(texts: Iterable[str]) -> tuple[ServedName, ...]:
    """Parse model arguments of the form `NAME=MODEL` or `MODEL`; raise `UsageError` for duplicate names."""
    models = tuple(_read_served_name(text) for text in texts)
    names = [model.name for model in models]
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"duplicate model name: {duplicate}", hint="give each model a unique name: NAME=MODEL")
    return models


def _read_served_name(text: str) -> ServedName:
    """Parse `NAME=MODEL` or `MODEL`; the default name is the folder's name or else `MODEL` itself."""
    name, separator, model = text.partition("=")
    if separator and name and model:
        return ServedName(name, model)
    path = Path(text).expanduser()
    return ServedName(path.resolve().name if path.exists() else text, text)


def read_lora(text: str) -> ServedName:
    """Parse a LoRA option of the form `NAME=PATH`; raise `UsageError` if it is invalid."""
    name, separator, path = text.partition("=")
    if not separator or not name or not path:
        raise UsageError(
            f"the LoRA {text!r:.60} is not of the form NAME=PATH", hint="for example --lora ink=./ink.safetensors"
        )
    return ServedName(name, path)


def read_limits(texts: Iterable[str], max_queue: int) -> ServerLimits:
    """Parse limits of the form `NAME=NUMBER`, where each name is a field of `ServerLimits`.

    `max_queue` is the default for the limit of the same name.
    """
    types = {limit.name: limit.type for limit in fields(ServerLimits)}
    values: dict[str, Any] = {"max_queue": max_queue}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in types:
            raise UsageError(f"unknown limit {name!r:.40}", hint=nearest(name, types))
        try:
            # Annotations are strings here because of `from __future__ import annotations`.
            value = int(number) if types[name] == "int" else float(number)
        except ValueError:
            value = -1  # rejected below, with the same message
        # NaN and infinity are valid floats but not valid limits; NaN fails every comparison.
        if not 0 <= value < math.inf:
            kind = "an integer" if types[name] == "int" else "a number"
            hint = f"for example --limit {name}=10"
            raise UsageError(f"the limit {name} must be {kind} >= 0, not {number!r:.40}", hint=hint)
        values[name] = value  # overrides `--max-queue` if the name is max_queue
    return ServerLimits(**values)


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable only from this machine."""
    if host == "localhost":
        return True
    # Other names are not resolved: the result could change, and a DNS lookup could block.
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def hash_key(key: str) -> str:
    """Return a short digest of an API key, which identifies the client in the job store and the log."""
    return hashlib.sha256(key.encode()).hexdigest()[:16] if key else ""
