"""Jobs: none lost, none twice, whatever kills the process."""

import errno
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from anyaccel.errors import UsageError
from anyaccel.server.jobs.store import ENDED, JobStore, KeyTakenError, QueueFullError


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[JobStore]:
    found = JobStore(tmp_path)
    yield found
    found.close()


def test_the_life_of_a_job(jobs: JobStore) -> None:
    job, new = jobs.submit({"prompt": "a cat"})
    assert (job.state, new, jobs.count("queued")) == ("queued", True, 1)
    taken = jobs.take()
    assert taken is not None
    assert (taken.id, taken.state, taken.attempts) == (job.id, "running", 1)
    assert jobs.take() is None
    done = jobs.finish(job.id, [("0.png", b"picture")], {"seed": 7})
    assert (done.state, done.result) == ("done", {"seed": 7, "files": ["0.png"]})
    assert done.bytes == 7 + len('{"prompt": "a cat"}'), "what a job takes on the disk, its request too"
    file = jobs.find_file(done, "0.png")
    assert file is not None
    assert file.read_bytes() == b"picture"
    assert jobs.find_file(done, "../../jobs.sqlite") is None
    assert jobs.fail(job.id, {}).state == "done", "what ended stays"
    jobs.delete(job.id)
    assert jobs.get(job.id) is None
    assert not file.exists()


def test_the_oldest_first_and_a_key_once(jobs: JobStore) -> None:
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


def test_the_queue_has_an_end_and_turns_are_fair(jobs: JobStore) -> None:
    many = [jobs.submit({"n": number}, lane="many")[0].id for number in range(3)]
    one = jobs.submit({}, lane="one", max_queue=4)[0].id
    with pytest.raises(QueueFullError):
        jobs.submit({}, lane="late", inputs={"image": b"x"}, max_queue=4)
    assert not list((jobs.folder / "inputs").iterdir()), "nothing is held of what was not accepted"
    assert jobs.take(lambda job: False) is None
    order = [job.id for _ in range(4) if (job := jobs.take()) is not None]
    assert order == [many[0], one, many[1], many[2]]


def test_what_came_with_a_job_stays_until_it_ended(jobs: JobStore) -> None:
    job, _ = jobs.submit({"image": "digest"}, inputs={"image": b"picture"}, key="k")
    jobs.submit({"image": "digest"}, inputs={"image": b"picture"}, key="k")
    assert [file.read_bytes() for file in jobs.list_inputs(job).values()] == [b"picture"]
    assert len(list((jobs.folder / "inputs").iterdir())) == 1
    left = "job_" + "0" * 32
    for name in (left, "dataset"):
        (jobs.folder / "inputs" / name).mkdir()
    jobs.take()
    jobs.recover()
    found = {folder.name for folder in (jobs.folder / "inputs").iterdir()}
    assert found == {job.id, "dataset"}, "what is not a job's is somebody else's"
    (jobs.folder / "inputs" / "dataset").rmdir()
    jobs.take()
    jobs.fail(job.id, {})
    assert not list((jobs.folder / "inputs").iterdir())


def test_one_service_a_folder(jobs: JobStore) -> None:
    with pytest.raises(UsageError, match="another service"):
        JobStore(jobs.folder)
    jobs.close()
    JobStore(jobs.folder).close()


def test_a_file_that_is_damaged_or_of_another_version_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "jobs.sqlite"
    file.write_bytes(b"no database" * 1000)
    with pytest.raises(UsageError, match="cannot be read"):
        JobStore(tmp_path)
    assert file.read_bytes().startswith(b"no database")
    file.unlink()
    with sqlite3.connect(file) as base:
        base.execute("CREATE TABLE jobs (id TEXT)")
    base.close()
    with pytest.raises(UsageError, match="another version"):
        JobStore(tmp_path)


def test_cancelling(jobs: JobStore) -> None:
    waiting, running = jobs.submit({})[0], jobs.submit({})[0]
    assert jobs.cancel(waiting.id).state == "cancelled"
    assert jobs.take() == jobs.get(running.id)
    asked = jobs.cancel(running.id)
    assert (asked.state, asked.cancelling) == ("running", True)
    with pytest.raises(UsageError, match="has not ended"):
        jobs.delete(running.id)
    assert jobs.stop(running.id).state == "cancelled"
    late = jobs.finish(running.id, [("0.png", b"x")], {})
    assert late.state == "cancelled"
    assert jobs.find_file(late, "0.png") is None


def test_what_was_running_runs_once_more(tmp_path: Path) -> None:
    first = JobStore(tmp_path)
    name = first.submit({})[0].id
    first.take()
    for left in (name, f".{name}"):
        (tmp_path / "results" / left).mkdir()
    first.close()
    second = JobStore(tmp_path)
    assert [job.state for job in second.recover()] == ["queued"]
    assert [place.name for place in (tmp_path / "results").iterdir()] == [f".{name}"], "only a job's own name is ours"
    second.take()
    second.close()
    third = JobStore(tmp_path)
    assert [job.state for job in third.recover()] == ["failed"]
    job = third.get(name)
    assert job is not None
    assert job.state == "failed"
    assert job.error is not None
    assert job.error["code"] == "worker_died"
    assert job.error["message"] == "the worker or the service ended twice while it ran this job"
    third.close()


def test_an_attempt_that_an_orderly_stop_ended_does_not_count(jobs: JobStore) -> None:
    name, cancelled = jobs.submit({})[0].id, jobs.submit({})[0].id
    for _ in range(3):
        assert jobs.take() is not None
        [again] = jobs.requeue(count_attempt=False)
        assert (again.id, again.state, again.attempts, again.started) == (name, "queued", 0, None)
    jobs.take()
    jobs.requeue()
    jobs.take()
    jobs.take()
    jobs.cancel(cancelled)
    states = {job.id: (job.state, job.attempts) for job in jobs.requeue(count_attempt=False)}
    assert states == {name: ("queued", 1), cancelled: ("cancelled", 1)}, "an earlier death still counts"


@pytest.mark.parametrize("broken", ["file", "table"])
def test_a_result_that_cannot_be_written_leaves_no_files(
    jobs: JobStore, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    job, _ = jobs.submit({})
    jobs.take()

    def write(path: Path, content: bytes) -> None:
        if broken == "file" and path.name == "1.png":
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(content)

    def refuse(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("anyaccel.server.jobs.store.atomic_write", write)
    end = jobs._end
    monkeypatch.setattr(jobs, "_end", refuse if broken == "table" else end)
    with pytest.raises((OSError, sqlite3.Error)):
        jobs.finish(job.id, [("0.png", b"x"), ("1.png", b"y")], {})
    assert not list((jobs.folder / "results").iterdir())
    monkeypatch.setattr(jobs, "_end", end)
    assert jobs.fail(job.id, {"code": "storage"}).state == "failed"


def test_results_expire_by_age_and_size(jobs: JobStore) -> None:
    names = []
    for number in range(4):
        names.append(jobs.submit({})[0].id)
        jobs.take()
        jobs.finish(names[-1], [("0.png", bytes(100))], {"number": number})
    assert jobs.expire(older_than_s=3600, most_bytes=250) == 2, "a request counts too"
    assert [jobs.get(name) is not None for name in names] == [False, False, True, True]
    assert jobs.expire(older_than_s=-1, most_bytes=10**9) == 2
    assert not list((jobs.folder / "results").iterdir())


@pytest.mark.parametrize(
    "name", ["", "job_", "../jobs.sqlite", "job_" + "g" * 32, "job_" + "0" * 32, "job_" + "0" * 33]
)
def test_names_that_are_no_jobs(jobs: JobStore, name: str) -> None:
    assert jobs.get(name) is None


WORK = """
import sys, time, random
from pathlib import Path
from anyaccel.server.jobs.store import Jobs
jobs = Jobs(Path(sys.argv[1]))
jobs.recover()
chance = random.Random(int(sys.argv[2]))
while True:
    if chance.random() < 0.5:
        print(jobs.submit({"n": chance.random()})[0].id, flush=True)
    job = jobs.take()
    if job is not None:
        time.sleep(chance.random() * 0.004)
        jobs.finish(job.id, [("0.png", bytes(1000))], {})
        with open(sys.argv[1] + "/finished", "a") as log:
            log.write(job.id + "\\n")
"""


def test_kills_at_any_moment_lose_nothing(tmp_path: Path) -> None:
    chance, accepted = random.Random(0), set[str]()
    for number in range(12):
        command = [sys.executable, "-c", WORK, str(tmp_path), str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            accepted |= {process.stdout.readline().strip() for _ in range(chance.randrange(1, 5))}
            while number == 0 and not (tmp_path / "finished").exists():
                time.sleep(0.001)
            time.sleep(chance.random() * 0.05)
            os.kill(process.pid, signal.SIGKILL)
            accepted |= {line for line in process.stdout.read().split("\n") if len(line) == 36}
    jobs = JobStore(tmp_path)
    jobs.recover()
    while (job := jobs.take()) is not None:
        jobs.finish(job.id, [("0.png", bytes(1000))], {})
    ended = {job.id: job for job in jobs.list(most=10**6)}
    assert accepted <= set(ended)
    assert all(job.state in ENDED for job in ended.values())
    finished = (tmp_path / "finished").read_text().split()
    assert len(finished) == len(set(finished)), "none twice"
    for job in ended.values():
        if job.state == "done":
            file = jobs.find_file(job, "0.png")
            assert file is not None
            assert file.stat().st_size == 1000
    assert len(accepted) > 12
    jobs.close()


def test_nobody_else_reads_what_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    JobStore(folder).close()
    for name in ("results", "inputs", "jobs.sqlite"):
        assert not (folder / name).stat().st_mode & 0o077, f"{name} has prompts in it"


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    place = tmp_path / "data"
    place.touch()
    with pytest.raises(UsageError, match="is a file"):
        JobStore(place)
