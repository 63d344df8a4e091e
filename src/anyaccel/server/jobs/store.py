"""Jobs: every accepted request, kept in SQLite before it is answered, so that none is lost and none is done twice.

A job is `queued`, then `running`, and ends as `done`, `failed` or `cancelled`. Whatever kills the process, the next one
finds each job in one of these states, and `recover` puts what was running back into the queue, once. A service that
stops in order puts it back itself, and such an attempt does not count.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from anyaccel.errors import UsageError
from anyaccel.storage.atomic_write import atomic_write
from anyaccel.storage.file_lock import lock_file

__all__ = ["ENDED", "Job", "JobStore", "KeyTakenError", "QueueFullError", "State"]

State: TypeAlias = Literal["queued", "running", "done", "failed", "cancelled"]
ENDED: tuple[State, ...] = ("done", "failed", "cancelled")
_ID = re.compile(r"job_[0-9a-f]{32}")
_VERSION = 1
_MOST_ATTEMPTS = 2
"""A job whose worker or service died is run once more."""
_DIED = {
    "code": "worker_died",
    "message": "the worker or the service ended twice while it ran this job",
    "status": 500,
}
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, lane TEXT NOT NULL, key TEXT, state TEXT NOT NULL, request TEXT NOT NULL,
    asked TEXT NOT NULL, created REAL NOT NULL, started REAL, ended REAL, attempts INTEGER NOT NULL DEFAULT 0,
    cancelling INTEGER NOT NULL DEFAULT 0, error TEXT, result TEXT, bytes INTEGER NOT NULL DEFAULT 0,
    UNIQUE (owner, key)
);
CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state, created);
"""


class QueueFullError(Exception):
    """As many jobs wait as may."""


class KeyTakenError(Exception):
    """The client's name for this request is that of another one."""


@dataclass(frozen=True)
class Job:
    """One request, and what became of it."""

    id: str
    owner: str
    """Who asked: a digest of the key, never the key."""
    lane: str
    """Whose turn it is when it is taken: of those that wait, the one comes next of whom the fewest are running."""
    key: str | None
    """What the client calls it: the same one again is the same job."""
    state: State
    request: dict[str, Any]
    asked: str
    """A digest of what the client sent, which tells one request from another."""
    created: float
    started: float | None
    ended: float | None
    attempts: int
    cancelling: bool
    """Whether it is to stop at the next step."""
    error: dict[str, Any] | None
    result: dict[str, Any] | None
    bytes: int
    """What its files take."""


class JobStore:
    """The jobs in one folder; one process writes there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file", hint="give a folder, which need not exist")
        for name in ("results", "inputs"):
            (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)  # pictures have their prompts in them
        self._lock = threading.RLock()
        self._claim = lock_file(
            folder / "lock", f"another service keeps its jobs in {folder}", "give each service a --data of its own"
        )
        try:
            self._base = _open(folder / "jobs.sqlite")
        except BaseException:
            self._claim.close()
            raise

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._base.close()
            self._claim.close()

    def submit(
        self,
        request: Mapping[str, Any],
        *,
        owner: str = "",
        lane: str = "",
        key: str | None = None,
        asked: str | None = None,
        inputs: Mapping[str, bytes] | None = None,
        max_queue: int | None = None,
    ) -> tuple[Job, bool]:
        """Keep a request, and the files that came with it; the job, and whether it is new.

        The same key again gives the same job, and is an error where what was asked is another: by the digest that is
        given, since a service adds what it draws itself, else by the request.
        """
        text = json.dumps(request, sort_keys=True)
        asked = asked or hashlib.sha256(text.encode()).hexdigest()
        name = f"job_{uuid.uuid4().hex}"
        try:
            for file, content in (inputs or {}).items():
                place = self._inputs_of(name)
                place.mkdir(exist_ok=True)
                atomic_write(place / file, content)
            with self._writing():
                found = self._find("owner = ? AND key = ?", owner, key) if key is not None else None
                if found is None and max_queue is not None and self.count("queued") >= max_queue:
                    raise QueueFullError
                if found is None:
                    self._base.execute(
                        "INSERT INTO jobs (id, owner, lane, key, state, request, asked, created) "
                        "VALUES (?, ?, ?, ?, 'queued', ?, ?, ?)",
                        (name, owner, lane or owner, key, text, asked, time.time()),
                    )
                    return self._get(name), True
                if found.asked != asked:
                    raise KeyTakenError
        except BaseException:
            shutil.rmtree(self._inputs_of(name), ignore_errors=True)
            raise
        shutil.rmtree(self._inputs_of(name), ignore_errors=True)
        return found, False

    def take(self, fits: Callable[[Job], bool] = lambda job: True) -> Job | None:
        """The job whose turn it is, which runs from now on; None where none waits, or that one does not fit now."""
        with self._writing():
            found = self._find(
                "state = 'queued' ORDER BY (SELECT COUNT(*) FROM jobs AS other WHERE other.state = 'running' "
                "AND other.lane = jobs.lane), created, rowid LIMIT 1"
            )
            if found is None or not fits(found):
                return None
            self._base.execute(
                "UPDATE jobs SET state = 'running', started = ?, attempts = attempts + 1 WHERE id = ?",
                (time.time(), found.id),
            )
            return self._get(found.id)

    def finish(self, name: str, files: Sequence[tuple[str, bytes]], result: Mapping[str, Any]) -> Job:
        """Keep the files of a job, and then its state: `recover` removes the files of a job that is not done."""
        folder = self._folder_of(name)
        with self._lock:
            job = self._get(name)
        if job.state != "running":  # cancelled meanwhile, or ended by another
            return job
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir()
            for file, content in files:
                atomic_write(folder / file, content)
            with self._writing():
                if self._get(name).state == "running":
                    size = sum(len(content) for _, content in files)
                    kept = json.dumps({**result, "files": [file for file, _ in files]})
                    self._end(name, "done", result=kept, size=size)
                job = self._get(name)
        except BaseException:  # a full disk, say: no job counts these files, and only the next start would remove them
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if job.state != "done":
            shutil.rmtree(folder, ignore_errors=True)
        return job

    def fail(self, name: str, error: Mapping[str, Any]) -> Job:
        """A job ended by an error."""
        with self._writing():
            if self._get(name).state not in ENDED:
                self._end(name, "failed", error=json.dumps(error))
            return self._get(name)

    def cancel(self, name: str) -> Job:
        """One that waits ends at once, one that runs is told to; one that ended stays as it is."""
        with self._writing():
            job = self._get(name)
            if job.state == "queued":
                self._end(name, "cancelled")
            elif job.state == "running":
                self._base.execute("UPDATE jobs SET cancelling = 1 WHERE id = ?", (name,))
            return self._get(name)

    def stop(self, name: str) -> Job:
        """A job that was told to stop did."""
        with self._writing():
            if self._get(name).state == "running":
                self._end(name, "cancelled")
            return self._get(name)

    def delete(self, name: str) -> None:
        """Forget a job that ended, and its files."""
        with self._writing():
            if self._get(name).state not in ENDED:
                raise UsageError(f"{name} has not ended", hint="cancel it first")
            self._base.execute("DELETE FROM jobs WHERE id = ?", (name,))
        shutil.rmtree(self._folder_of(name), ignore_errors=True)

    def requeue(self, *, count_attempt: bool = True) -> list[Job]:
        """Put running jobs back into the queue, or end those that ran as often as they may; return them.

        Without `count_attempt`, for a service that stops in order, they wait as if they had not been taken.
        """
        with self._writing():
            names = [row["id"] for row in self._base.execute("SELECT id FROM jobs WHERE state = 'running'")]
            for name in names:
                job = self._get(name)
                if job.cancelling:
                    self._end(name, "cancelled")
                elif count_attempt and job.attempts >= _MOST_ATTEMPTS:
                    self._end(name, "failed", error=json.dumps(_DIED))
                else:
                    self._base.execute(
                        "UPDATE jobs SET state = 'queued', started = NULL, attempts = ? WHERE id = ?",
                        (job.attempts if count_attempt else job.attempts - 1, name),
                    )
            return [self._get(name) for name in names]

    def recover(self) -> list[Job]:
        """After a start: what was running is put back, and files that belong to no job are removed."""
        again = self.requeue()
        with self._lock:
            rows = self._base.execute("SELECT id, state FROM jobs").fetchall()
        for folder, known in (
            ("results", {row["id"] for row in rows if row["state"] == "done"}),
            ("inputs", {row["id"] for row in rows if row["state"] not in ENDED}),
        ):
            for place in (self.folder / folder).iterdir():
                ours = _ID.fullmatch(place.name)  # whatever else lies there is somebody's
                if ours and place.name not in known:
                    shutil.rmtree(place, ignore_errors=True)
        return again

    def overdue(self, since: float) -> list[Job]:
        """Jobs that were accepted before a time and have not ended."""
        with self._lock:
            rows = self._base.execute(
                "SELECT * FROM jobs WHERE state IN ('queued', 'running') AND created < ?", (since,)
            ).fetchall()
        return [_read(row) for row in rows]

    def expire(self, *, older_than_s: float, most_bytes: int) -> int:
        """Forget what ended long ago, and the oldest results beyond a size; how many jobs."""
        now = time.time()
        with self._lock:
            rows = self._base.execute(
                "SELECT id, ended, bytes FROM jobs WHERE state IN ('done', 'failed', 'cancelled') ORDER BY ended DESC"
            ).fetchall()
        held, gone = 0, []
        for row in rows:
            held += row["bytes"]
            if now - row["ended"] > older_than_s or held > most_bytes:
                gone.append(row["id"])
        for name in gone:
            if self.get(name) is not None:  # its owner may have been quicker
                self.delete(name)
        return len(gone)

    def get(self, name: str, *, owner: str | None = None) -> Job | None:
        """A job by its name; None where there is none, or it is another's."""
        if not _ID.fullmatch(name):
            return None
        with self._lock:
            found = self._find("id = ?", name)
        return found if found is not None and owner in (None, found.owner) else None

    def list(self, *, owner: str | None = None, most: int = 100, before: Job | None = None) -> list[Job]:
        """The newest jobs, or the newest of those that came before one."""
        latest = None if before is None else before.created
        with self._lock:
            rows = self._base.execute(
                "SELECT * FROM jobs WHERE (? IS NULL OR owner = ?) AND (? IS NULL OR created < ?) "
                "ORDER BY created DESC, rowid DESC LIMIT ?",
                (owner, owner, latest, latest, most),
            ).fetchall()
        return [_read(row) for row in rows]

    def count_before(self, job: Job) -> int:
        """How many wait that came before one."""
        with self._lock:
            rows = self._base.execute(
                "SELECT COUNT(*) FROM jobs WHERE state = 'queued' AND created < ?", (job.created,)
            )
            return int(rows.fetchone()[0])

    def count(self, state: State) -> int:
        """How many jobs are in a state."""
        with self._lock:
            return int(self._base.execute("SELECT COUNT(*) FROM jobs WHERE state = ?", (state,)).fetchone()[0])

    def find_file(self, job: Job, file: str) -> Path | None:
        """A file of a job that is done, by its name alone."""
        known = (job.result or {}).get("files", [])
        return self._folder_of(job.id) / file if job.state == "done" and file in known else None

    def list_inputs(self, job: Job) -> dict[str, Path]:
        """The files that came with a job, by their names."""
        place = self._inputs_of(job.id)
        return {file.name: file for file in sorted(place.iterdir())} if place.is_dir() else {}

    def _inputs_of(self, name: str) -> Path:
        return self.folder / "inputs" / name

    def _folder_of(self, name: str) -> Path:
        if not _ID.fullmatch(name):
            raise UsageError(f"{name!r:.60} is no job", hint="job_ and 32 digits")
        return self.folder / "results" / name

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One change, whole or not at all."""
        with self._lock:
            self._base.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._base.execute("ROLLBACK")
                raise
            self._base.execute("COMMIT")

    def _end(
        self, name: str, state: State, *, error: str | None = None, result: str | None = None, size: int = 0
    ) -> None:
        self._base.execute(
            "UPDATE jobs SET state = ?, ended = ?, error = ?, result = ?, bytes = ? + length(request) WHERE id = ?",
            (state, time.time(), error, result, size, name),
        )
        shutil.rmtree(self._inputs_of(name), ignore_errors=True)

    def _find(self, where: str, *values: Any) -> Job | None:
        row = self._base.execute(f"SELECT * FROM jobs WHERE {where}", values).fetchone()
        return None if row is None else _read(row)

    def _get(self, name: str) -> Job:
        found = self._find("id = ?", name)
        if found is None:
            raise UsageError(f"there is no job {name!r:.60}", hint="it may have expired")
        return found


def _open(file: Path) -> sqlite3.Connection:
    """The jobs' file, made where there is none; one that is damaged or of another version is left as it is."""
    file.touch(mode=0o600)  # it has prompts in it
    base = sqlite3.connect(file, check_same_thread=False, isolation_level=None, timeout=30)
    try:
        base.row_factory = sqlite3.Row
        base.execute("PRAGMA journal_mode=WAL")
        base.execute("PRAGMA synchronous=FULL")
        version, tables = (
            base.execute(question).fetchone()[0]
            for question in ("PRAGMA user_version", "SELECT COUNT(*) FROM sqlite_master")
        )
        if tables and version != _VERSION:
            raise UsageError(
                f"{file} was written by another version of anyaccel", hint="give another --data, or move it away"
            )
        base.executescript(_SCHEMA)
        base.execute(f"PRAGMA user_version = {_VERSION}")
    except sqlite3.DatabaseError as error:
        base.close()
        raise UsageError(
            f"{file} cannot be read: {error}", hint="give another --data, or move it away: the pictures are beside it"
        ) from error
    except UsageError:
        base.close()
        raise
    return base


def _read(row: sqlite3.Row) -> Job:
    kept = dict(row)
    for name in ("request", "error", "result"):
        kept[name] = None if kept[name] is None else json.loads(kept[name])
    kept["cancelling"] = bool(kept["cancelling"])
    return Job(**kept)
