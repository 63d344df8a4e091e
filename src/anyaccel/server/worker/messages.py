"""Messages between the service and its workers, pickled and sent through a pipe or through Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anyaccel.media.types import Kind

__all__ = [
    "AudioFacts",
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
    "SavingProgress",
    "StepDone",
    "VideoFacts",
    "WorkerLost",
]

# Messages to a worker


@dataclass(frozen=True)
class RunJob:
    """Request to generate the images of a job."""

    job: str
    spec: Mapping[str, Any]
    """The job spec as `JobSpec.to_dict` returns it."""
    inputs: Mapping[str, str | bytes]
    """Input images by argument name: paths, or file contents for a worker on another machine."""


@dataclass(frozen=True)
class CancelJob:
    """Request to stop a job at its next denoising step."""

    job: str


# Messages from a worker. The service must be able to unpickle them without torch: no tensors, no torch dtypes.


@dataclass(frozen=True, kw_only=True)
class VideoFacts:
    """Lengths and frame rates of the videos of a model."""

    frames: int
    """Default number of frames."""
    fps: float
    """Default frame rate."""
    step: int
    rest: int
    """The number of frames is a multiple of `step` plus `rest`."""
    sets_frames: bool
    """Whether a request can set the number of frames."""
    with_audio: bool
    """Whether the videos may have an audio track."""
    frame_limits: tuple[int, int] | None = None
    """Fewest and most frames, if a duration without a frame rate sets the frame rate; None for other models."""

    @property
    def shortest(self) -> int:
        """Number of frames of a short video that is long enough to compress several frames into one latent frame."""
        return 2 * self.step + self.rest


@dataclass(frozen=True, kw_only=True)
class AudioFacts:
    """Lengths of the audio of a model."""

    seconds: float | None
    """Default length; None if the model chooses it."""
    sets_seconds: bool
    """Whether a request can set the length."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Properties of a served model, for clients and for request validation."""

    name: str
    pipeline: str
    device: str
    virtual: bool
    """Whether the device is emulated on the CPU."""
    dtype: str
    tasks: tuple[str, ...]
    """Supported tasks: `generate`, `edit`, `inpaint`."""
    parameters: Mapping[str, tuple[str, ...]]
    """Pipeline arguments of each task."""
    multiple: int
    """Required divisor of width and height."""
    sizes: tuple[tuple[int, int], ...]
    """Warmed-up sizes as (width, height); the first is the default."""
    fixed_sizes: bool
    """Whether only `sizes` are accepted, because another size would have to be compiled first."""
    defaults: Mapping[str, Mapping[str, float | None]]
    """Default number of steps and guidance scale of each task: the pipelines of a model can have different ones."""
    batched: Mapping[str, bool]
    """Whether each model component batches the steps of several requests."""
    max_concurrent: int
    """Maximum number of images per batch."""
    plan: str
    weights: str | None = None
    """Format to which the weights are quantized."""
    loras: tuple[str, ...] = ()
    kind: Kind = "image"
    """What the model generates."""
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Inputs of each task besides the prompt, such as `image`."""
    required_inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Inputs without which a task fails, in addition to the image of an edit."""
    many_images: bool = False
    """Whether an edit can have several input images."""
    arguments: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    """Further pipeline arguments of each task that a request can set, with their JSON types."""
    video: VideoFacts | None = None
    audio: AudioFacts | None = None
    speeds: tuple[str, ...] = ()
    """Speed levels that a request can select."""


@dataclass(frozen=True)
class LoadProgress:
    """Message that reports progress while the models are loading."""

    done: int
    total: int
    message: str


@dataclass(frozen=True)
class ModelsReady:
    """Message sent when all models have been loaded and warmed up."""

    models: tuple[ModelFacts, ...]


@dataclass(frozen=True)
class LoadFailed:
    """Message sent when the worker cannot start."""

    message: str
    hint: str


# Only a pool of workers sends the next two messages. The dispatcher itself replaces a single worker that died.
@dataclass(frozen=True)
class NotReady:
    """Message sent when a pool has no workers left and is waiting for new ones."""

    message: str


@dataclass(frozen=True)
class WorkerLost:
    """Message sent when one worker in a pool has exited; other workers take over its jobs."""

    worker: str
    message: str


# Messages about a job. The dispatcher drops those that arrive after the job has ended.
@dataclass(frozen=True)
class StepDone:
    """Message sent after each denoising step of an image."""

    job: str
    index: int
    """Position of the image in its job."""
    done: int
    total: int
    seconds: float
    """Time since the previous step of this image."""


@dataclass(frozen=True)
class PreviewImage:
    """Message that contains a preview of an unfinished image."""

    job: str
    index: int
    number: int
    """Position among the previews of this image."""
    content: bytes


@dataclass(frozen=True)
class SavingProgress:
    """Message sent while a video is encoded."""

    job: str
    index: int
    done: int
    total: int
    """Number of frames."""


@dataclass(frozen=True)
class ImageDone:
    """Message that contains one finished image of a job, or its video or audio."""

    job: str
    index: int
    content: bytes
    width: int
    height: int
    seed: int
    seconds: float
    """Time to generate it."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further properties, such as the number of frames: JSON values."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Further files, such as `thumbnail.webp`."""


@dataclass(frozen=True)
class JobFailed:
    """Message sent when a job has failed, with the `code` and `status` for the HTTP error."""

    job: str
    code: str
    message: str
    status: int


@dataclass(frozen=True)
class JobStopped:
    """Message sent when a job has stopped in response to `CancelJob`."""

    job: str


# Sent from a separate thread, so the message itself only shows that the process is alive. `stalled_s` shows whether the
# threads that use the device make progress.
@dataclass(frozen=True)
class Heartbeat:
    """Message with a worker's memory use, batch sizes and progress, sent every second."""

    device_bytes: int | None
    """Used device memory; None if the driver cannot measure it."""
    host_bytes: int
    """Resident set size of the worker."""
    batches: Mapping[int, int] = field(default_factory=dict)
    """Number of batches since the last heartbeat, by calls per batch."""
    loaded: tuple[str, ...] = ()
    """Names of the models in memory."""
    stalled_s: float = 0.0
    """Seconds without progress of the threads that use the device; 0 if no thread uses it."""
