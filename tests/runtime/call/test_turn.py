"""Threads that use the same pipeline take turns."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import anyaccel
from anyaccel.errors import UsageError
from anyaccel.recipes import recipes
from anyaccel.runtime.call import turn
from tests.conftest import NEEDS_RECIPES

pytestmark = NEEDS_RECIPES


def test_a_callback_that_waits_for_a_call_in_another_thread_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "_POLL_S", 0.05)
    monkeypatch.setattr(turn, "_BLOCKED_S", 0.2)
    recipe = recipes()["stable-diffusion"]
    pipe = anyaccel.place(recipe.make(), "cpu", dtype="float32", compile=False)
    errors: list[BaseException | None] = []

    def callback(current: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        with ThreadPoolExecutor(1) as pool:
            errors.append(pool.submit(lambda: current(**recipe.call())).exception(timeout=60))
            errors.append(pool.submit(lambda: current.to("cpu", compile=True)).exception(timeout=60))
        return {}

    pipe(**{**recipe.call(), "num_inference_steps": 1}, callback_on_step_end=callback)
    assert [type(error) for error in errors] == [UsageError, UsageError]
    assert "a callback waits for a thread" in str(errors[0])
    pipe(**recipe.call())


def test_calls_wait_for_a_callback_that_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "_POLL_S", 0.02)
    monkeypatch.setattr(turn, "_BLOCKED_S", 0.2)
    recipe, pauses = recipes()["stable-diffusion"], threading.Event()
    pipe = anyaccel.place(recipe.make(), "cpu", dtype="float32", compile=False)
    threads: list[threading.Thread] = []
    images: list[Any] = []

    def callback(current: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        if not threads:
            threads.append(threading.Thread(target=lambda: images.append(current(**recipe.call()).images)))
            threads[0].start()
        for _ in range(4):
            pauses.wait(0.1)
        return {}

    expected = pipe(**recipe.call()).images
    pipe(**recipe.call(), callback_on_step_end=callback)
    threads[0].join()
    assert (images[0] == expected).all()
