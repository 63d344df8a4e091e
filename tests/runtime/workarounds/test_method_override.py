"""Overrides of scheduler methods: nesting, removal, copies and pickles."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch

from anyaccel.runtime.workarounds.method_override import MethodOverride, MethodWrapper, override_method


def make_scheduler() -> Any:
    make: Any = diffusers.DDIMScheduler
    scheduler = make()
    scheduler.set_timesteps(4)
    return scheduler


def record(calls: list[Any], name: str = "") -> MethodWrapper:
    def wrapper(scheduler: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls.append(name or scheduler)
        return run(*args, **kwargs)

    return wrapper


def step(scheduler: Any) -> torch.Tensor:
    result: torch.Tensor = scheduler.step(torch.ones(1, 4, 2, 2), scheduler.timesteps[0], torch.ones(1, 4, 2, 2))[0]
    return result


def test_last_wrapper_is_outermost_and_all_are_removed() -> None:
    scheduler, calls = make_scheduler(), list[Any]()
    expected = step(scheduler)
    with override_method(scheduler, "step", record(calls, "inner")):
        with override_method(scheduler, "step", record(calls, "outer")):
            assert torch.equal(step(scheduler), expected)
        step(scheduler)
    assert calls == ["outer", "inner", "inner"]
    assert "step" not in vars(scheduler)


def test_wrappers_are_removed_in_any_order() -> None:
    scheduler, calls = make_scheduler(), list[Any]()
    first = override_method(scheduler, "step", record(calls, "first"))
    second = override_method(scheduler, "step", record(calls, "second"))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    step(scheduler)
    second.__exit__(None, None, None)
    assert calls == ["second"]
    assert "step" not in vars(scheduler)


def test_overrides_have_the_signature_of_the_method() -> None:
    scheduler = make_scheduler()
    expected = inspect.signature(scheduler.step)
    with override_method(scheduler, "step", record([])):
        assert inspect.signature(scheduler.step) == expected
        assert {"eta", "generator"} <= set(inspect.signature(scheduler.step).parameters)
        assert scheduler.step.__name__ == "step"
        assert type(scheduler) is diffusers.DDIMScheduler


def test_deep_copies_have_no_wrappers() -> None:
    scheduler, calls = make_scheduler(), list[Any]()
    with override_method(scheduler, "step", record(calls)):
        copied = copy.deepcopy(scheduler)
        assert copied.step.__self__ is copied
        step(copied)
        assert calls == []
        step(scheduler)
    assert calls == [scheduler]


def test_shallow_copies_have_no_wrappers_and_their_own_state() -> None:
    make: Any = diffusers.EulerDiscreteScheduler
    scheduler, calls = make(), list[Any]()
    scheduler.set_timesteps(4)
    with (
        override_method(scheduler, "step", record(calls), in_deep_copies=True),
        override_method(scheduler, "scale_model_input", record(calls)),
    ):
        copied = copy.copy(scheduler)
        step(copied)
        assert (copied.step_index, scheduler.step_index) == (1, None)
        step(copy.deepcopy(copied))
        assert (copied.step_index, calls) == (1, [])
    assert not {"step", "scale_model_input", "__getstate__"} & vars(scheduler).keys()
    assert copy.copy(scheduler).__dict__.keys() == vars(scheduler).keys()


def test_wrappers_in_deep_copies_get_the_copy() -> None:
    scheduler, calls = make_scheduler(), list[Any]()
    with (
        override_method(scheduler, "step", record(calls, "original only")),
        override_method(scheduler, "step", record(calls), in_deep_copies=True),
    ):
        copied = copy.deepcopy(scheduler)
        expected = step(copied)
    assert len(calls) == 1
    assert calls[0] is copied
    assert torch.equal(expected, step(scheduler))


def test_pickled_schedulers_have_the_method_of_the_class() -> None:
    scheduler, calls = make_scheduler(), list[Any]()
    with override_method(scheduler, "step", record(calls), in_deep_copies=True):
        loaded = pickle.loads(pickle.dumps(scheduler))
        method = pickle.loads(pickle.dumps(scheduler.step))
    assert loaded.step.__self__ is loaded
    assert method.__func__ is diffusers.DDIMScheduler.step
    assert torch.equal(step(loaded), step(scheduler))
    assert calls == []


def test_step_set_by_the_user_runs_inside_and_is_copied() -> None:
    scheduler, calls = make_scheduler(), list[Any]()

    def own(*args: Any) -> str:
        return "own"

    scheduler.step = own
    with override_method(scheduler, "step", record(calls, "wrapper")):
        assert scheduler.step(1, 2) == "own"
        assert inspect.signature(scheduler.step) == inspect.signature(own)
        assert copy.deepcopy(scheduler).step is own
    assert calls == ["wrapper"]
    assert scheduler.step is own


def test_step_replaced_during_the_block_stays() -> None:
    scheduler, calls = make_scheduler(), list[Any]()
    with override_method(scheduler, "step", record(calls, "wrapper")):
        before = scheduler.step

        def around(*args: Any) -> Any:
            calls.append("user")
            return before(*args)

        scheduler.step = around
        step(scheduler)
    assert scheduler.step is around
    step(scheduler)
    assert calls == ["user", "wrapper", "user"], "afterwards the wrapper runs around the method of the class"


def test_later_patches_of_the_class_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler()
    with override_method(scheduler, "step", record([])):
        monkeypatch.setattr(diffusers.DDIMScheduler, "step", lambda self, *args: "patched")
        assert scheduler.step(1, 2, 3) == "patched"


def test_schedulers_that_delegate_work() -> None:
    class Delegating:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(vars(self)["inner"], name)

    scheduler, calls = make_scheduler(), list[Any]()
    outer = Delegating(scheduler)
    with override_method(outer, "step", record(calls, "wrapper")):
        assert torch.equal(step(outer), step(scheduler))
    assert calls == ["wrapper"]


def test_schedulers_are_released_without_garbage_collection() -> None:
    scheduler = make_scheduler()
    override = MethodOverride(scheduler, "step", None)
    vars(scheduler)["step"] = override
    step(scheduler)
    reference = weakref.ref(scheduler)
    gc.disable()
    try:
        del scheduler
        assert reference() is None
    finally:
        gc.enable()
    with pytest.raises(ReferenceError, match="no longer exists"):
        override()


def test_a_copied_dict_can_be_restored() -> None:
    """As in StableDiffusionPanoramaPipeline."""
    make: Any = diffusers.DDIMScheduler
    scheduler = make()
    with override_method(scheduler, "step", lambda *_: "wrapped", in_deep_copies=True):
        state = copy.deepcopy(scheduler.__dict__)
        scheduler.__dict__.update(state)
        assert scheduler.step() == "wrapped"
    assert "step" not in vars(scheduler)
