"""Video jobs in a worker: its messages, and jobs that are cancelled while their video is encoded."""

import threading
from typing import Any

import pytest

from anyaccel.media.decode import decode_video
from anyaccel.recipes import recipes
from anyaccel.server.settings import ServedName, ServerSettings
from anyaccel.server.worker.job_spec import JobSpec
from anyaccel.server.worker.messages import ImageDone, JobFailed, JobStopped, RunJob, SavingProgress, StepDone
from anyaccel.server.worker.model_cache import ModelCache
from anyaccel.server.worker.served_model import ServedModel
from anyaccel.server.worker.worker import Worker
from tests.conftest import NEEDS_RECIPES

pytestmark = NEEDS_RECIPES
SPEC = JobSpec(
    task="generate", model="wan", prompt="a cat", seeds=(7,), width=32, height=32, num_inference_steps=2, kind="video",
    num_frames=9, fps=16.0, seconds=9 / 16, output_format="mp4",
)  # fmt: skip


class RecordingWorker(Worker):
    """A worker in this process that records its messages, and cancels its job at the first encoded frame if told so."""

    def __init__(self, settings: ServerSettings, cache: ModelCache) -> None:
        super().__init__(settings, self.record)
        self.model_cache, self.messages, self.ended = cache, list[Any](), threading.Event()
        self.cancels = False

    def record(self, message: Any) -> None:
        self.messages.append(message)
        if self.cancels and isinstance(message, SavingProgress):
            self.cancel(message.job)
        if isinstance(message, ImageDone | JobFailed | JobStopped):
            self.ended.set()

    def run(self, spec: JobSpec) -> list[Any]:
        """Run a job until it has ended, and return the messages about it."""
        self.messages.clear()
        self.ended.clear()
        self.begin(RunJob("job_1", spec.to_dict(), {}))
        assert self.ended.wait(240)
        return self.messages


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> RecordingWorker:
    folder = tmp_path_factory.mktemp("wan")
    pipe: Any = recipes()["wan"].make()
    pipe.save_pretrained(folder)
    settings = ServerSettings(
        models=(ServedName("wan", str(folder)),), data=folder, device="cpu", dtype="float32", sizes=((32, 32),)
    )
    return RecordingWorker(settings, ModelCache(settings, lambda served, speed: ServedModel(served, settings)))


def test_the_messages_of_a_video_job(worker: RecordingWorker) -> None:
    messages = worker.run(SPEC)
    assert [(item.done, item.total) for item in messages if isinstance(item, StepDone)] == [(1, 2), (2, 2)]
    assert [(item.done, item.total) for item in messages if isinstance(item, SavingProgress)] == [
        (count, 9) for count in range(1, 10)
    ]
    done = messages[-1]
    assert isinstance(done, ImageDone)
    assert len(decode_video(done.content, max_frames=20, max_pixels=10**5)) == 9
    assert set(done.files) == {"thumbnail.webp", "spritesheet.jpg"}
    assert done.details == {"num_frames": 9, "fps": 16.0, "length_s": 9 / 16, "with_audio": False}


def test_a_job_is_cancelled_while_its_video_is_encoded(worker: RecordingWorker) -> None:
    worker.cancels = True
    try:
        messages = worker.run(SPEC)
    finally:
        worker.cancels = False
    assert isinstance(messages[-1], JobStopped)
    assert sum(isinstance(item, SavingProgress) for item in messages) == 1, "the encoding stops at the next frame"
    assert isinstance(worker.run(SPEC)[-1], ImageDone), "the next job runs"


def test_a_format_that_cannot_be_written_fails_before_the_first_step(worker: RecordingWorker) -> None:
    spec = JobSpec(**{**SPEC.to_dict(), "seeds": (7,), "output_format": "flac"})
    messages = worker.run(spec)
    assert [type(item) for item in messages] == [JobFailed]
    assert messages[0].status == 400
