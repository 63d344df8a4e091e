"""Host memory of this process, from /proc: the peaks of a block, above what the process used before it."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["HostMemoryPeak", "read_status"]

_INTERVAL_S = 0.002


def read_status(pid: int | str = "self") -> dict[str, int]:
    """Return the resident memory of a process in bytes: anonymous, of mapped files and shared."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = {line.split(":")[0]: line.split() for line in lines if line.startswith(("Rss", "VmHWM"))}
    return {name: int(values[1]) * 1024 for name, values in fields.items()}


@dataclass
class HostMemoryPeak:
    """Samples the resident memory of this process in a `with` block.

    `anonymous` is memory that only this process holds. `resident` also counts pages of mapped files, which the
    operating system can drop at any time.
    """

    anonymous: int = 0
    resident: int = 0

    def __enter__(self) -> "HostMemoryPeak":
        self._start, self._stop = read_status(), threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *details: Any) -> None:
        self._stop.set()
        self._thread.join()
        self._read()

    def _sample(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self._read()

    def _read(self) -> None:
        now = {name: value - self._start[name] for name, value in read_status().items()}
        anonymous = now["RssAnon"] + now["RssShmem"]
        self.anonymous = max(self.anonymous, anonymous)
        self.resident = max(self.resident, anonymous + now["RssFile"])
