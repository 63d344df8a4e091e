"""Job store: no job is lost or run twice, even if the process is killed at any time."""

import errno
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anyaccel.errors import UsageError
from anyaccel.server.http.responses import Signer, describe_images, describe_job
from anyaccel.server.jobs.store import ENDED, JobStore, KeyTakenError, QueueFullError


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[JobStore]:
    store = JobStore(tmp_path)
    yield store
    store.close()


def test_a_job_from_submission_to_deletion(jobs: JobStore) -> None:
    job, new = jobs.submit({"prompt": "a cat"})
    assert (job.state, new, jobs.count("queued")) == ("queued", True, 1)
    taken = jobs.take()
    assert taken is not None
    assert (taken.id, taken.state, taken.attempts) == (job.id, "running", 1)
    assert jobs.take() is None
    done = jobs.finish(job.id, [("0.png", b"content")], {"seed": 7})
    assert (done.state, done.result) == ("done", {"seed": 7, "files": ["0.png"]})
    assert done.bytes == 7 + len('{"prompt": "a cat"}'), "the size includes the request"
    file = jobs.find_file(done, "0.png")
    assert file is not None
    assert file.read_bytes() == b"content"
    assert jobs.find_file(done, "../../jobs.sqlite") is None
    assert jobs.fail(job.id, {}).state == "done", "a finished job must not change"
    jobs.delete(job.id)
    assert jobs.get(job.id) is None
    assert not file.exists()


def test_the_oldest_job_runs_first_and_a_key_is_used_once(jobs: JobStore) -> None:
    first, _ = jobs.submit({"n": 1}, owner="a", key="k")
    again, new = jobs.submit({"n": 1}, owner="a", key="k")
    assert (again.id, new) == (first.id, False)
    other, new = jobs.submit({"n": 1}, owner="b", key="k")
    assert new
    with pytest.raises(KeyTakenError):
        jobs.submit({"n": 2}, owner="a", key="k")
    taken = jobs.take()
    assert taken is not None
    assert taken.id == first.id
    assert jobs.get(first.id, owner="b") is None
    assert [job.id for job in jobs.list(owner="b")] == [other.id]


def test_the_queue_is_bounded_and_fair(jobs: JobStore) -> None:
    many = [jobs.submit({"n": number}, lane="many")[0].id for number in range(3)]
    single = jobs.submit({}, lane="one", max_queue=4)[0].id
    with pytest.raises(QueueFullError):
        jobs.submit({}, lane="late", inputs={"image": b"x"}, max_queue=4)
    assert not list((jobs.folder / "inputs").iterdir()), "inputs of rejected jobs are removed"
    assert jobs.take(lambda job: False) is None
    order = [job.id for _ in range(4) if (job := jobs.take()) is not None]
    assert order == [many[0], single, many[1], many[2]]


def test_jobs_of_busy_models_are_overtaken(jobs: JobStore) -> None:
    first, second = (jobs.submit({"model": "wan"})[0].id for _ in range(2))
    other, unnamed = jobs.submit({"model": "tiny"})[0].id, jobs.submit({})[0].id
    taken = jobs.take(busy_models=["other"])
    assert taken is not None
    assert taken.id == first
    order = [job.id for _ in range(3) if (job := jobs.take(busy_models=["wan"])) is not None]
    assert order == [other, unnamed]
    assert [job.id for job in jobs.list() if job.state == "queued"] == [second]


def test_pages_of_jobs_of_one_kind(jobs: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.0)  # jobs can be created at the same time
    videos = [jobs.submit({"kind": "video", "number": number}, owner="a")[0] for number in range(5)]
    jobs.submit({"prompt": "an image of version 0.1"}, owner="a")
    jobs.submit({"kind": "video"}, owner="b")
    newest = [job.id for job in reversed(videos)]

    def list_page(**options: Any) -> list[str]:
        return [job.id for job in jobs.page(kind="video", owner="a", **options)]

    assert list_page(limit=10) == newest
    assert list_page(limit=2) == newest[:2]
    assert list_page(limit=2, after=videos[3]) == newest[2:4]
    assert list_page(limit=2, after=videos[1], ascending=True) == [videos[2].id, videos[3].id]
    assert list_page(limit=2, after=videos[0]) == []


def test_inputs_are_stored_until_the_job_ends(jobs: JobStore) -> None:
    job, _ = jobs.submit({"image": "digest"}, inputs={"image": b"content"}, key="k")
    jobs.submit({"image": "digest"}, inputs={"image": b"content"}, key="k")
    assert [file.read_bytes() for file in jobs.list_inputs(job).values()] == [b"content"]
    assert len(list((jobs.folder / "inputs").iterdir())) == 1
    stale = "job_" + "0" * 32
    for name in (stale, "dataset"):
        (jobs.folder / "inputs" / name).mkdir()
    jobs.take()
    jobs.recover()
    names = {folder.name for folder in (jobs.folder / "inputs").iterdir()}
    assert names == {job.id, "dataset"}, "only folders with a job id are removed"
    (jobs.folder / "inputs" / "dataset").rmdir()
    jobs.take()
    jobs.fail(job.id, {})
    assert not list((jobs.folder / "inputs").iterdir())


def test_a_folder_is_used_by_one_service(jobs: JobStore) -> None:
    with pytest.raises(UsageError, match="another service"):
        JobStore(jobs.folder)
    jobs.close()
    JobStore(jobs.folder).close()


def test_a_damaged_database_or_one_of_another_version_is_not_changed(tmp_path: Path) -> None:
    file = tmp_path / "jobs.sqlite"
    file.write_bytes(b"not a database" * 1000)
    with pytest.raises(UsageError, match="cannot read"):
        JobStore(tmp_path)
    assert file.read_bytes().startswith(b"not a database")
    file.unlink()
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE jobs (id TEXT)")
    database.close()
    with pytest.raises(UsageError, match="has format version"):
        JobStore(tmp_path)


def test_a_queued_job_is_cancelled_immediately_and_a_running_one_later(jobs: JobStore) -> None:
    waiting, running = jobs.submit({})[0], jobs.submit({})[0]
    assert jobs.cancel(waiting.id).state == "cancelled"
    assert jobs.take() == jobs.get(running.id)
    cancelled = jobs.cancel(running.id)
    assert (cancelled.state, cancelled.cancelling) == ("running", True)
    with pytest.raises(UsageError, match="is still "):
        jobs.delete(running.id)
    assert jobs.stop(running.id).state == "cancelled"
    late = jobs.finish(running.id, [("0.png", b"x")], {})
    assert late.state == "cancelled"
    assert jobs.find_file(late, "0.png") is None


def test_a_running_job_is_retried_once_after_a_crash(tmp_path: Path) -> None:
    first = JobStore(tmp_path)
    name = first.submit({})[0].id
    first.take()
    for folder in (name, f".{name}"):
        (tmp_path / "results" / folder).mkdir()
    first.close()
    second = JobStore(tmp_path)
    assert [job.state for job in second.recover()] == ["queued"]
    assert [path.name for path in (tmp_path / "results").iterdir()] == [f".{name}"], "not a job id, so not removed"
    second.take()
    second.close()
    third = JobStore(tmp_path)
    assert [job.state for job in third.recover()] == ["failed"]
    job = third.get(name)
    assert job is not None
    assert job.state == "failed"
    assert job.error is not None
    assert job.error["code"] == "worker_died"
    assert job.error["message"] == "the worker or the service died twice while running this job"
    third.close()


def test_an_attempt_interrupted_by_a_normal_shutdown_does_not_count(jobs: JobStore) -> None:
    name, cancelled = jobs.submit({})[0].id, jobs.submit({})[0].id
    for _ in range(3):
        assert jobs.take() is not None
        [requeued] = jobs.requeue(count_attempt=False)
        assert (requeued.id, requeued.state, requeued.attempts, requeued.started) == (name, "queued", 0, None)
    jobs.take()
    jobs.requeue()
    jobs.take()
    jobs.take()
    jobs.cancel(cancelled)
    states = {job.id: (job.state, job.attempts) for job in jobs.requeue(count_attempt=False)}
    assert states == {name: ("queued", 1), cancelled: ("cancelled", 1)}, "an earlier crash still counts"


@pytest.mark.parametrize("failing", ["file", "database"])
def test_a_result_that_cannot_be_written_leaves_no_files(
    jobs: JobStore, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    job, _ = jobs.submit({})
    jobs.take()

    def write(path: Path, content: bytes) -> None:
        if failing == "file" and path.name == "1.png":
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(content)

    def fail(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("anyaccel.server.jobs.store.atomic_write", write)
    end = jobs._end
    monkeypatch.setattr(jobs, "_end", fail if failing == "database" else end)
    with pytest.raises((OSError, sqlite3.Error)):
        jobs.finish(job.id, [("0.png", b"x"), ("1.png", b"y")], {})
    assert not list((jobs.folder / "results").iterdir())
    monkeypatch.setattr(jobs, "_end", end)
    assert jobs.fail(job.id, {"code": "storage"}).state == "failed"


def test_results_expire_by_age_and_by_total_size(jobs: JobStore) -> None:
    names = []
    for number in range(4):
        names.append(jobs.submit({})[0].id)
        jobs.take()
        jobs.finish(names[-1], [("0.png", bytes(100))], {"number": number})
    assert jobs.expire(older_than_s=3600, max_bytes=250) == 2, "the size of the requests counts too"
    assert [jobs.get(name) is not None for name in names] == [False, False, True, True]
    assert jobs.expire(older_than_s=-1, max_bytes=10**9) == 2
    assert not list((jobs.folder / "results").iterdir())


@pytest.mark.parametrize(
    "name", ["", "job_", "../jobs.sqlite", "job_" + "g" * 32, "job_" + "0" * 32, "job_" + "0" * 33]
)
def test_an_invalid_or_unknown_id_is_no_job(jobs: JobStore, name: str) -> None:
    assert jobs.get(name) is None


WORKER = """
import sys, time, random
from pathlib import Path
from anyaccel.server.jobs.store import JobStore
jobs = JobStore(Path(sys.argv[1]))
jobs.recover()
rng = random.Random(int(sys.argv[2]))
while True:
    if rng.random() < 0.5:
        print(jobs.submit({"n": rng.random()})[0].id, flush=True)
    job = jobs.take()
    if job is not None:
        time.sleep(rng.random() * 0.004)
        jobs.finish(job.id, [("0.png", bytes(1000))], {})
        with open(sys.argv[1] + "/finished", "a") as log:
            log.write(job.id + "\\n")
"""


def test_kill_at_random_times_loses_no_job(tmp_path: Path) -> None:
    rng, accepted = random.Random(0), set[str]()
    for number in range(12):
        command = [sys.executable, "-c", WORKER, str(tmp_path), str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            accepted |= {process.stdout.readline().strip() for _ in range(rng.randrange(1, 5))}
            while number == 0 and not (tmp_path / "finished").exists():
                time.sleep(0.001)
            time.sleep(rng.random() * 0.05)
            os.kill(process.pid, signal.SIGKILL)
            accepted |= {line for line in process.stdout.read().split("\n") if len(line) == 36}
    jobs = JobStore(tmp_path)
    jobs.recover()
    while (job := jobs.take()) is not None:
        jobs.finish(job.id, [("0.png", bytes(1000))], {})
    ended = {job.id: job for job in jobs.list(limit=10**6)}
    assert accepted <= set(ended)
    assert all(job.state in ENDED for job in ended.values())
    finished = (tmp_path / "finished").read_text().split()
    assert len(finished) == len(set(finished)), "no job is finished twice"
    for job in ended.values():
        if job.state == "done":
            file = jobs.find_file(job, "0.png")
            assert file is not None
            assert file.stat().st_size == 1000
    assert len(accepted) > 12
    jobs.close()


def test_only_the_user_can_read_the_data(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    JobStore(folder).close()
    for name in ("results", "inputs", "jobs.sqlite"):
        assert not (folder / name).stat().st_mode & 0o077, f"{name} contains prompts"


def test_a_file_instead_of_a_folder_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.touch()
    with pytest.raises(UsageError, match="is a file"):
        JobStore(path)


def test_results_of_version_0_1_are_read(tmp_path: Path) -> None:
    """Version 0.1 stored the list of images under the key `pictures`."""
    image = {"width": 64, "height": 64, "seed": 7, "seconds": 1.5}
    store = JobStore(tmp_path)
    job, _ = store.submit({"seeds": [7], "output_format": "png"})
    store.take()
    store.finish(job.id, [("0.png", b"content")], {"images": [image]})
    store.close()
    database = sqlite3.connect(tmp_path / "jobs.sqlite")
    [[written]] = database.execute("SELECT result FROM jobs").fetchall()
    assert json.loads(written) == {"images": [image], "files": ["0.png"]}
    database.execute("UPDATE jobs SET result = ?", (json.dumps({"pictures": [image], "files": ["0.png"]}),))
    database.commit()
    database.close()
    store = JobStore(tmp_path)
    old = store.get(job.id)
    assert old is not None
    assert old.result == {"images": [image], "files": ["0.png"]}
    signer = Signer(b"secret")
    assert [shown["seed"] for shown in describe_job(old, signer)["images"]] == [7]
    response = describe_images(old, [b"content"], signer, as_url=False, base="")
    assert (response["size"], len(response["data"])) == ("64x64", 1)
    store.close()
