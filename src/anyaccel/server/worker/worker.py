"""Worker that holds the models and generates images outside the service's process.

It runs in a Ray replica or in a child process of the service. The child process exits when its pipe to the service
closes.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from anyaccel.library_logging import quiet_libraries
from anyaccel.processes.pipe_worker import ParentPipe
from anyaccel.progress import ProgressListener
from anyaccel.server.settings import ServedName, ServerSettings
from anyaccel.server.worker.device_watch import DeviceWatch
from anyaccel.server.worker.malloc_arenas import use_one_malloc_arena
from anyaccel.server.worker.messages import (
    CancelJob,
    Heartbeat,
    ImageDone,
    JobFailed,
    JobStopped,
    LoadFailed,
    LoadProgress,
    ModelFacts,
    ModelsReady,
    PreviewImage,
    RunJob,
    SavingProgress,
    StepDone,
)

# The service imports this module for `run_worker`. Functions import torch and PIL themselves, so the service starts
# fast and answers requests while the worker loads a model.

__all__ = ["Worker", "make_job_failed", "make_load_failed", "run_worker"]

_LOG = logging.getLogger(__name__)
_HEARTBEAT_S = 1.0
_PREVIEW_QUALITY = 80


def run_worker(pipe: ParentPipe, settings: ServerSettings) -> None:
    """Load the models and run jobs until the service exits; entry point of the worker process."""
    # Process managers send SIGTERM to the whole process group; the service decides when the worker ends.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    use_one_malloc_arena()
    with quiet_libraries():
        _run_messages(pipe, Worker(settings, pipe.send))


def _run_messages(pipe: ParentPipe, worker: Worker) -> None:
    threading.Thread(target=worker.beat, daemon=True).start()
    try:
        pipe.send(ModelsReady(worker.load()))
    except Exception as error:  # noqa: BLE001 - reported to the service
        pipe.send(make_load_failed(error))
        _LOG.debug("anyaccel: the worker cannot start", exc_info=True)
        os._exit(1)
    while True:
        message: RunJob | CancelJob = pipe.receive()
        worker.begin(message) if isinstance(message, RunJob) else worker.cancel(message.job)


class Worker:
    """Worker that runs jobs for a service on one device.

    It sends its messages by calling `send` from several threads.
    """

    def __init__(self, settings: ServerSettings, send: Callable[[Any], None]) -> None:
        self.settings, self.send = settings, send
        self.stop_events: dict[str, threading.Event] = {}
        self.threads = ThreadPoolExecutor(settings.max_in_flight, thread_name_prefix="image")
        self.models_loaded = 0
        self.ready = threading.Event()
        self.watch = DeviceWatch()

    def load(self) -> tuple[ModelFacts, ...]:
        """Load and warm up each model, and return the properties of all models.

        If the models do not all fit into memory, loading one evicts others.
        """
        with self.watch.using_device():
            return self._load()

    def _load(self) -> tuple[ModelFacts, ...]:
        from anyaccel.library_logging import use_process_local_tqdm_lock
        from anyaccel.processes.gc_control import gc_paused

        use_process_local_tqdm_lock()
        with gc_paused():
            from anyaccel.server.worker.model_cache import ModelCache
            from anyaccel.server.worker.served_model import ServedModel

        total = len(self.settings.models)

        def load(served: ServedName, speed: str) -> ServedModel:
            self.send(LoadProgress(self.models_loaded, total, f"loading {served.name}"))
            with self.watch.using_device():
                reporter = _LoadReporter(self, served.name, total)
                return ServedModel(served, self.settings, reporter, self.watch, speed)

        self.model_cache = ModelCache(self.settings, load)
        facts = []
        for served in self.settings.models:
            with self.model_cache.using(served.name) as model:
                facts.append(model.facts())
            self.models_loaded += 1
            self.send(LoadProgress(self.models_loaded, total, f"{served.name} is ready"))
        self.ready.set()
        return tuple(facts)

    def begin(self, message: RunJob) -> None:
        """Start generating a job's images in background threads, and return immediately."""
        # Registered before a thread starts: a `CancelJob` may be the next message.
        self.stop_events[message.job] = threading.Event()
        try:
            _WorkerJob(self, message).begin()
        except Exception as error:  # noqa: BLE001 - an invalid job must not stop the worker
            self.stop_events.pop(message.job, None)
            self.send(make_job_failed(message.job, error))

    def cancel(self, job: str) -> None:
        """Stop a job at its next step; do nothing if it has ended."""
        stop_event = self.stop_events.get(job)
        if stop_event is not None:
            stop_event.set()

    def beat(self) -> None:
        """Send a heartbeat message every second, in an infinite loop."""
        import psutil

        from anyaccel.errors import NotMeasurableError

        process, previous = psutil.Process(), Counter[int]()
        while not self.ready.wait(_HEARTBEAT_S):
            self.send(Heartbeat(None, process.memory_info().rss, stalled_s=self.watch.measure_stall_s()))
        while True:
            time.sleep(_HEARTBEAT_S)
            # Before the memory is read, which also hangs if the driver does: the service then gets no heartbeats.
            stalled_s = self.watch.measure_stall_s()
            models = dict(self.model_cache.models)
            totals = Counter[int]()
            for model in models.values():
                shared = model.shared
                for name, forward in shared.forwards.items() if shared is not None else ():
                    if name in model.denoisers:
                        totals.update(dict(forward.stats.sizes))
            used_bytes = None  # no device yet, or the driver cannot measure it
            if self.model_cache.opened is not None:
                try:
                    used_bytes = self.model_cache.opened.driver.memory(self.model_cache.opened.index).used_bytes
                except NotMeasurableError:
                    used_bytes = None
            # The totals drop when a model is evicted. Metrics are counters, so only increases are sent.
            new = {size: count - previous[size] for size, count in totals.items() if count > previous[size]}
            previous = totals
            names = tuple(dict.fromkeys(name for name, _ in models))
            self.send(Heartbeat(used_bytes, process.memory_info().rss, new, names, stalled_s))


class _LoadReporter(ProgressListener):
    """Progress listener that sends a model's loading progress to the service."""

    def __init__(self, worker: Worker, name: str, total: int) -> None:
        self.worker, self.name, self.total = worker, name, total

    def on_component(self, done: int, total: int, name: str) -> None:
        text = f"{self.name}: {name} ({done} of {total})" if name else f"{self.name}: warming up"
        self.worker.send(LoadProgress(self.worker.models_loaded, self.total, text))

    def on_layer(self, done: int, total: int, text: str) -> None:
        progress = f"{self.name}: {text} ({done} of {total} layers)"
        self.worker.send(LoadProgress(self.worker.models_loaded, self.total, progress))


class _WorkerJob:
    """A job that the worker is running, with one thread per image."""

    def __init__(self, worker: Worker, message: RunJob) -> None:
        from anyaccel.server.worker.job_spec import read_job_spec

        self.worker, self.id, self.inputs = worker, message.job, message.inputs
        self.spec = read_job_spec(message.spec)
        self.stop_event = worker.stop_events[self.id]
        self.lock = threading.Lock()
        self.unfinished = len(self.spec.seeds)
        self.error: JobFailed | None = None

    def begin(self) -> None:
        for index in range(len(self.spec.seeds)):
            self.worker.threads.submit(self._run, index)

    def _run(self, index: int) -> None:
        from anyaccel.progress import StoppedError

        try:
            if not self.stop_event.is_set():
                self._generate(index)
        except StoppedError:
            pass  # reported once, after the job's last image has stopped
        except BaseException as error:  # noqa: BLE001 - reported to the client; other jobs continue
            _LOG.debug("anyaccel: %s failed", self.id, exc_info=True)
            with self.lock:
                self.error = self.error or make_job_failed(self.id, error, has_arguments=bool(self.spec.arguments))
            self.stop_event.set()
        with self.lock:
            self.unfinished -= 1
            is_last = self.unfinished == 0
        if is_last:
            self._end()

    def _end(self) -> None:
        self.worker.stop_events.pop(self.id, None)
        if self.error is not None:
            self.worker.send(self.error)
        elif self.stop_event.is_set():
            self.worker.send(JobStopped(self.id))

    def _generate(self, index: int) -> None:
        from anyaccel.server.worker.job_inputs import read_inputs
        from anyaccel.server.worker.result_files import encode_result

        start, spec = time.perf_counter(), self.spec
        with self.worker.model_cache.using(spec.model, spec.speed, self.stop_event.is_set) as model:
            media, metadata = model.generate(spec, index, read_inputs(self.inputs), self._make_observer(index))
        result = encode_result(
            media, spec, metadata, self.inputs, lambda done, total: self._on_frame(index, done, total)
        )
        seconds = time.perf_counter() - start
        self.worker.send(
            ImageDone(
                self.id, index, result.content, result.width, result.height, spec.seeds[index], seconds,
                result.details, result.files,
            )
        )  # fmt: skip

    def _on_frame(self, index: int, done: int, total: int) -> None:
        """Report the progress of an encoding, and stop it if the job was cancelled."""
        from anyaccel.progress import StoppedError

        if self.stop_event.is_set():
            raise StoppedError
        if self.spec.kind == "video":
            self.worker.send(SavingProgress(self.id, index, done, total))

    def _make_observer(self, index: int) -> Any:
        from anyaccel.server.worker.denoise_progress import StepObserver

        job_id, spec, last_step_at = self.id, self.spec, time.perf_counter()
        preview_numbers = iter(range(spec.partial_images))

        def on_step(done: int, total: int) -> None:
            nonlocal last_step_at
            now = time.perf_counter()
            self.worker.send(StepDone(job_id, index, done, total, now - last_step_at))
            last_step_at = now

        def on_preview(image: Any) -> None:
            stream = io.BytesIO()
            image_format = {"jpeg": "JPEG", "webp": "WEBP"}.get(spec.output_format, "PNG")
            image.save(stream, image_format, **({} if image_format == "PNG" else {"quality": _PREVIEW_QUALITY}))
            self.worker.send(PreviewImage(job_id, index, next(preview_numbers), stream.getvalue()))

        # Evenly spaced, without the last step: its preview would be the finished image.
        fractions = tuple((number + 1) / (spec.partial_images + 1) for number in range(spec.partial_images))
        return StepObserver(on_step, on_preview if fractions else None, fractions, self.stop_event.is_set)


def make_load_failed(error: Exception) -> LoadFailed:
    """Return the `LoadFailed` message for an exception that prevented the worker from starting."""
    from anyaccel.errors import AnyaccelError

    if isinstance(error, AnyaccelError):
        return LoadFailed(error.message, error.hint)
    return LoadFailed(f"{type(error).__name__}: {error}", "run `anyaccel check MODEL` to find the cause")


def make_job_failed(job: str, error: BaseException, *, has_arguments: bool = False) -> JobFailed:
    """Return the `JobFailed` message for an exception, with the code and status for the HTTP error.

    `has_arguments` is whether the request set further arguments of the pipeline.
    """
    from anyaccel.backends.out_of_memory import is_out_of_memory
    from anyaccel.errors import AnyaccelError, DoesNotFitError, NotFiniteError, UsageError
    from anyaccel.server.worker.served_model import UnsafeContentError

    if isinstance(error, UnsafeContentError):
        return JobFailed(job, "content_policy_violation", "the model's safety checker rejected the image", 400)
    text = f"{error.message}; {error.hint}" if isinstance(error, AnyaccelError) else f"{type(error).__name__}: {error}"
    if isinstance(error, DoesNotFitError) or is_out_of_memory(error):
        return JobFailed(job, "out_of_memory", text, 507)
    if isinstance(error, NotFiniteError):
        return JobFailed(job, "not_finite", text, 500)
    # Pipelines raise ValueError for arguments that they reject, and fail with other errors for those they do not check.
    rejections = (UsageError, ValueError, *((LookupError, OverflowError, TypeError) if has_arguments else ()))
    if isinstance(error, rejections):
        return JobFailed(job, "invalid_value", text, 400)
    return JobFailed(job, "internal_error", text, 500)
