"""SQLite store for jobs and their files.

Each request is committed before the response is sent, so an accepted job survives a crash. A job is
`queued`, then `running`, and ends as `done`, `failed` or `cancelled`. After a crash, `recover`
requeues the jobs that were running; a job that is interrupted a second time fails. A service that
shuts down normally requeues its running jobs itself, and the interrupted attempts do not count
toward the attempt limit.
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from anyaccel.errors import UsageError
from anyaccel.server.jobs.database import open_database
from anyaccel.storage.atomic_write import atomic_write
from anyaccel.storage.file_lock import lock_file

__all__ = ["ENDED", "Job", "JobStore", "KeyTakenError", "QueueFullError", "State"]

State: TypeAlias = Literal["queued", "running", "done", "failed", "cancelled"]
ENDED: tuple[State, ...] = ("done", "failed", "cancelled")
_ID = re.compile(r"job_[0-9a-f]{32}")
# A job runs again once if its worker or the service dies. A second death fails it: the job may be the cause.
_MAX_ATTEMPTS = 2
_DIED = {
    "code": "worker_died",
    "message": "the worker or the service died twice while running this job",
    "status": 500,
}


class QueueFullError(Exception):
    """Error raised when the queue already contains `max_queue` jobs."""


class KeyTakenError(Exception):
    """Error raised when an idempotency key was already used for a different request."""


@dataclass(frozen=True)
class Job:
    """An accepted request with its state, timestamps and result or error."""

    id: str
    owner: str
    """Digest of the client's API key, never the key."""
    lane: str
    """Group for fair queueing: the next job comes from the lane with the fewest running jobs."""
    key: str | None
    """Idempotency key: a request with the same key is the same job."""
    state: State
    request: dict[str, Any]
    request_digest: str
    """Digest of the request as sent by the client, to detect a reused idempotency key."""
    created: float
    started: float | None
    ended: float | None
    attempts: int
    cancelling: bool
    """Whether cancellation was requested while the job was running."""
    error: dict[str, Any] | None
    result: dict[str, Any] | None
    bytes: int
    """Size of the result files and the request."""


class JobStore:
    """Job database and job files in one folder, which only one process can open at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if folder.exists() and not folder.is_dir():
            hint = "pass a folder to --data; it is created if it does not exist"
            raise UsageError(f"{folder} is a file, not a folder", hint=hint)
        for name in ("results", "inputs"):
            try:
                (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)  # images have prompts in their metadata
            except OSError as error:
                hint = "pass a writable folder to --data"
                raise UsageError(f"cannot create {folder / name}: {error.strerror}", hint=hint) from error
        self._lock = threading.RLock()
        self._file_lock = lock_file(
            folder / "lock", f"another service is using {folder}", "give each service its own --data folder"
        )
        try:
            self._database = open_database(folder / "jobs.sqlite")
        except BaseException:
            self._file_lock.close()
            raise

    def close(self) -> None:
        """Close the database and release the lock on the folder."""
        with self._lock:
            self._database.close()
            self._file_lock.close()

    def submit(
        self,
        request: Mapping[str, Any],
        *,
        owner: str = "",
        lane: str = "",
        key: str | None = None,
        request_digest: str | None = None,
        inputs: Mapping[str, bytes] | None = None,
        max_queue: int | None = None,
    ) -> tuple[Job, bool]:
        """Store a request and its input files; return the job and whether it is new.

        If the idempotency key `key` was used before, the existing job is returned, or `KeyTakenError` is
        raised if the request is different. Requests are compared by `request_digest`, which defaults to the
        digest of `request`. The service passes the digest of the body as sent by the client, because
        `request` contains added values such as a random seed. Raises `QueueFullError` if `max_queue` jobs
        are already queued.
        """
        text = json.dumps(request, sort_keys=True)
        request_digest = request_digest or hashlib.sha256(text.encode()).hexdigest()
        job_id = f"job_{uuid.uuid4().hex}"
        try:
            # Files before the row: a job in the database always has its inputs. `recover` removes orphaned files.
            for file, content in (inputs or {}).items():
                folder = self._inputs_of(job_id)
                folder.mkdir(exist_ok=True)
                atomic_write(folder / file, content)
            with self._writing():
                existing = self._find("owner = ? AND key = ?", owner, key) if key is not None else None
                if existing is None and max_queue is not None and self.count("queued") >= max_queue:
                    raise QueueFullError
                if existing is None:
                    self._database.execute(
                        "INSERT INTO jobs (id, owner, lane, key, state, request, asked, created) "
                        "VALUES (?, ?, ?, ?, 'queued', ?, ?, ?)",
                        (job_id, owner, lane or owner, key, text, request_digest, time.time()),
                    )
                    return self._get(job_id), True
                if existing.request_digest != request_digest:
                    raise KeyTakenError
        except BaseException:
            shutil.rmtree(self._inputs_of(job_id), ignore_errors=True)
            raise
        shutil.rmtree(self._inputs_of(job_id), ignore_errors=True)
        return existing, False

    def take(self, fits: Callable[[Job], bool] = lambda job: True, busy_models: Collection[str] = ()) -> Job | None:
        """Mark the next queued job as running and return it.

        Returns None if the queue is empty or `fits` returns false for the next job. Jobs for the models in
        `busy_models` stay in the queue, and others overtake them.
        """
        with self._writing():
            # If the first job does not fit, none is taken: smaller jobs would overtake a large one forever.
            job = self._find(
                "state = 'queued' AND COALESCE(json_extract(request, '$.model'), '') NOT IN "
                "(SELECT value FROM json_each(?)) ORDER BY (SELECT COUNT(*) FROM jobs AS other "
                "WHERE other.state = 'running' AND other.lane = jobs.lane), created, rowid LIMIT 1",
                json.dumps(list(busy_models)),
            )
            if job is None or not fits(job):
                return None
            self._database.execute(
                "UPDATE jobs SET state = 'running', started = ?, attempts = attempts + 1 WHERE id = ?",
                (time.time(), job.id),
            )
            return self._get(job.id)

    def finish(self, job_id: str, files: Sequence[tuple[str, bytes]], result: Mapping[str, Any]) -> Job:
        """Store a running job's result files and mark it as done; do nothing if it is no longer running."""
        folder = self._folder_of(job_id)
        with self._lock:
            job = self._get(job_id)
        if job.state != "running":  # cancelled or failed in the meantime
            return job
        # Files first, then the state: `recover` removes the files of a job that is not done.
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir()
            for file, content in files:
                atomic_write(folder / file, content)
            with self._writing():
                if self._get(job_id).state == "running":
                    size = sum(len(content) for _, content in files)
                    result_json = json.dumps({**result, "files": [file for file, _ in files]})
                    self._end(job_id, "done", result=result_json, size=size)
                job = self._get(job_id)
        except BaseException:  # for example a full disk: only the next start would remove the files
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if job.state != "done":
            shutil.rmtree(folder, ignore_errors=True)
        return job

    def fail(self, job_id: str, error: Mapping[str, Any]) -> Job:
        """Mark a job as failed; do nothing if it has already ended."""
        with self._writing():
            if self._get(job_id).state not in ENDED:
                self._end(job_id, "failed", error=json.dumps(error))
            return self._get(job_id)

    def cancel(self, job_id: str) -> Job:
        """Cancel a queued job, or mark a running one for cancellation; do nothing if the job has ended."""
        with self._writing():
            job = self._get(job_id)
            if job.state == "queued":
                self._end(job_id, "cancelled")
            elif job.state == "running":
                self._database.execute("UPDATE jobs SET cancelling = 1 WHERE id = ?", (job_id,))
            return self._get(job_id)

    def stop(self, job_id: str) -> Job:
        """Mark a running job as cancelled after the worker has stopped it."""
        with self._writing():
            if self._get(job_id).state == "running":
                self._end(job_id, "cancelled")
            return self._get(job_id)

    def delete(self, job_id: str) -> None:
        """Delete a job and its files; raise `UsageError` if the job has not ended."""
        with self._writing():
            state = self._get(job_id).state
            if state not in ENDED:
                raise UsageError(
                    f"{job_id} is still {state}", hint=f"cancel it first with POST /v1/jobs/{job_id}/cancel"
                )
            self._database.execute("DELETE FROM jobs WHERE id = ?", (job_id,))
        shutil.rmtree(self._folder_of(job_id), ignore_errors=True)

    def requeue(self, *, count_attempt: bool = True) -> list[Job]:
        """Requeue running jobs; fail those with no attempts left and cancel those marked for cancellation.

        Returns all jobs that were running. With `count_attempt=False`, which is for a normal shutdown, the
        interrupted attempt does not count toward the attempt limit.
        """
        with self._writing():
            job_ids = [row["id"] for row in self._database.execute("SELECT id FROM jobs WHERE state = 'running'")]
            for job_id in job_ids:
                job = self._get(job_id)
                if job.cancelling:
                    self._end(job_id, "cancelled")
                elif count_attempt and job.attempts >= _MAX_ATTEMPTS:
                    self._end(job_id, "failed", error=json.dumps(_DIED))
                else:
                    self._database.execute(
                        "UPDATE jobs SET state = 'queued', started = NULL, attempts = ? WHERE id = ?",
                        (job.attempts if count_attempt else job.attempts - 1, job_id),
                    )
            return [self._get(job_id) for job_id in job_ids]

    def recover(self) -> list[Job]:
        """Requeue the jobs that a killed process left running, and remove orphaned files.

        Returns all jobs that were running, including those that have failed or were cancelled instead.
        """
        requeued = self.requeue()
        with self._lock:
            rows = self._database.execute("SELECT id, state FROM jobs").fetchall()
        for folder, valid_ids in (
            ("results", {row["id"] for row in rows if row["state"] == "done"}),
            ("inputs", {row["id"] for row in rows if row["state"] not in ENDED}),
        ):
            for path in (self.folder / folder).iterdir():
                is_job = _ID.fullmatch(path.name)  # never delete the user's own files in --data
                if is_job and path.name not in valid_ids:
                    shutil.rmtree(path, ignore_errors=True)
        return requeued

    def overdue(self, since: float) -> list[Job]:
        """Return the jobs that have not ended and were accepted before `since`, a Unix timestamp."""
        with self._lock:
            rows = self._database.execute(
                "SELECT * FROM jobs WHERE state IN ('queued', 'running') AND created < ?", (since,)
            ).fetchall()
        return [_read_job(row) for row in rows]

    def expire(self, *, older_than_s: float, max_bytes: int) -> int:
        """Delete expired jobs and return the number of deleted jobs.

        An ended job expires after `older_than_s` seconds, or when the total size of this job and all newer ended
        jobs exceeds `max_bytes`.
        """
        now = time.time()
        with self._lock:
            rows = self._database.execute(
                "SELECT id, ended, bytes FROM jobs WHERE state IN ('done', 'failed', 'cancelled') ORDER BY ended DESC"
            ).fetchall()
        total_bytes, expired = 0, []
        for row in rows:
            total_bytes += row["bytes"]
            if now - row["ended"] > older_than_s or total_bytes > max_bytes:
                expired.append(row["id"])
        for job_id in expired:
            if self.get(job_id) is not None:  # a client may have deleted it in the meantime
                self.delete(job_id)
        return len(expired)

    def get(self, job_id: str, *, owner: str | None = None) -> Job | None:
        """Return a job, or None if it does not exist or belongs to another owner."""
        if not _ID.fullmatch(job_id):
            return None
        with self._lock:
            job = self._find("id = ?", job_id)
        return job if job is not None and owner in (None, job.owner) else None

    def page(
        self, *, kind: str, owner: str, limit: int, after: Job | None = None, ascending: bool = False
    ) -> list[Job]:
        """Return up to `limit` jobs of one kind; with `after`, only those that follow that job in the order."""
        direction, comparison = ("ASC", ">") if ascending else ("DESC", "<")
        where, values = "owner = ? AND json_extract(request, '$.kind') = ?", [owner, kind]
        if after is not None:
            # Jobs may have been created at the same time.
            where += f" AND (created, rowid) {comparison} (SELECT created, rowid FROM jobs WHERE id = ?)"
            values.append(after.id)
        query = f"SELECT * FROM jobs WHERE {where} ORDER BY created {direction}, rowid {direction} LIMIT ?"
        with self._lock:
            rows = self._database.execute(query, (*values, limit)).fetchall()
        return [_read_job(row) for row in rows]

    def list(self, *, owner: str | None = None, limit: int = 100, before: Job | None = None) -> list[Job]:
        """Return up to `limit` jobs, newest first; with `before`, only those older than that job."""
        latest = None if before is None else before.created
        with self._lock:
            rows = self._database.execute(
                "SELECT * FROM jobs WHERE (? IS NULL OR owner = ?) AND (? IS NULL OR created < ?) "
                "ORDER BY created DESC, rowid DESC LIMIT ?",
                (owner, owner, latest, latest, limit),
            ).fetchall()
        return [_read_job(row) for row in rows]

    def count_before(self, job: Job) -> int:
        """Return the number of queued jobs that are older than `job`."""
        with self._lock:
            rows = self._database.execute(
                "SELECT COUNT(*) FROM jobs WHERE state = 'queued' AND created < ?", (job.created,)
            )
            return int(rows.fetchone()[0])

    def count(self, state: State) -> int:
        """Return the number of jobs in the given state."""
        with self._lock:
            return int(self._database.execute("SELECT COUNT(*) FROM jobs WHERE state = ?", (state,)).fetchone()[0])

    def find_file(self, job: Job, file: str) -> Path | None:
        """Return the path of a finished job's result file, or None if the job has no file with that name."""
        files = (job.result or {}).get("files", [])
        return self._folder_of(job.id) / file if job.state == "done" and file in files else None

    def list_inputs(self, job: Job) -> dict[str, Path]:
        """Return the paths of a job's input files, keyed by name."""
        folder = self._inputs_of(job.id)
        return {file.name: file for file in sorted(folder.iterdir())} if folder.is_dir() else {}

    def _inputs_of(self, job_id: str) -> Path:
        return self.folder / "inputs" / job_id

    def _folder_of(self, job_id: str) -> Path:
        if not _ID.fullmatch(job_id):
            raise UsageError(
                f"invalid job id {job_id!r:.60}", hint="a job id is `job_` followed by 32 hexadecimal digits"
            )
        return self.folder / "results" / job_id

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Run the body of the `with` block as one database transaction."""
        with self._lock:
            # IMMEDIATE acquires the write lock now. A deferred transaction acquires it at its first write, where it can
            # fail with SQLITE_BUSY after it has read: https://www.sqlite.org/lang_transaction.html
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    def _end(
        self, job_id: str, state: State, *, error: str | None = None, result: str | None = None, size: int = 0
    ) -> None:
        self._database.execute(
            "UPDATE jobs SET state = ?, ended = ?, error = ?, result = ?, bytes = ? + length(request) WHERE id = ?",
            (state, time.time(), error, result, size, job_id),
        )
        shutil.rmtree(self._inputs_of(job_id), ignore_errors=True)

    def _find(self, where: str, *values: Any) -> Job | None:
        row = self._database.execute(f"SELECT * FROM jobs WHERE {where}", values).fetchone()
        return None if row is None else _read_job(row)

    def _get(self, job_id: str) -> Job:
        job = self._find("id = ?", job_id)
        if job is None:
            raise UsageError(
                f"unknown job {job_id!r:.60}", hint="list the jobs with GET /v1/jobs; the job may have expired"
            )
        return job


def _read_job(row: sqlite3.Row) -> Job:
    values = dict(row)
    for column in ("request", "error", "result"):
        values[column] = None if values[column] is None else json.loads(values[column])
    values["cancelling"] = bool(values["cancelling"])
    values["request_digest"] = values.pop("asked")
    result = values["result"]
    if result is not None and "pictures" in result:  # written by version 0.1
        result["images"] = result.pop("pictures")
    return Job(**values)
