"""What a worker does, wherever it runs: one model on one device, which makes the pictures of rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anyaccel.cluster.batch.rows import BatchRow
from anyaccel.errors import AnyaccelError
from anyaccel.progress import ProgressListener

__all__ = ["ImageWorker", "RowFailed", "RowImage", "WorkerFacts", "WorkerSettings"]

_ROWS_A_CALL = 8
_LONGEST_ERROR = 500


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What a worker needs to know."""

    model: str | None = None
    """A hub id or a folder; None is the embedded one."""
    device: str = "auto"
    index: int | None = None
    """Which of the devices of that name; None leaves it to the process."""
    dtype: str | None = None
    speed: str = "exact"
    rows_a_call: int | None = None
    """How many rows of one shape are made at once; None decides."""
    threads: int | None = None
    """How many of the host's threads it may use; None leaves it to the process."""


@dataclass(frozen=True, kw_only=True)
class WorkerFacts:
    """What a worker found when it had loaded its model."""

    pipeline: str
    parameters: tuple[str, ...]
    """What the pipeline's call takes."""
    revision: str | None
    device: str
    virtual: bool
    dtype: str
    rows_a_call: int
    load_s: float


@dataclass(frozen=True, kw_only=True)
class RowImage:
    """A picture, as the bytes of its file."""

    row: int
    content: bytes
    device: str
    dtype: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RowFailed:
    """A row that failed, and why."""

    row: int
    error: str


class ImageWorker:
    """A model on its device."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Load the model; this is where torch is imported."""
        from anyaccel.library_logging import use_process_local_tqdm_lock
        from anyaccel.processes.gc_control import gc_paused

        use_process_local_tqdm_lock()
        with gc_paused():
            import torch

            from anyaccel.generation.call_validation import list_parameters
            from anyaccel.generation.model_cache import load_uncached
            from anyaccel.generation.request import make_request
            from anyaccel.planning.options import PlacementOptions

        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self.order = make_request(
            "", settings.model, _name_device(settings), 0, dtype=settings.dtype, speed=settings.speed
        )
        options = PlacementOptions(dtype=self.order.dtype, speed=settings.speed)
        self.loaded = load_uncached(self.order, options, ProgressListener())
        self.loaded.pipe.set_progress_bar_config(disable=True)
        plan = self.loaded.pipe.plan
        self.facts = WorkerFacts(
            pipeline=type(self.loaded.pipe).__name__,
            parameters=tuple(list_parameters(self.loaded.pipe)),
            revision=self.loaded.revision,
            device=plan.device,
            virtual=plan.virtual,
            dtype=plan.dtype.value,
            rows_a_call=settings.rows_a_call or _choose_rows_a_call(self.loaded.pipe),
            load_s=round(self.loaded.load_s, 3),
        )

    def make(self, rows: Sequence[BatchRow]) -> list[RowImage | RowFailed]:
        """The pictures of rows of one shape; where they cannot be made at once, each is made by itself."""
        try:
            return self._make(rows)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is that row's, and the others go on
            if len(rows) == 1:
                return [RowFailed(row=rows[0].number, error=_describe(error))]
        return [outcome for row in rows for outcome in self.make([row])]

    def _make(self, rows: Sequence[BatchRow]) -> list[RowImage | RowFailed]:
        from anyaccel.generation.image import generate_images
        from anyaccel.generation.image_format import encode_image

        start = time.perf_counter()
        call = {**self.order.call, **rows[0].call}
        pictures = generate_images(self.loaded, [row.prompt for row in rows], [row.seed for row in rows], call)
        contents = [encode_image(picture.image, ".png", [picture.metadata]) for picture in pictures]
        seconds = round((time.perf_counter() - start) / len(rows), 4)
        facts = self.facts
        return [
            RowImage(row=row.number, content=content, device=facts.device, dtype=facts.dtype, seconds=seconds)
            for row, content in zip(rows, contents, strict=True)
        ]


def _name_device(settings: WorkerSettings) -> str:
    """The device of this worker, with its index."""
    if settings.index is None:
        return settings.device
    from anyaccel.backends.device import read_device

    return str(read_device(settings.device).with_index(settings.index))


def _choose_rows_a_call(pipe: Any) -> int:
    """One on the host, which gains nothing by more and loses that each picture is, to the bit, the one made alone."""
    from anyaccel.runtime.placement_state import find_placement

    placement, plan = find_placement(pipe), pipe.plan
    if plan.virtual or placement is None or placement.opened.sheet.is_host:
        return 1
    most = plan.images_per_call.value
    return min(_ROWS_A_CALL, most) if most else _ROWS_A_CALL


def _describe(error: Exception) -> str:
    if isinstance(error, AnyaccelError):
        return _shorten(f"{error.message} (hint: {error.hint})")
    return _shorten(f"{type(error).__name__}: {error}")


def _shorten(text: str) -> str:
    return " ".join(text.split())[:_LONGEST_ERROR]
