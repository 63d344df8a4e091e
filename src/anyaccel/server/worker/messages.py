"""What the service and its worker say to each other: the worker is a process apart, and these cross the pipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "CancelJob",
    "Heartbeat",
    "ImageDone",
    "JobFailed",
    "JobStopped",
    "LoadFailed",
    "LoadProgress",
    "ModelFacts",
    "ModelsReady",
    "NotReady",
    "PreviewImage",
    "RunJob",
    "StepDone",
    "WorkerLost",
]


@dataclass(frozen=True)
class RunJob:
    """To the worker: make the pictures of a job."""

    job: str
    work: Mapping[str, Any]
    """The request, as `work.Work` reads it."""
    inputs: Mapping[str, str | bytes]
    """The pictures that came with it, `image` and `mask`: files, or their content for a worker on another machine."""


@dataclass(frozen=True)
class CancelJob:
    """To the worker: stop a job at its next step."""

    job: str


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a client must know of a model, and what a request is checked against."""

    name: str
    pipeline: str
    device: str
    virtual: bool
    dtype: str
    tasks: tuple[str, ...]
    """`generate`, `edit`, `inpaint`."""
    takes: Mapping[str, tuple[str, ...]]
    """The arguments that the pipeline of each task takes."""
    multiple: int
    """Sides are multiples of it."""
    sizes: tuple[tuple[int, int], ...]
    """Those that are ready; the first is the default."""
    fixed_sizes: bool
    """Whether no others are taken, since each would be compiled first."""
    steps: int | None
    guidance: float | None
    """What is taken where a request says nothing."""
    joins: Mapping[str, bool]
    """Which models run the steps of several requests as one."""
    at_once: int
    """Pictures that are made at the same time."""
    plan: str
    loras: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadProgress:
    """From the worker: how far its start is."""

    done: int
    total: int
    words: str


@dataclass(frozen=True)
class ModelsReady:
    """From the worker: all models were loaded once, and their sizes are warm."""

    models: tuple[ModelFacts, ...]


@dataclass(frozen=True)
class LoadFailed:
    """From the worker: it cannot start."""

    message: str
    hint: str


@dataclass(frozen=True)
class NotReady:
    """From a pool of workers: none of them is there now, and others are awaited."""

    words: str


@dataclass(frozen=True)
class WorkerLost:
    """From a pool of workers: one ended, and its work is given to others."""

    worker: str
    words: str


@dataclass(frozen=True)
class StepDone:
    """From the worker: a step of one picture is done."""

    job: str
    picture: int
    done: int
    total: int
    seconds: float


@dataclass(frozen=True)
class PreviewImage:
    """From the worker: what a picture looks like so far."""

    job: str
    picture: int
    number: int
    content: bytes


@dataclass(frozen=True)
class ImageDone:
    """From the worker: one picture of a job."""

    job: str
    picture: int
    content: bytes
    width: int
    height: int
    seed: int
    seconds: float


@dataclass(frozen=True)
class JobFailed:
    """From the worker: a job came to nothing."""

    job: str
    code: str
    message: str
    status: int


@dataclass(frozen=True)
class JobStopped:
    """From the worker: a job that was told to stop did."""

    job: str


@dataclass(frozen=True)
class Heartbeat:
    """From the worker, every second: it is there, and this is what it holds."""

    device_bytes: int | None
    host_bytes: int
    rounds: Mapping[int, int] = field(default_factory=dict)
    """Rounds since the last beat, by how many calls ran as one."""
    loaded: tuple[str, ...] = ()
