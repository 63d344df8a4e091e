"""The SQLite database of the job store: its schema and version."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from anyaccel.errors import UsageError

__all__ = ["open_database"]

_VERSION = 1
# Databases of version 0.1 use the same schema, so the columns keep their names. `asked` is `Job.request_digest`;
# `bytes` is the size of the result files and the request.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, lane TEXT NOT NULL, key TEXT, state TEXT NOT NULL, request TEXT NOT NULL,
    asked TEXT NOT NULL, created REAL NOT NULL, started REAL, ended REAL, attempts INTEGER NOT NULL DEFAULT 0,
    cancelling INTEGER NOT NULL DEFAULT 0, error TEXT, result TEXT, bytes INTEGER NOT NULL DEFAULT 0,
    UNIQUE (owner, key)
);
CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state, created);
"""


def open_database(file: Path) -> sqlite3.Connection:
    """Open or create the job database.

    Raises `UsageError`, without changing the file, if it is corrupted or was written by another
    version.
    """
    file.touch(mode=0o600)  # prompts are private
    database = sqlite3.connect(file, check_same_thread=False, isolation_level=None, timeout=30)
    try:
        database.row_factory = sqlite3.Row
        database.execute("PRAGMA journal_mode=WAL")
        # FULL, because WAL's usual NORMAL can lose the last commits in a power failure, and those jobs were accepted.
        database.execute("PRAGMA synchronous=FULL")
        version, tables = (
            database.execute(query).fetchone()[0]
            for query in ("PRAGMA user_version", "SELECT COUNT(*) FROM sqlite_master")
        )
        if tables and version != _VERSION:
            raise UsageError(
                f"{file} has format version {version}, but this version of anyaccel supports only {_VERSION}",
                hint="pass a different folder to --data, or move the file to another folder",
            )
        database.executescript(_SCHEMA)
        database.execute(f"PRAGMA user_version = {_VERSION}")
    except sqlite3.DatabaseError as error:
        database.close()
        raise UsageError(
            f"cannot read {file}: {error}",
            hint="pass a different folder to --data, or move the file; the images are in the folder `results` next "
            "to it",
        ) from error
    except UsageError:
        database.close()
        raise
    return database
