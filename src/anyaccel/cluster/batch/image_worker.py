"""Batch worker: generates images, videos or audio for batch rows with one model on one device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from anyaccel.cluster.batch.rows import BatchRow
from anyaccel.errors import AnyaccelError
from anyaccel.progress import ProgressListener

if TYPE_CHECKING:
    from anyaccel.generation.adapters import Additions
    from anyaccel.generation.model_loading import LoadedModel

__all__ = ["ImageWorker", "RowFailed", "RowImage", "WorkerFacts", "WorkerSettings"]

# Limit on accelerators unless `rows_per_call` is set.
_MAX_ROWS_PER_CALL = 8
_MAX_ERROR_CHARACTERS = 500


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Options for a batch worker."""

    model: str | None = None
    """Hub ID or folder; None is the embedded model."""
    device: str = "auto"
    index: int | None = None
    """Index of the device; None is the default device of the process."""
    dtype: str | None = None
    speed: str = "exact"
    weights: str | None = None
    rows_per_call: int | None = None
    """Maximum number of rows of the same shape per pipeline call; None chooses for the device."""
    threads: int | None = None
    """Number of CPU threads; None is torch's default."""


@dataclass(frozen=True, kw_only=True)
class WorkerFacts:
    """Properties of a batch worker, available after it has loaded its model."""

    pipeline: str
    parameters: tuple[str, ...]
    """Parameters of the pipeline's call."""
    revision: str | None
    device: str
    virtual: bool
    dtype: str
    rows_per_call: int
    load_s: float


@dataclass(frozen=True, kw_only=True)
class RowImage:
    """Image, video or audio generated for a batch row, encoded as a file."""

    row: int
    content: bytes
    suffix: str = ".png"
    sidecar: bytes | None = None
    """Content of the file with the metadata, if the file cannot contain it."""
    device: str
    dtype: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RowFailed:
    """Error that occurred while generating the result of a batch row."""

    row: int
    error: str


class ImageWorker:
    """Worker that generates images for batch rows with one model on one device."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Load the model and place it on the device."""
        from anyaccel.library_logging import use_process_local_tqdm_lock
        from anyaccel.processes.gc_control import gc_paused

        # tqdm's default lock is a multiprocessing semaphore, which a killed worker would leak:
        # https://github.com/tqdm/tqdm/issues/611 (seen in tqdm 4.70)
        use_process_local_tqdm_lock()
        # Imported here and not by the parent process, which only reads and writes files.
        with gc_paused():
            import torch

            from anyaccel.generation.call_validation import list_parameters
            from anyaccel.generation.model_loading import load_uncached
            from anyaccel.generation.request import make_request
            from anyaccel.planning.options import PlacementOptions
            from anyaccel.upstream.modular_blocks import disable_progress_bars

        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self.request = make_request(
            "",
            settings.model,
            _device_name(settings),
            0,
            dtype=settings.dtype,
            speed=settings.speed,
            weights=settings.weights,
        )
        self.options = PlacementOptions(dtype=self.request.dtype, speed=settings.speed, weights=settings.weights)
        loaded = load_uncached(self.request, self.options, ProgressListener())
        self.loaded: LoadedModel | None = loaded
        disable_progress_bars(loaded.pipe)
        plan = loaded.pipe.plan
        self.facts = WorkerFacts(
            pipeline=type(loaded.pipe).__name__,
            parameters=tuple(list_parameters(loaded.pipe)),
            revision=loaded.revision,
            device=plan.device,
            virtual=plan.virtual,
            dtype=plan.dtype.value,
            rows_per_call=settings.rows_per_call or _choose_rows_per_call(loaded.pipe),
            load_s=round(loaded.load_s, 3),
        )

    def generate(self, rows: Sequence[BatchRow]) -> list[RowImage | RowFailed]:
        """Generate the results of rows with the same call arguments, images in one pipeline call.

        If the call fails, each row is retried in its own call.
        """
        try:
            return self._generate(rows)
        except Exception as error:  # noqa: BLE001 - any error belongs to the row; the other rows continue
            if len(rows) == 1:
                return [RowFailed(row=rows[0].number, error=_format_error(error))]
        # Outside of the except block, where the traceback no longer holds device memory:
        # https://github.com/pytorch/pytorch/issues/18853
        return [outcome for row in rows for outcome in self.generate([row])]

    def _generate(self, rows: Sequence[BatchRow]) -> list[RowImage | RowFailed]:
        from anyaccel.embedded.motion import fit_video_call
        from anyaccel.generation.adapters import read_additions
        from anyaccel.generation.input_files import read_inputs
        from anyaccel.generation.media import generate_batch
        from anyaccel.generation.media_format import encode_media
        from anyaccel.media.formats import default_suffix
        from anyaccel.media.types import kind_of

        start = time.perf_counter()
        loaded = self._find_loaded(read_additions(**rows[0].additions))
        row_call = fit_video_call(rows[0].call) if loaded.model.with_motion else rows[0].call
        call = {**self.request.call, **read_inputs(row_call)}
        results = generate_batch(loaded, [row.prompt for row in rows], [row.seed for row in rows], call)
        suffixes = [default_suffix(kind_of(result.media)) for result in results]
        files = [
            encode_media(result.media, suffix, [result.metadata])
            for result, suffix in zip(results, suffixes, strict=True)
        ]
        seconds = round((time.perf_counter() - start) / len(rows), 4)
        facts = self.facts
        return [
            RowImage(
                row=row.number,
                content=file.content,
                suffix=suffix,
                sidecar=file.sidecar,
                device=facts.device,
                dtype=facts.dtype,
                seconds=seconds,
            )
            for row, file, suffix in zip(rows, files, suffixes, strict=True)
        ]

    def _find_loaded(self, additions: Additions) -> LoadedModel:
        """Return the model with the LoRAs, IP-Adapters, ControlNets and the scheduler of a row."""
        from anyaccel.generation.model_loading import change_additions, load_uncached
        from anyaccel.upstream.modular_blocks import disable_progress_bars

        if self.loaded is not None and self.loaded.additions == additions:
            return self.loaded
        # None until the additions are complete: after an error, the model may have some of them.
        before, self.loaded = self.loaded, None
        loaded = None if before is None else change_additions(before, additions)
        del before  # before loading, because two models may not fit into memory
        if loaded is None:
            loaded = load_uncached(replace(self.request, additions=additions), self.options, ProgressListener())
            disable_progress_bars(loaded.pipe)
        self.loaded = loaded
        return loaded


def _device_name(settings: WorkerSettings) -> str:
    """Return the worker's device name, including the device index."""
    if settings.index is None:
        return settings.device
    from anyaccel.backends.device import read_device

    return str(read_device(settings.device).with_index(settings.index))


def _choose_rows_per_call(pipe: Any) -> int:
    """Return the number of batch rows per pipeline call: 1 on the CPU, where batching is not faster.

    With one row per call, each image is bit-identical to an image generated on its own.
    """
    from anyaccel.runtime.placement_state import find_placement

    placement, plan = find_placement(pipe), pipe.plan
    if plan.virtual or placement is None or placement.opened.sheet.is_host:
        return 1
    limit = plan.images_per_call.value
    return min(_MAX_ROWS_PER_CALL, limit) if limit else _MAX_ROWS_PER_CALL


def _format_error(error: Exception) -> str:
    if isinstance(error, AnyaccelError):
        return _shorten(f"{error.message} (hint: {error.hint})")
    return _shorten(f"{type(error).__name__}: {error}")


def _shorten(text: str) -> str:
    return " ".join(text.split())[:_MAX_ERROR_CHARACTERS]
