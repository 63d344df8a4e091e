"""Calls in less memory than they would like: planned to fit, recovered when they do not, and the same picture."""

import gc
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import DoesNotFitError, UsageError
from anyaccel.planning.options import PlacementOptions
from anyaccel.recipes import recipes, run
from anyaccel.runtime.pipeline import place
from anyaccel.runtime.placement import memory_plan, oom_history, oom_retry
from anyaccel.runtime.placement.offload import _ROOM
from tests.runtime.placement.sweeps import FIVE, SAME, failing_at, inject, measure_full, sweep_capacities

pytestmark = pytest.mark.usefixtures("pipelines_imported")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ANYACCEL_CACHE", str(tmp_path / "cache"))


def check_capacities(name: str, device: str, shrink: float) -> list[dict[str, Any]]:
    """Every run ended in the CPU's picture as planned, and the last in the error."""
    *rows, last = sweep_capacities(name, device, shrink)
    assert rows[0]["rule"] == "everything resident"
    for row in rows:
        assert row["off"] < SAME, row
        assert row["peak"] <= row["predicted"] * 1.02 <= row["capacity"] * 1.02, row
    assert "does not fit" in last["error"]
    return rows


@pytest.mark.long
def test_less_and_less_memory() -> None:
    rows = check_capacities("stable-diffusion", "hpu", 0.6)
    order = list(dict.fromkeys(row["rule"].split(",")[0] for row in rows))
    assert order == ["everything resident", "one model at a time", "one layer at a time"]


@pytest.mark.long
def test_less_and_less_memory_that_the_host_shares() -> None:
    rows = check_capacities("flux", "mps", 0.6)
    order = list(dict.fromkeys(row["rule"].split(",")[0] for row in rows))
    assert order == ["everything resident", "one phase at a time", "one layer at a time"]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["hpu", "mps"])
@pytest.mark.parametrize("name", FIVE)
def test_every_capacity(name: str, device: str) -> None:
    check_capacities(name, device, 0.85)


def check_injections(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["left"] == 0, row
        assert row.get("error") or row["off"] < SAME, row
    assert any("rule" in row for row in rows), "no run ended in a picture"


def test_out_of_memory_at_some_allocations() -> None:
    rows = inject("flux-2-klein", "hpu", range(5, 10**6, 450), measure_full("flux-2-klein", "hpu")[1])
    check_injections(rows)
    assert len({row["rule"] for row in rows if "rule" in row}) > 1, "no run had to recover"


@pytest.mark.slow
@pytest.mark.parametrize("device", ["hpu", "mps"])
@pytest.mark.parametrize("name", FIVE)
def test_out_of_memory_at_every_tenth_allocation(name: str, device: str) -> None:
    check_injections(inject(name, device, range(1, 10**6, 10), measure_full(name, device)[1]))


def use_quietly() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def test_a_batch_that_ran_out_is_split_and_finished_and_remembered() -> None:
    """The pictures are those that the seeds give alone, and the next process starts where this one ended."""
    call: dict[str, Any] = {"prompt": "a fox", "height": 16, "width": 16, "num_inference_steps": 2, "output_type": "np"}
    options = {"dtype": "float32", "memory": "resident", "vae_tiling": False, "attention_slicing": "max"}

    def use(accelerator: VirtualAccelerator) -> tuple[Any, str, int]:
        use_quietly()
        pipe = place(recipes()["stable-diffusion"].make(), "hpu", **options)
        alone = [pipe(**call, seed=seed).images[0] for seed in (3, 4, 5, 6)]
        counted = [0]
        with failing_at(700, counted):
            made = pipe(**call, seed=3, num_images_per_prompt=4)
        again = pipe(**call, seed=3, num_images_per_prompt=4)
        used = str(made.plan.memory_in_use)
        assert str(again.plan.memory_in_use) == used, "the next call starts where this one ended"
        return float(numpy.abs(made.images - numpy.stack(alone)).max()), used, counted[0]

    off, rule, _ = run_forked("hpu", use)
    assert off < SAME
    assert "2 images per call" in rule

    def start_there(accelerator: VirtualAccelerator) -> str:
        use_quietly()
        assert not oom_history._LEARNT
        pipe = place(recipes()["stable-diffusion"].make(), "hpu", **options)
        return str(pipe(**call, seed=3, num_images_per_prompt=4).plan.memory_in_use)

    assert "2 images per call" in run_forked("hpu", start_there)


def test_a_failed_call_leaves_memory_as_it_was() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[int, int, str]:
        use_quietly()
        pipe = place(recipes()["stable-diffusion"].make(), "hpu", dtype="float32")
        gc.collect()
        before = anyaccel.memory("hpu").used_bytes
        words = ""
        real = type(pipe.unet).forward

        full = [True]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if full:
                raise torch.OutOfMemoryError("out of memory, always")
            return real(*args, **kwargs)

        type(pipe.unet).forward = forward
        try:
            run(recipes()["stable-diffusion"], pipe)
        except DoesNotFitError as error:
            words = str(error)
        full.clear()
        gc.collect()
        after = anyaccel.memory("hpu").used_bytes
        run(recipes()["stable-diffusion"], pipe)  # it can be used again
        return before, after, words

    before, after, words = run_forked("hpu", use)
    assert before == after
    assert "every way was tried" in words
    assert "out of memory, always" in words


def test_a_pin_that_cannot_hold_is_refused_with_the_numbers() -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        use_quietly()
        place(recipes()["stable-diffusion"].make(), "hpu", dtype="float32", memory="resident")

    with pytest.raises(DoesNotFitError, match=r"'resident' was asked for: the weights .* are 559 KiB.* has 293 KiB"):
        run_forked("hpu", use, memory="300000")


def test_waiting_on_a_host_that_shares_the_memory_is_refused_and_diffusers_own_way_is_not() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[str, str, bool]:
        pipe = place(recipes()["stable-diffusion"].make(), "mps", dtype="float32")
        with pytest.raises(UsageError, match="shares memory with the CPU") as caught:
            pipe.to("mps", memory="component")
        pipe.enable_model_cpu_offload(device="mps")
        picture = pipe("a fox", num_inference_steps=1, height=16, width=16, output_type="np", seed=1).images
        return caught.value.hint, str(pipe.plan.memory_in_use), bool(numpy.isfinite(picture).all())

    hint, rule, finite = run_forked("mps", use)
    assert "memory='phase'" in hint
    assert rule.startswith("one model at a time")
    assert finite


def test_a_pin_of_the_images_a_call_is_in_every_rule() -> None:
    pipe = recipes()["stable-diffusion"].make()

    def list_parts(at_once: int | None) -> set[int | None]:
        rules = memory_plan.list_pipeline_rules(pipe, 4, at_once, PlacementOptions(), unified_memory=False)
        return {rule.images_per_call for rule in rules}

    assert list_parts(None) == {None, 2, 1}
    assert list_parts(2) == {2}
    assert list_parts(4) == list_parts(8) == {None}, "all at once"


def test_a_plan_that_does_not_know_how_little_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process took the memory after the device was asked: every rule down to the last but one fails."""
    monkeypatch.setattr(memory_plan, "find_capacity", lambda *given: 2**40)
    monkeypatch.setattr(oom_retry, "find_capacity", lambda *given: 2**40)

    def use(accelerator: VirtualAccelerator) -> tuple[str, float, int]:
        use_quietly()
        recipe = recipes()["stable-diffusion-xl"]
        reference = run(recipe, recipe.make())
        pipe = place(recipe.make(), "hpu", dtype="float32")
        made = run(recipe, pipe)
        rule = str(pipe.plan.memory_in_use)
        del pipe
        gc.collect()
        return rule, float(numpy.abs(made - reference).max()), anyaccel.memory("hpu").used_bytes

    rule, off, left = run_forked("hpu", use, memory="170000")
    assert rule.startswith("one layer at a time")
    assert off < SAME
    assert left == 0


def test_an_error_that_is_about_something_else_is_raised_as_it_is() -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        use_quietly()
        pipe = place(recipes()["stable-diffusion"].make(), "hpu", dtype="float32")
        pipe("a fox", height=16, width=16, num_inference_steps=2, callback_on_step_end=lambda *given: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        run_forked("hpu", use)


def test_weights_on_disk_go_with_the_pipeline() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[bool, bool, int]:
        use_quietly()
        pipe = place(recipes()["stable-diffusion"].make(), "mps", dtype="float32", memory="phase")
        folder = vars(pipe)[_ROOM].folder
        run(recipes()["stable-diffusion"], pipe)
        there = folder.is_dir()
        left = anyaccel.memory("mps").used_bytes
        del pipe
        gc.collect()
        return there, os.path.exists(folder), left

    there, remained, left = run_forked("mps", use)
    assert there
    assert not remained
    assert left < 10_000, "the weights of the last phase were not let go"


@pytest.mark.long
def test_a_pipeline_moves_on_from_any_residence() -> None:
    def use(accelerator: VirtualAccelerator) -> list[float]:
        use_quietly()
        recipe = recipes()["stable-diffusion"]
        reference = run(recipe, recipe.make())
        pipe = place(recipe.make(), "hpu", dtype="float32")
        off = []
        for residence in ("component", "layer", "phase", "resident", "layer"):
            pipe.to("hpu", memory=residence)
            off.append(float(numpy.abs(run(recipe, pipe) - reference).max()))
        pipe.to("cpu", memory=None)
        off.append(float(numpy.abs(run(recipe, pipe) - reference).max()))
        return off

    assert max(run_forked("hpu", use)) < SAME


@pytest.mark.long
def test_a_smaller_type_is_the_last_resort_and_only_where_it_is_allowed() -> None:
    name = "stable-diffusion"
    _, reference = measure_full(name, "hpu")

    def use(accelerator: VirtualAccelerator) -> tuple[str, str, float]:
        use_quietly()
        with pytest.raises(DoesNotFitError, match="at least"):
            run(recipes()[name], place(recipes()[name].make(), "hpu", dtype="float32"))
        pipe = place(recipes()[name].make(), "hpu", dtype="float32", smallest_dtype=torch.bfloat16)
        made = run(recipes()[name], pipe)
        return pipe.plan.dtype.value, pipe.plan.dtype.reason, float(numpy.abs(made - reference).max())

    dtype, reason, off = run_forked("hpu", use, memory="180KiB")
    assert dtype == "bfloat16"
    assert "float32 does not fit: " in reason
    assert off < 0.05, "the picture of the same seed, in fewer digits"
