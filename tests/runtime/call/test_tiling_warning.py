"""A call warns if too little memory makes the VAE process images in tiles."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import anyaccel
from anyaccel.emulator.run_forked import run_forked
from anyaccel.recipes import recipes
from tests.conftest import NEEDS_RECIPES

pytestmark = NEEDS_RECIPES


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.mark.parametrize(
    ("memory", "options", "count"), [("8MiB", {}, 1), ("8MiB", {"vae_tiling": True}, 0), (None, {}, 0)]
)
def test_automatic_tiling_is_reported_once(memory: str | None, options: dict[str, Any], count: int) -> None:
    def use(_: Any) -> list[str]:
        recipe, messages = recipes()["stable-diffusion"], Messages()
        logging.getLogger("anyaccel").addHandler(messages)
        pipe = anyaccel.place(recipe.make(), "neuron", dtype="float32", **options)
        for _ in range(2):
            pipe(**{**recipe.call(), "height": 64, "width": 64})
        return messages.texts

    texts = [text for text in run_forked("neuron", use, memory=memory) if "tiles" in text]
    assert len(texts) == count
    assert all("vae_tiling=False" in text and "everything resident would need" in text for text in texts)
