"""Messages between the service and its workers. They are pickled and sent through a pipe or through Ray."""

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

# To a worker


@dataclass(frozen=True)
class RunJob:
    """Generate the images of a job."""

    job: str
    spec: Mapping[str, Any]
    """The job spec as `JobSpec.to_dict` returns it."""
    inputs: Mapping[str, str | bytes]
    """Input images by argument name: paths, or file contents for a worker on another machine."""


@dataclass(frozen=True)
class CancelJob:
    """Stop a job at its next step."""

    job: str


# From a worker


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Properties of a served model that clients read and requests are checked against."""

    name: str
    pipeline: str
    device: str
    virtual: bool
    dtype: str
    tasks: tuple[str, ...]
    """Supported tasks: `generate`, `edit`, `inpaint`."""
    parameters: Mapping[str, tuple[str, ...]]
    """Pipeline arguments of each task."""
    multiple: int
    """Width and height must be multiples of it."""
    sizes: tuple[tuple[int, int], ...]
    """Warmed-up sizes; the first is the default."""
    fixed_sizes: bool
    """Whether only `sizes` are accepted, because any other size would be compiled first."""
    steps: int | None
    """Default number of steps."""
    guidance: float | None
    """Default guidance scale."""
    batched: Mapping[str, bool]
    """Whether each model component batches the steps of several requests."""
    max_concurrent: int
    """Number of images generated concurrently."""
    plan: str
    loras: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadProgress:
    """Progress of loading the models."""

    done: int
    total: int
    message: str


@dataclass(frozen=True)
class ModelsReady:
    """All models have been loaded once and their sizes are warmed up."""

    models: tuple[ModelFacts, ...]


@dataclass(frozen=True)
class LoadFailed:
    """The worker cannot start."""

    message: str
    hint: str


@dataclass(frozen=True)
class NotReady:
    """A pool of workers has no worker at the moment and waits for new ones."""

    message: str


@dataclass(frozen=True)
class WorkerLost:
    """One worker of a pool ended; the others run its jobs."""

    worker: str
    message: str


@dataclass(frozen=True)
class StepDone:
    """A step of one image is done."""

    job: str
    index: int
    """Position of the image in its job."""
    done: int
    total: int
    seconds: float


@dataclass(frozen=True)
class PreviewImage:
    """A preview of an unfinished image."""

    job: str
    index: int
    number: int
    """Position among the previews of this image."""
    content: bytes


@dataclass(frozen=True)
class ImageDone:
    """A finished image of a job."""

    job: str
    index: int
    content: bytes
    width: int
    height: int
    seed: int
    seconds: float


@dataclass(frozen=True)
class JobFailed:
    """A job failed. `code` and `status` are those of the HTTP error."""

    job: str
    code: str
    message: str
    status: int


@dataclass(frozen=True)
class JobStopped:
    """A cancelled job has stopped."""

    job: str


@dataclass(frozen=True)
class Heartbeat:
    """Sign of life and memory use, sent every second."""

    device_bytes: int | None
    host_bytes: int
    batches: Mapping[int, int] = field(default_factory=dict)
    """Batches since the last heartbeat, by their number of calls."""
    loaded: tuple[str, ...] = ()
