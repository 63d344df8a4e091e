"""The worker: holds the models and makes the pictures, in a process apart from the service.

As the service's own process it ends by itself when the service does: the pipe between them is closed then. A replica on
another machine holds a worker as well.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from anyaccel.library_logging import quiet_libraries
from anyaccel.processes.pipe_worker import ParentPipe
from anyaccel.progress import ProgressListener
from anyaccel.server.settings import ServedName, ServerSettings
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
    StepDone,
)

__all__ = ["Worker", "describe_failure", "describe_start", "run_worker"]

_LOG = logging.getLogger(__name__)
_BEAT_S = 1.0
_PREVIEW_QUALITY = 80


def run_worker(pipe: ParentPipe, settings: ServerSettings) -> None:
    """Serve until the service is gone; the entry of the process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to all processes of a service: the service decides
    use_one_malloc_arena()
    with quiet_libraries():
        _serve(pipe, Worker(settings, pipe.send))


def _serve(pipe: ParentPipe, worker: Worker) -> None:
    threading.Thread(target=worker.beat, daemon=True).start()
    try:
        pipe.send(ModelsReady(worker.load()))
    except Exception as error:  # noqa: BLE001 - whatever it is, the service hears of it
        pipe.send(describe_start(error))
        _LOG.debug("anyaccel: the worker cannot start", exc_info=True)
        os._exit(1)
    while True:
        said: RunJob | CancelJob = pipe.receive()
        worker.begin(said) if isinstance(said, RunJob) else worker.cancel(said.job)


class Worker:
    """The models of a service on one device; `tell` is called from the threads that make pictures."""

    def __init__(self, settings: ServerSettings, tell: Callable[[Any], None]) -> None:
        self.settings, self.tell = settings, tell
        self.stops: dict[str, threading.Event] = {}
        self.threads = ThreadPoolExecutor(settings.in_hand, thread_name_prefix="picture")
        self.started = 0
        self.loaded = threading.Event()

    def load(self) -> tuple[ModelFacts, ...]:
        """Load all models once, as far as they fit, and make their sizes warm."""
        from anyaccel.library_logging import use_process_local_tqdm_lock
        from anyaccel.processes.gc_control import gc_paused

        use_process_local_tqdm_lock()
        with gc_paused():
            from anyaccel.server.worker.model_cache import ModelCache
            from anyaccel.server.worker.served_model import ServedModel

        total = len(self.settings.models)

        def load(served: ServedName) -> ServedModel:
            self.tell(LoadProgress(self.started, total, f"loading {served.name}"))
            return ServedModel(served, self.settings, _Teller(self, served.name, total))

        self.shelf = ModelCache(self.settings, load)
        facts = []
        for served in self.settings.models:
            with self.shelf.using(served.name) as model:
                facts.append(model.facts())
            self.started += 1
            self.tell(LoadProgress(self.started, total, f"{served.name} is ready"))
        self.loaded.set()
        return tuple(facts)

    def begin(self, said: RunJob) -> None:
        """Make the pictures of a job; what becomes of them is told."""
        self.stops[said.job] = threading.Event()
        try:
            _WorkerJob(self, said).begin()
        except Exception as error:  # noqa: BLE001 - a job that cannot be read must not end the worker
            self.stops.pop(said.job, None)
            self.tell(describe_failure(said.job, error))

    def cancel(self, job: str) -> None:
        """Stop a job at its next step; one that ended stays as it is."""
        stop = self.stops.get(job)
        if stop is not None:
            stop.set()

    def beat(self) -> None:
        """Tell every second that the process lives, and what is held as soon as something is."""
        import psutil

        from anyaccel.errors import NotMeasurableError

        process, before = psutil.Process(), Counter[int]()
        while not self.loaded.wait(_BEAT_S):
            self.tell(Heartbeat(None, process.memory_info().rss, {}, ()))
        while True:
            time.sleep(_BEAT_S)
            models = dict(self.shelf.models)
            now = Counter[int]()
            for model in models.values():
                shared = model.shared
                for name, meeting in shared.meetings.items() if shared is not None else ():
                    if name in model.denoisers:
                        now.update(dict(meeting.seen.sizes))
            held = None
            if self.shelf.opened is not None:
                try:
                    held = self.shelf.opened.driver.memory(self.shelf.opened.index).used_bytes
                except NotMeasurableError:
                    held = None
            rounds = {size: count - before[size] for size, count in now.items() if count > before[size]}
            before = now
            self.tell(Heartbeat(held, process.memory_info().rss, rounds, tuple(models)))


class _Teller(ProgressListener):
    """Tells the service how far a model's loading is."""

    def __init__(self, worker: Worker, name: str, total: int) -> None:
        self.worker, self.name, self.total = worker, name, total

    def on_component(self, done: int, total: int, name: str) -> None:
        words = f"{self.name}: {name} ({done} of {total})" if name else f"{self.name}: warming up"
        self.worker.tell(LoadProgress(self.worker.started, self.total, words))


class _WorkerJob:
    """One job's pictures, each in a thread of its own."""

    def __init__(self, worker: Worker, said: RunJob) -> None:
        from anyaccel.server.worker.job_spec import read_job_spec

        self.worker, self.said, self.work = worker, said, read_job_spec(said.work)
        self.stop = worker.stops[said.job]
        self.lock = threading.Lock()
        self.left = len(self.work.seeds)
        self.error: JobFailed | None = None

    def begin(self) -> None:
        for picture in range(len(self.work.seeds)):
            self.worker.threads.submit(self._make, picture)

    def _make(self, picture: int) -> None:
        from anyaccel.progress import StoppedError

        try:
            if not self.stop.is_set():
                self._run(picture)
        except StoppedError:
            pass  # it is told when all of the job's pictures have stopped
        except BaseException as error:  # noqa: BLE001 - whatever it is, the job hears of it and the others go on
            _LOG.debug("anyaccel: %s failed", self.said.job, exc_info=True)
            with self.lock:
                self.error = self.error or describe_failure(self.said.job, error)
            self.stop.set()
        with self.lock:
            self.left -= 1
            last = self.left == 0
        if last:
            self._end()

    def _end(self) -> None:
        self.worker.stops.pop(self.said.job, None)
        if self.error is not None:
            self.worker.tell(self.error)
        elif self.stop.is_set():
            self.worker.tell(JobStopped(self.said.job))

    def _run(self, picture: int) -> None:
        from anyaccel.generation.image_format import encode_image
        from anyaccel.server.worker.job_spec import SUFFIXES

        start = time.perf_counter()
        work, job = self.work, self.said.job
        with self.worker.shelf.using(work.model, self.stop.is_set) as model:
            image, origin = model.make(work, picture, _read_pictures(self.said.inputs), self._watch(picture))
        content = encode_image(image, SUFFIXES[work.output_format], [origin], work.output_compression)
        seconds = time.perf_counter() - start
        self.worker.tell(ImageDone(job, picture, content, image.width, image.height, work.seeds[picture], seconds))

    def _watch(self, picture: int) -> Any:
        from anyaccel.server.worker.denoise_progress import Watcher

        job, work, last = self.said.job, self.work, [time.perf_counter()]
        numbers = iter(range(work.partial_images))

        def on_step(done: int, total: int) -> None:
            now = time.perf_counter()
            self.worker.tell(StepDone(job, picture, done, total, now - last[0]))
            last[0] = now

        def on_preview(image: Any) -> None:
            stream = io.BytesIO()
            kind = {"png": "PNG", "jpeg": "JPEG", "webp": "WEBP"}[work.output_format]
            image.save(stream, kind, **({} if kind == "PNG" else {"quality": _PREVIEW_QUALITY}))
            self.worker.tell(PreviewImage(job, picture, next(numbers), stream.getvalue()))

        shares = tuple((place + 1) / (work.partial_images + 1) for place in range(work.partial_images))
        return Watcher(on_step, on_preview if shares else None, shares, self.stop.is_set)


def _read_pictures(inputs: Mapping[str, str | bytes]) -> dict[str, Any]:
    from PIL import Image

    found = {}
    for name, given in inputs.items():
        with Image.open(io.BytesIO(given) if isinstance(given, bytes) else given) as image:
            found[name] = _read_mask(image) if name == "mask_image" else _read_picture(image)
    return found


def _read_picture(image: Any) -> Any:
    """In colours, the way up that a camera says, on white where it is transparent."""
    from PIL import Image, ImageOps

    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):  # 16 bits, which Pillow would cut off
        upright = upright.point(lambda value: value / 257).convert("L")
    if not upright.has_transparency_data:
        return upright.convert("RGB")
    white = Image.new("RGBA", upright.size, "white")
    white.alpha_composite(upright.convert("RGBA"))
    return white.convert("RGB")


def _read_mask(image: Any) -> Any:
    """White where the picture is to change: as OpenAI has it, where the mask is transparent; else where it is white."""
    from PIL import ImageOps

    if not image.has_transparency_data:
        return image.convert("L")
    return ImageOps.invert(image.convert("RGBA").getchannel("A"))


def describe_start(error: Exception) -> LoadFailed:
    """What the service is told where a worker cannot start."""
    from anyaccel.errors import AnyaccelError

    if isinstance(error, AnyaccelError):
        return LoadFailed(error.message, error.hint)
    return LoadFailed(f"{type(error).__name__}: {error}", "look at the model with `anyaccel check`")


def describe_failure(job: str, error: BaseException) -> JobFailed:
    """What a client is told of an error."""
    from anyaccel.backends.out_of_memory import is_out_of_memory
    from anyaccel.errors import AnyaccelError, DoesNotFitError, NotFiniteError, UsageError
    from anyaccel.server.worker.served_model import RefusedError

    if isinstance(error, RefusedError):
        return JobFailed(job, "content_policy_violation", "the model's safety checker refused the picture", 400)
    words = f"{error.message}; {error.hint}" if isinstance(error, AnyaccelError) else f"{type(error).__name__}: {error}"
    if isinstance(error, DoesNotFitError) or is_out_of_memory(error):
        return JobFailed(job, "out_of_memory", words, 507)
    if isinstance(error, NotFiniteError):
        return JobFailed(job, "not_finite", words, 500)
    if isinstance(error, UsageError):
        return JobFailed(job, "invalid_value", words, 400)
    return JobFailed(job, "internal_error", words, 500)
