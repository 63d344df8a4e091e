"""A pipeline stays usable after a rejected, failed or interrupted placement, retry or call."""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import DoesNotFitError
from anyaccel.recipes import recipes, run
from anyaccel.runtime.call import run as call
from anyaccel.runtime.placement import memory_plan, place
from anyaccel.runtime.placement_state import find_placement
from anyaccel.runtime.workarounds import function_modes, model_inputs
from anyaccel.runtime.workarounds.model_inputs import find_input_adapters
from tests.conftest import NEEDS_RECIPES

pytestmark = NEEDS_RECIPES
RECIPE = recipes()["stable-diffusion"]


def make() -> Any:
    pipe: Any = RECIPE.make()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def make_overflowing() -> Any:
    """Return a pipeline with a VAE that overflows in float16."""
    pipe = make()
    with torch.no_grad():
        pipe.vae.decoder.conv_norm_out.weight.mul_(4e4)
        pipe.vae.decoder.conv_norm_out.bias.zero_()
        pipe.vae.decoder.conv_out.weight.mul_(1e-4)
    return pipe


def on_virtual_hpu(use: Callable[[], Any]) -> Any:
    def ignoring_warnings(accelerator: VirtualAccelerator) -> Any:
        warnings.simplefilter("ignore")
        return use()

    return run_forked("hpu", ignoring_warnings)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("out of memory")], ids=["ctrl-c", "oom"])
def test_a_placement_that_fails_during_the_move(error: BaseException) -> None:
    expected = run(RECIPE, make())

    def use() -> Any:
        pipe = anyaccel.place(make(), "hpu", dtype="float32", smallest_dtype="float32")
        run(RECIPE, pipe)
        cast = place._cast

        def cast_and_fail(pipe: Any, placement: Any, target: Any, move: Any, how: Any) -> None:
            cast(pipe, placement, torch.device("cpu"), move, how)
            raise error

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, "_cast", cast_and_fail)
            with pytest.raises((KeyboardInterrupt, DoesNotFitError)):
                pipe.to("hpu", memory="resident")
        left = run(RECIPE, pipe)  # on the device of the weights
        return left, str(find_placement(pipe).device), run(RECIPE, pipe.to("hpu"))  # type: ignore[union-attr]

    left, device, again = on_virtual_hpu(use)
    assert device == "cpu"
    assert numpy.array_equal(left, expected)
    assert numpy.abs(again - expected).max() < 1e-4


def test_a_rejected_placement_leaves_the_earlier_one_in_use() -> None:
    def use() -> Any:
        pipe = anyaccel.place(make(), "hpu", dtype="float32", memory="layer")
        before = run(RECIPE, pipe)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory_plan, "find_capacity", lambda *args: 1000)
            with pytest.raises(DoesNotFitError):
                pipe.to(memory="resident")
        return before, run(RECIPE, pipe), str(pipe.plan.memory_in_use)

    before, after, rule = on_virtual_hpu(use)
    assert rule == "one layer at a time"
    assert numpy.array_equal(before, after)


def test_a_model_that_was_moved_to_float32_is_placed_again() -> None:
    def use() -> None:
        pipe = anyaccel.place(make_overflowing(), "hpu", dtype="float16")
        run(RECIPE, pipe)
        assert pipe.vae.dtype is torch.float32
        for arguments in (("hpu",), (torch.bfloat16,)):
            pipe.to(*arguments)
            run(RECIPE, pipe)  # regression: float32 inputs with half-precision weights

    on_virtual_hpu(use)


def test_a_model_with_weights_on_disk_is_retried_in_float32() -> None:
    def use(accelerator: VirtualAccelerator) -> Any:
        warnings.simplefilter("ignore")
        pipe = anyaccel.place(make_overflowing(), "mps", dtype="float16", memory="phase")
        return [run(RECIPE, pipe) for _ in range(2)], pipe.plan.report.float32_models.value

    images, float32_models = run_forked("mps", use)
    assert float32_models == ("vae",)
    assert all(numpy.isfinite(image).all() for image in images)


def test_an_interrupted_retry_restores_the_model() -> None:
    def use() -> Any:
        pipe = anyaccel.place(make_overflowing(), "hpu", dtype="float16")
        calls, run_once = [], call._CallRun._run_once

        def interrupt_third(self: Any) -> Any:
            calls.append(self)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return run_once(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(call._CallRun, "_run_once", interrupt_third)
            with pytest.raises(KeyboardInterrupt):
                run(RECIPE, pipe)
        left = pipe.vae.dtype, {adapter.cast_to for adapter in find_input_adapters(pipe.vae)}
        return left, numpy.isfinite(run(RECIPE, pipe)).all()

    left, finite = on_virtual_hpu(use)
    assert left == (torch.float16, {None})
    assert finite


def test_ctrl_c_at_the_start_of_a_model_restores_the_function_modes() -> None:
    def use() -> bool:
        pipe = anyaccel.place(make(), "hpu", dtype="float32")
        before = run(RECIPE, pipe)
        enter, entered = function_modes.enter_model_mode, []

        def interrupt_second(*args: Any) -> Any:
            entered.append(enter(*args))
            if len(entered) == 2:
                raise KeyboardInterrupt
            return entered[-1]

        with torch.device("cpu"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(model_inputs, "enter_model_mode", interrupt_second)
                with pytest.raises(KeyboardInterrupt):
                    run(RECIPE, pipe)
            assert torch.get_default_device().type == "cpu"
        return numpy.array_equal(before, run(RECIPE, pipe))

    assert on_virtual_hpu(use)


def test_a_waiting_thread_uses_the_new_placement() -> None:
    def use() -> list[str]:
        pipe = anyaccel.place(make(), "hpu", dtype="float32")
        placement = find_placement(pipe)
        assert placement is not None
        waiting, errors = threading.Event(), []

        def run_call() -> None:
            waiting.set()
            try:
                run(RECIPE, pipe)
            except RuntimeError as error:  # raised if tensors are on two devices
                errors.append(str(error))

        thread = threading.Thread(target=run_call)
        with placement.lock:
            thread.start()
            waiting.wait()
            thread.join(0.2)  # enough time for the thread to reach the lock
            pipe.to("cpu")
        thread.join()
        return errors

    assert on_virtual_hpu(use) == []


def test_a_model_that_the_user_moved_runs_on_its_device() -> None:
    stock = make()
    latents = torch.randn(1, stock.vae.config.latent_channels, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, image = stock.vae.decode(latents).sample, run(RECIPE, stock)

    def use() -> Any:
        pipe = anyaccel.place(make(), "hpu", dtype="float32")
        pipe.vae.to("cpu")
        with torch.no_grad():
            decoded = pipe.vae.decode(latents).sample
        whole = run(RECIPE, pipe)
        vae = pipe.vae
        del pipe
        with torch.no_grad():
            return decoded, whole, vae.decode(latents).sample

    decoded, whole, after_deletion = on_virtual_hpu(use)
    assert torch.equal(decoded, expected)
    assert torch.equal(after_deletion, expected)
    assert numpy.abs(whole - image).max() < 1e-4
