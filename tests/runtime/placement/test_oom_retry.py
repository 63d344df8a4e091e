"""Calls with too little memory are planned to fit or recover from an error, and return the same image."""

import gc
import logging
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import DoesNotFitError, UsageError
from anyaccel.forward_overrides import Slot, set_override
from anyaccel.planning.options import PlacementOptions
from anyaccel.recipes import recipes, run
from anyaccel.runtime.pipeline import place
from anyaccel.runtime.placement import memory_plan, oom_history, oom_retry
from tests.runtime.placement.sweeps import (
    PIPELINES,
    TOLERANCE,
    failing_at,
    inject,
    measure_full,
    raise_from_device,
    sweep_capacities,
)
from tests.runtime.speed.small_pipelines import make_small

pytestmark = pytest.mark.usefixtures("pipelines_imported")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ANYACCEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(oom_history, "_OUTCOMES", {})


def check_capacities(name: str, device: str, shrink: float) -> list[dict[str, Any]]:
    """Check that all runs but the last return the CPU's image within the predicted memory, and that the last raises."""
    *rows, last = sweep_capacities(name, device, shrink)
    assert rows[0]["rule"] == "everything resident"
    for row in rows:
        assert row["difference"] < TOLERANCE, row
        assert row["peak"] <= row["predicted"] * 1.02 <= row["capacity"] * 1.02, row
    assert "does not fit" in last["error"]
    return rows


@pytest.mark.long
def test_decreasing_memory() -> None:
    rows = check_capacities("stable-diffusion", "hpu", 0.6)
    order = list(dict.fromkeys(row["rule"].split(",")[0] for row in rows))
    assert order == ["everything resident", "one model at a time", "one layer at a time"]


@pytest.mark.long
def test_decreasing_memory_on_a_device_with_unified_memory() -> None:
    rows = check_capacities("flux", "mps", 0.6)
    order = list(dict.fromkeys(row["rule"].split(",")[0] for row in rows))
    assert order == ["everything resident", "one phase at a time", "one layer at a time"]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["hpu", "mps"])
@pytest.mark.parametrize("name", PIPELINES)
def test_every_capacity(name: str, device: str) -> None:
    check_capacities(name, device, 0.85)


def check_injections(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["left"] == 0, row
        assert row.get("error") or row["difference"] < TOLERANCE, row
    assert any("rule" in row for row in rows), "no run returned an image"


def test_an_out_of_memory_error_at_some_allocations() -> None:
    rows = inject("flux-2-klein", "hpu", range(5, 10**6, 450), measure_full("flux-2-klein", "hpu")[1])
    check_injections(rows)
    assert len({row["rule"] for row in rows if "rule" in row}) > 1, "no run had to recover"


@pytest.mark.slow
@pytest.mark.parametrize("device", ["hpu", "mps"])
@pytest.mark.parametrize("name", PIPELINES)
def test_an_out_of_memory_error_at_every_tenth_allocation(name: str, device: str) -> None:
    check_injections(inject(name, device, range(1, 10**6, 10), measure_full(name, device)[1]))


def silence_output() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def test_a_batch_that_runs_out_of_memory_is_split_and_the_outcome_is_stored() -> None:
    """The images are those of single calls with the same seeds, and the next process starts with the stored rule."""
    call: dict[str, Any] = {"prompt": "a fox", "height": 16, "width": 16, "num_inference_steps": 2, "output_type": "np"}
    options = {"dtype": "float32", "memory": "resident", "vae_tiling": False, "attention_slicing": "max"}

    def use(accelerator: VirtualAccelerator) -> tuple[Any, str, int]:
        silence_output()
        pipe = place(recipes()["stable-diffusion"].make(), "hpu", **options)
        single = [pipe(**call, seed=seed).images[0] for seed in (3, 4, 5, 6)]
        counter = [0]
        with failing_at(700, counter):
            result = pipe(**call, seed=3, num_images_per_prompt=4)
        second = pipe(**call, seed=3, num_images_per_prompt=4)
        used = str(result.plan.memory_in_use)
        assert str(second.plan.memory_in_use) == used, "the next call must start with the rule that worked"
        return float(numpy.abs(result.images - numpy.stack(single)).max()), used, counter[0]

    difference, rule, _ = run_forked("hpu", use)
    assert difference < TOLERANCE
    assert "2 images at a time" in rule

    def run_in_next_process(accelerator: VirtualAccelerator) -> str:
        silence_output()
        assert not oom_history._OUTCOMES
        pipe = place(recipes()["stable-diffusion"].make(), "hpu", **options)
        return str(pipe(**call, seed=3, num_images_per_prompt=4).plan.memory_in_use)

    assert "2 images at a time" in run_forked("hpu", run_in_next_process)


def fail_above(model: torch.nn.Module, limit: int) -> list[int]:
    """Make a model run out of memory with more than `limit` rows, and return a list of the rows of its calls."""
    rows: list[int] = []

    def forward(inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows.append(len(args[0]))
        if rows[-1] > limit:
            raise_from_device(torch.OutOfMemoryError("out of memory, because there are too many rows"))
        return inner(*args, **kwargs)

    set_override(model, Slot.CAPTURE, forward)
    return rows


def test_a_call_that_runs_out_of_memory_starts_again_with_the_same_noise() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[float, bool, list[int], list[int]]:
        silence_output()
        recipe = recipes()["stable-diffusion"]
        stock: Any = recipe.make()
        pipe = place(
            recipe.make(), "hpu", dtype="float32", memory="resident", vae_tiling=False, attention_slicing="max"
        )
        rows, steps = fail_above(pipe.unet, 4), []

        def record(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
            steps.append(step)
            return values

        generators = [torch.Generator().manual_seed(3) for _ in range(2)]
        arguments = recipe.call() | {"num_images_per_prompt": 4}
        expected = stock(**arguments | {"generator": generators[0]}).images
        images = pipe(**arguments | {"generator": generators[1], "callback_on_step_end": record}).images
        same_state = torch.equal(generators[0].get_state(), generators[1].get_state())
        return float(numpy.abs(images - expected).max()), same_state, rows, steps

    difference, same_state, rows, steps = run_forked("hpu", use)
    assert difference < TOLERANCE
    assert same_state
    assert rows[0] == 8, "four images with guidance"
    assert set(rows[1:]) == {4}
    assert steps == sorted(set(steps)), "the first attempt failed before a step was finished"


class SharedAttention(AttnProcessor2_0):
    """A processor that anyaccel does not know."""


def test_rules_that_split_the_batch_are_skipped_if_the_models_cannot_be_split() -> None:
    def use(accelerator: VirtualAccelerator) -> list[int]:
        silence_output()
        recipe = recipes()["stable-diffusion"]
        pipe = place(
            recipe.make(), "hpu", dtype="float32", memory="resident", vae_tiling=False, attention_slicing="max"
        )
        make: Any = SharedAttention
        pipe.unet.set_attn_processor(make())
        rows = fail_above(pipe.unet, 4)
        with pytest.raises(DoesNotFitError, match="too many rows"):
            pipe(**recipe.call() | {"num_images_per_prompt": 4})
        return rows

    assert run_forked("hpu", use) == [8], "no other rule can help"


def test_a_failed_call_does_not_leak_memory() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[int, int, str]:
        silence_output()
        pipe = place(make_small(), "hpu", dtype="float32")
        gc.collect()
        before = anyaccel.memory("hpu").used_bytes
        message = ""
        original = type(pipe.unet).forward

        full = [True]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if full:
                raise_from_device(torch.OutOfMemoryError("out of memory, always"))
            return original(*args, **kwargs)

        type(pipe.unet).forward = forward
        try:
            run(recipes()["stable-diffusion"], pipe)
        except DoesNotFitError as error:
            message = str(error)
        full.clear()
        gc.collect()
        after = anyaccel.memory("hpu").used_bytes
        run(recipes()["stable-diffusion"], pipe)  # the pipeline is still usable
        return before, after, message

    before, after, message = run_forked("hpu", use)
    assert before == after
    assert "every memory mode ran out of memory" in message
    assert "out of memory, always" in message


def test_memory_resident_that_cannot_fit_is_rejected_with_the_sizes() -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        silence_output()
        place(recipes()["stable-diffusion"].make(), "hpu", dtype="float32", memory="resident")

    with pytest.raises(
        DoesNotFitError, match=r"does not fit with memory='resident': .* require 559 KiB, .* has only 293 KiB"
    ):
        run_forked("hpu", use, memory="300000")


def test_with_unified_memory_component_is_rejected_but_diffusers_own_offload_works() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[str, str, bool]:
        pipe = place(recipes()["stable-diffusion"].make(), "mps", dtype="float32")
        with pytest.raises(UsageError, match="shares memory with the CPU") as caught:
            pipe.to("mps", memory="component")
        pipe.enable_model_cpu_offload(device="mps")
        image = pipe("a fox", num_inference_steps=1, height=16, width=16, output_type="np", seed=1).images
        return caught.value.hint, str(pipe.plan.memory_in_use), bool(numpy.isfinite(image).all())

    hint, rule, finite = run_forked("mps", use)
    assert "memory='phase'" in hint
    assert rule.startswith("one model at a time")
    assert finite


def test_images_per_call_applies_to_every_rule() -> None:
    pipe = recipes()["stable-diffusion"].make()

    def list_batch_sizes(images_per_call: int | None) -> set[int | None]:
        rules = memory_plan.list_pipeline_rules(pipe, 4, images_per_call, PlacementOptions(), unified_memory=False)
        return {rule.images_per_call for rule in rules}

    assert list_batch_sizes(None) == {None, 2, 1}
    assert list_batch_sizes(2) == {2}
    assert list_batch_sizes(4) == list_batch_sizes(8) == {None}, "the whole batch"


def test_retries_reach_a_rule_that_fits_if_the_capacity_is_overestimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process allocates memory after the measurement, so only the last rules fit."""
    monkeypatch.setattr(memory_plan, "find_capacity", lambda *args: 2**40)
    monkeypatch.setattr(oom_retry, "find_capacity", lambda *args: 2**40)

    def use(accelerator: VirtualAccelerator) -> tuple[str, float, int]:
        silence_output()
        recipe = recipes()["stable-diffusion-xl"]
        reference = run(recipe, recipe.make())
        pipe = place(recipe.make(), "hpu", dtype="float32")
        image = run(recipe, pipe)
        rule = str(pipe.plan.memory_in_use)
        del pipe
        gc.collect()
        return rule, float(numpy.abs(image - reference).max()), anyaccel.memory("hpu").used_bytes

    rule, difference, left = run_forked("hpu", use, memory="170000")
    assert rule.startswith("one layer at a time")
    assert difference < TOLERANCE
    assert left == 0


def test_errors_other_than_out_of_memory_are_raised_unchanged() -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        silence_output()
        pipe = place(recipes()["stable-diffusion"].make(), "hpu", dtype="float32")
        pipe("a fox", height=16, width=16, num_inference_steps=2, callback_on_step_end=lambda *args: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        run_forked("hpu", use)


@pytest.mark.long
def _fail_in_callback(pipe: Any, error: Exception) -> dict[str, Any]:
    def fail(*args: Any) -> Any:
        raise error

    return {"callback_on_step_end": fail}


def _fail_in_scheduler(pipe: Any, error: Exception) -> dict[str, Any]:
    step, calls = pipe.scheduler.step, []

    def fail_at_second_step(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise error
        return step(*args, **kwargs)

    pipe.scheduler.step = fail_at_second_step
    return {}


def _fail_in_forward(pipe: Any, error: Exception) -> dict[str, Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    pipe.unet.forward = fail
    return {}


def _fail_in_mock(pipe: Any, error: Exception) -> dict[str, Any]:
    return {"callback_on_step_end": mock.Mock(side_effect=error)}


@pytest.mark.parametrize("fail", [_fail_in_callback, _fail_in_scheduler, _fail_in_forward, _fail_in_mock])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("mine"), RuntimeError("CUDA out of memory"), MemoryError("mine")], ids=repr
)
@pytest.mark.parametrize("memory", [None, "phase"])
def test_errors_of_the_user_are_raised_unchanged_and_not_stored(
    memory: Any, error: Exception, fail: Any, tmp_path: Path
) -> None:
    pipe: Any = place(recipes()["stable-diffusion"].make(), "cpu", dtype="float32", memory=memory)
    call = {"prompt": "a fox", "height": 16, "width": 16, "num_inference_steps": 2, "output_type": "np"}
    with pytest.raises(type(error)) as caught:
        pipe(**call, num_images_per_prompt=2, **fail(pipe, error))
    assert caught.value is error
    assert not (tmp_path / "cache" / "memory").exists()
    assert not oom_history._OUTCOMES


def test_errors_of_operations_in_code_of_the_user_are_those_of_the_device() -> None:
    """A callback whose operation runs out of memory is repeated with the next memory settings."""
    calls: list[int] = []

    def allocate(pipe: Any, step: int, timestep: Any, values: Any) -> dict[str, Any]:
        calls.append(step)
        if len(calls) == 2:
            torch.empty(2**62, dtype=torch.int8)  # "not enough memory: you tried to allocate"
        return {}

    pipe: Any = place(recipes()["stable-diffusion"].make(), "cpu", dtype="float32")
    call = {"prompt": "a fox", "height": 16, "width": 16, "num_inference_steps": 2, "output_type": "np"}
    pipe(**call, num_images_per_prompt=2, callback_on_step_end=allocate)
    assert calls == [0, 1, 0, 1, 2]  # the scheduler repeats the first step
    assert oom_history._OUTCOMES


def _run_without_source(code: str) -> None:
    exec(code, {"__name__": "users_script", "torch": torch})


def _run_with_coverage(code: str) -> None:
    sys.settrace(lambda *args: None)
    try:
        _run_without_source(code)
    finally:
        sys.settrace(None)


@pytest.mark.parametrize("run_code", [_run_without_source, _run_with_coverage])
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise MemoryError", True),
        ("def fail(): raise torch.OutOfMemoryError('mine')\ntry: fail()\nfinally: x = 1", True),
        ("try: 1 / 0\nexcept ZeroDivisionError as error: raise MemoryError from error", True),
        ("torch.empty(2**62, dtype=torch.int8)", False),
        ("with torch.no_grad(): torch.empty(2**62, dtype=torch.int8)", False),
        ("try: torch.empty(2**62, dtype=torch.int8)\nfinally: x = 1", False),
        ("try: torch.empty(2**62, dtype=torch.int8)\nexcept RuntimeError: raise", False),
        ("try: torch.empty(2**62, dtype=torch.int8)\nexcept RuntimeError as error: raise error", False),
    ],
)
def test_errors_that_code_of_the_user_raises_are_told_from_those_of_its_operations(
    run_code: Any, code: str, expected: bool
) -> None:
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        run_code(code)
    assert oom_retry._is_raised_by_user(caught.value) == expected


def test_errors_in_frames_without_bytecode_are_those_of_the_device() -> None:
    frame = SimpleNamespace(f_globals={"__name__": "users_extension"}, f_code=SimpleNamespace(co_code=b""))
    error: Any = SimpleNamespace(__traceback__=SimpleNamespace(tb_frame=frame, tb_lasti=-1, tb_next=None))
    assert not oom_retry._is_raised_by_user(error)


def test_the_outcome_of_a_python_memory_error_is_not_stored() -> None:
    failed: list[int] = []

    def allocate(pipe: Any, step: int, timestep: Any, values: Any) -> dict[str, Any]:
        if not failed:
            failed.append(step)
            numpy.empty(2**62, dtype=numpy.int8)
        return {}

    pipe: Any = place(recipes()["stable-diffusion"].make(), "cpu", dtype="float32")
    call = {"prompt": "a fox", "height": 16, "width": 16, "num_inference_steps": 2, "output_type": "np"}
    pipe(**call, num_images_per_prompt=2, callback_on_step_end=allocate)
    assert failed
    assert not oom_history._OUTCOMES
    assert not oom_history.has_outcome()


def test_a_pipeline_changes_from_any_residence_to_another() -> None:
    def use(accelerator: VirtualAccelerator) -> list[float]:
        silence_output()
        recipe = recipes()["stable-diffusion"]
        reference = run(recipe, make_small())
        pipe = place(make_small(), "hpu", dtype="float32")
        differences = []
        for residence in ("component", "layer", "phase", "resident", "layer"):
            pipe.to("hpu", memory=residence)
            differences.append(float(numpy.abs(run(recipe, pipe) - reference).max()))
        pipe.to("cpu", memory=None)
        differences.append(float(numpy.abs(run(recipe, pipe) - reference).max()))
        return differences

    assert max(run_forked("hpu", use)) < TOLERANCE


@pytest.mark.long
def test_smallest_dtype_allows_a_smaller_dtype_as_last_resort() -> None:
    name = "stable-diffusion"
    _, reference = measure_full(name, "hpu")

    def use(accelerator: VirtualAccelerator) -> tuple[str, str, float]:
        silence_output()
        with pytest.raises(DoesNotFitError, match="at least"):
            run(recipes()[name], place(recipes()[name].make(), "hpu", dtype="float32"))
        pipe = place(recipes()[name].make(), "hpu", dtype="float32", smallest_dtype=torch.bfloat16)
        image = run(recipes()[name], pipe)
        return pipe.plan.dtype.value, pipe.plan.dtype.reason, float(numpy.abs(image - reference).max())

    dtype, reason, difference = run_forked("hpu", use, memory="180KiB")
    assert dtype == "bfloat16"
    assert "float32 does not fit: " in reason
    assert difference < 0.05, "the image must match that of float32, with less precision"
