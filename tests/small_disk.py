"""A small disk, for tests of what happens when it is full."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["fill", "mount_small_disk"]


@contextmanager
def mount_small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a disk in memory on a folder; skip the test if this process may not mount one."""
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("mounting a disk requires root")
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a disk in memory: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, free_bytes: int) -> Path:
    """Write a file that leaves about `free_bytes` of free space on the disk of a folder."""
    space, path = os.statvfs(folder), folder / "filler"
    path.write_bytes(bytes(max(0, space.f_bavail * space.f_frsize - free_bytes)))
    return path
