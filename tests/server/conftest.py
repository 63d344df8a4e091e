"""Fixtures: a service shared by all tests that only send requests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.live import Live

ALICE, BOB, CAROL = "alice's key", "bob's key", "carol's key"
"""API keys. Carol uses the web page, which shows only her images."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Stable Diffusion pipeline."""
    from anyaccel.recipes import recipes

    path = tmp_path_factory.mktemp("models") / "tiny"
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A service with the embedded model, three keys and a short queue.

    By default, images have a quarter of the model's normal size, because one step then takes a quarter of the time.
    """
    service = Live(
        tmp_path_factory.mktemp("live"), "embedded", "--dtype", "float32", "--sizes", "64x64",
        "--max-queue", "3", "--max-batch", "2",
        "--api-key", ALICE, "--api-key", BOB, "--api-key", CAROL,
        *(f"--limit={limit}" for limit in ("max_steps=2000", "max_n=4", "body_s=10", "max_pixels=65536")), key=ALICE,
    )  # fmt: skip
    yield service
    assert service.end() == 0
