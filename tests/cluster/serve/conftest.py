"""Fixture: an empty folder for Ray."""

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use a temporary folder for Ray, so that no other cluster is found; Ray's socket paths must be short."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield
