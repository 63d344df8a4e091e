"""Step batching: concurrent calls share denoiser batches, and each image equals that of a single call."""

import functools
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import diffusers
import numpy
import pytest
import torch

from anyaccel.backends.driver import Recorder
from anyaccel.forward_overrides import Slot, get_override, remove_override, set_override
from anyaccel.recipes import recipes
from anyaccel.runtime.pipeline import place
from anyaccel.runtime.speed.graph_capture import GraphCapture
from anyaccel.runtime.workarounds.nan_check import RecordEvent
from anyaccel.server.batching.batched_args import join_args, make_call_args, split_result
from anyaccel.server.batching.batched_forward import BatchedForward, _PendingCall
from anyaccel.server.batching.shared_pipeline import SharedPipeline
from anyaccel.server.batching.step_batcher import StepBatcher
from anyaccel.server.batching.turns import Turns


def make_call(name: str, seed: int, steps: int) -> dict[str, Any]:
    call = {**recipes()[name].call(), "num_inference_steps": steps}
    return {**call, "generator": torch.Generator().manual_seed(seed)}


def begin_together(shared: SharedPipeline, model: str, calls: int) -> None:
    """Hold `calls` calls until all have reached their first step; after that the batcher keeps them together."""
    batched, first_step, started = shared.forwards[model], threading.Barrier(calls), set[int]()

    def wait_first(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        thread_id = threading.get_ident()
        if thread_id not in started:
            started.add(thread_id)
            with shared.batcher.changed:
                shared.batcher.active_calls[thread_id] = batched  # from now on the others wait for this call
                shared.batcher.changed.notify_all()
            first_step.wait(60)
        return forward(*args, **kwargs)

    set_override(batched.module, Slot.RECORDING, wait_first)


def call_at(batched: BatchedForward, *args: Any) -> Any:
    """Call a batched forward as the override of its model does."""
    return batched(batched.run, args, {})


def step_together(batched: BatchedForward, calls: int, steps: int, between: Callable[[], None] = lambda: None) -> None:
    """Run `calls` concurrent calls of `steps` steps that start together; run `between` after each step."""
    batcher, begin = batched.batcher, threading.Barrier(calls)

    def call() -> None:
        with batcher.participating(), torch.no_grad():
            with batcher.changed:
                batcher.active_calls[threading.get_ident()] = batched
            begin.wait(60)
            for _ in range(steps):
                call_at(batched, torch.zeros(1, 2))
                between()

    with ThreadPoolExecutor(calls) as threads:
        for future in [threads.submit(call) for _ in range(calls)]:
            future.result(60)


def record_waits(log: list[str]) -> RecordEvent:
    """Return a `mark` that numbers its events and logs each wait for an event."""
    marks = itertools.count(1)
    return lambda: functools.partial(log.append, f"wait for {next(marks)}")


def pixels(output: Any) -> Any:
    return numpy.asarray(output.images if hasattr(output, "images") else output.frames)


@pytest.mark.parametrize(
    "name", ["stable-diffusion", "flux", "stable-diffusion-3", "pixart-alpha", "stable-diffusion-xl"]
)
def test_batched_calls_give_the_same_images_as_single_calls(name: str) -> None:
    pipe = place(recipes()[name].make(), "cpu", dtype="float32")
    pipe.set_progress_bar_config(disable=True)
    requests = [(0, 6), (1, 4), (2, 8), (3, 6)]
    denoiser = "unet" if hasattr(pipe, "unet") else "transformer"
    denoiser_calls: Counter[int] = Counter()
    expected: list[Any] = []
    counter = getattr(pipe, denoiser).register_forward_hook(lambda *_: denoiser_calls.update([len(expected)]))
    for seed, steps in requests:
        expected.append(pixels(pipe(**make_call(name, seed, steps))))
    counter.remove()
    shared = SharedPipeline(pipe, max_wait_s=60.0)
    enabled = shared.warm_up(make_call(name, 8, 2), make_call(name, 9, 2))
    assert enabled[denoiser], enabled
    begin_together(shared, denoiser, len(requests))
    with ThreadPoolExecutor(len(requests)) as threads:
        images = list(threads.map(lambda request: pixels(shared.run(make_call(name, *request))), requests))
    for image, wanted in zip(images, expected, strict=True):
        assert numpy.abs(image - wanted).max() < 1e-4
    stats = shared.forwards[denoiser].stats
    longest = max(denoiser_calls.values())
    running = Counter(sum(count > step for count in denoiser_calls.values()) for step in range(longest))
    assert stats.sizes == running, "every running call is in every batch"
    shared.close()
    assert get_override(getattr(pipe, denoiser), Slot.BATCHING) is None
    remove_override(getattr(pipe, denoiser), Slot.RECORDING)
    assert numpy.abs(pixels(pipe(**make_call(name, *requests[0]))) - expected[0]).max() < 1e-5


@pytest.mark.parametrize("name", ["wan", "qwen-image"])
def test_concurrent_calls_do_not_share_the_state_of_a_vae(name: str) -> None:
    """The VAE of Wan keeps features of earlier frames in attributes, and in lists that its decoder changes."""
    pipe = place(recipes()[name].make(), "cpu", dtype="float32")
    expected = [pixels(pipe(**make_call(name, seed, 2))) for seed in range(3)]
    shared = SharedPipeline(pipe, max_wait_s=60.0)
    shared.warm_up(make_call(name, 8, 2), make_call(name, 9, 2))
    begin_together(shared, "transformer", 3)
    with ThreadPoolExecutor(3) as threads:
        images = list(threads.map(lambda seed: pixels(shared.run(make_call(name, seed, 2))), range(3)))
    assert [image.shape for image in images] == [image.shape for image in expected]
    assert max(numpy.abs(image - wanted).max() for image, wanted in zip(images, expected, strict=True)) < 1e-4


@pytest.mark.parametrize(
    "name", ["pag-stable-diffusion", "easy-animate", pytest.param("gligen", marks=pytest.mark.slow)]
)
def test_a_pipeline_that_changes_its_models_runs_one_call_at_a_time(name: str) -> None:
    """PAG sets attention processors, GLIGEN disables layers, and the VAE of EasyAnimate keeps features of frames."""
    stock: Any = recipes()[name].make()
    expected = [pixels(stock(**make_call(name, seed, 2))) for seed in range(3)]
    shared = SharedPipeline(place(recipes()[name].make(), "cpu", dtype="float32"), max_wait_s=0.2)
    assert not any(shared.warm_up(make_call(name, 8, 2), make_call(name, 9, 2)).values())
    with ThreadPoolExecutor(3) as pool:
        images = list(pool.map(lambda seed: pixels(shared.run(make_call(name, seed, 2))), range(3)))
    for image, reference in zip(images, expected, strict=True):
        assert numpy.abs(image - reference).max() < 1e-5


def test_a_class_of_the_user_that_sets_attention_processors_runs_one_call_at_a_time() -> None:
    class Custom(diffusers.StableDiffusionPipeline):
        def check_inputs(self: Any, *args: Any, **kwargs: Any) -> None:
            self.unet.set_attn_processor(self.unet.attn_processors)

    stock, make = recipes()["stable-diffusion"].make(), cast("Any", Custom)
    assert SharedPipeline(place(make(**cast("Any", stock).components), "cpu", dtype="float32")).serial


def test_calls_that_run_alone_wait_for_the_others_and_block_later_ones() -> None:
    turns, order, started = Turns(), list[str](), threading.Barrier(3)

    def run(name: str, alone: bool) -> None:
        with turns.take(alone=alone):
            order.append(f"{name} begins")
            if not alone:
                started.wait(30)
            order.append(f"{name} ends")

    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(run, name, False) for name in ("a", "b")]
        while turns._together < 2:
            time.sleep(0.001)
        calls.append(pool.submit(run, "alone", True))
        while not turns._waiting_alone:
            time.sleep(0.001)
        assert "alone begins" not in order
        started.wait(30)
        for call in calls:
            call.result(30)
    assert order[-2:] == ["alone begins", "alone ends"]


def test_a_failing_call_does_not_stop_the_others() -> None:
    name = "stable-diffusion"
    pipe = place(recipes()[name].make(), "cpu", dtype="float32")
    pipe.set_progress_bar_config(disable=True)
    expected = pixels(pipe(**make_call(name, 1, 6)))
    shared = SharedPipeline(pipe, max_wait_s=5.0)
    shared.warm_up(make_call(name, 8, 2), make_call(name, 9, 2))

    def stop(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        if step == 1:
            raise RuntimeError("the client disconnected")
        return values

    with ThreadPoolExecutor(2) as threads:
        failing = threads.submit(shared.run, {**make_call(name, 0, 6), "callback_on_step_end": stop})
        other = threads.submit(shared.run, make_call(name, 1, 6))
        with pytest.raises(RuntimeError, match="disconnected"):
            failing.result(60)
        assert numpy.abs(pixels(other.result(60)) - expected).max() < 1e-4
    assert not shared.batcher.active_calls


def test_a_failing_batch_is_run_call_by_call() -> None:
    pipe = place(recipes()["stable-diffusion"].make(), "cpu", dtype="float32")
    pipe.set_progress_bar_config(disable=True)
    shared = SharedPipeline(pipe, max_wait_s=60.0)
    shared.warm_up(make_call("stable-diffusion", 8, 2), make_call("stable-diffusion", 9, 2))
    begin_together(shared, "unet", 2)
    batched = shared.forwards["unet"]
    original_run, rows = batched.run, []

    def run(sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows.append(len(sample))
        if len(sample) > 2:
            raise torch.OutOfMemoryError("batch too large")
        return original_run(sample, *args, **kwargs)

    batched.run = run  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as threads:
        outputs = list(threads.map(lambda seed: shared.run(make_call("stable-diffusion", seed, 4)), (0, 1)))
    assert len(outputs) == 2
    assert max(rows) == 4, "the batch was tried first"


def test_a_thread_that_does_not_participate_runs_unbatched() -> None:
    pipe = place(recipes()["stable-diffusion"].make(), "cpu", dtype="float32")
    pipe.set_progress_bar_config(disable=True)
    expected = pixels(pipe(**make_call("stable-diffusion", 0, 2)))
    SharedPipeline(pipe, max_wait_s=60.0)
    assert numpy.abs(pixels(pipe(**make_call("stable-diffusion", 0, 2))) - expected).max() < 1e-5


def test_arguments_are_joined_along_the_batch_dimension() -> None:
    shared = torch.arange(6).view(2, 3)

    def call_args(rows: int, time: float, **extra: Any) -> Any:
        return make_call_args((torch.full((rows, 5), time), torch.tensor(time)), {"ids": shared.clone(), **extra})

    first, second = call_args(1, 1.0), call_args(3, 2.0)
    assert first.can_join(second)
    (values, times), kwargs = join_args([first, second])
    assert values.shape == (4, 5)
    assert times.tolist() == [1.0, 2.0, 2.0, 2.0]
    assert torch.equal(kwargs["ids"], shared)
    first_result, second_result = split_result((values, {"a": values + 1}), [1, 3])
    assert first_result[0].shape == (1, 5)
    assert second_result[1]["a"].shape == (3, 5)
    assert not first.can_join(call_args(1, 1.0, scale=2)), "an extra argument"
    assert not call_args(1, 1.0, scale=1).can_join(call_args(1, 1.0, scale=2))
    assert make_call_args((object(),), {}) is None
    nested = make_call_args((torch.zeros(1, 5),), {"more": {"ids": [shared]}, "scale": 1})
    assert nested is not None
    assert nested.can_join(nested)
    assert not nested.can_join(first)
    (joined,), kwargs = join_args([nested])
    assert torch.equal(joined, torch.zeros(1, 5))
    assert kwargs == {"more": {"ids": [shared]}, "scale": 1}
    other_ids = make_call_args((torch.zeros(1, 5), torch.tensor(0.0)), {"ids": shared + 1})
    assert other_ids is not None
    assert not first.can_join(other_ids), "the shared tensors differ"


def test_a_call_that_reached_no_model_is_not_waited_for() -> None:
    pipe = place(recipes()["stable-diffusion"].make(), "cpu", dtype="float32")
    pipe.set_progress_bar_config(disable=True)
    shared = SharedPipeline(pipe, max_wait_s=60.0)
    shared.warm_up(make_call("stable-diffusion", 8, 2), make_call("stable-diffusion", 9, 2))
    started, proceed = threading.Event(), threading.Event()

    def wait() -> None:
        with shared.batcher.participating():
            started.set()
            proceed.wait(60)

    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(wait)
        assert started.wait(60)
        shared.run(make_call("stable-diffusion", 0, 4))
        proceed.set()
        slow.result(60)


def test_calls_do_not_run_ahead_of_an_asynchronous_device() -> None:
    """A new call joins a running one, although the device accepts all of its steps without blocking."""
    steps, marks = 8, itertools.count(1)
    second_step = threading.Event()

    class AddOne(torch.nn.Module):
        def forward(self, sample: torch.Tensor) -> torch.Tensor:
            return sample + 1

    def mark() -> Callable[[], None]:
        return functools.partial(wait, next(marks))

    def wait(number: int) -> None:
        """Finish the second step only after the other call has arrived."""
        if number == 2:
            second_step.set()
            with batcher.changed:
                assert batcher.changed.wait_for(lambda: len(batched.pending) == 2, 60)

    batcher = StepBatcher(max_calls=4, max_wait_s=60, mark=mark)
    batched = BatchedForward(AddOne(), batcher)

    def call() -> torch.Tensor:
        sample = torch.zeros(1, 2)
        with batcher.participating(), torch.no_grad():
            for _ in range(steps):
                sample = call_at(batched, sample)
        return sample

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(call)
        assert second_step.wait(60), "the calls run ahead of the device"
        second = threads.submit(call)
        assert first.result(60).tolist() == second.result(60).tolist() == [[float(steps)] * 2]
    assert batched.stats.sizes == {1: 6, 2: 5}, "three steps of each call run alone, all others are shared"
    assert not batcher.busy
    assert not batcher.enqueued, "enqueued work remains, but no call waits for it"


def test_the_next_batch_is_enqueued_while_the_device_runs_one() -> None:
    log: list[str] = []

    class Logged(torch.nn.Module):
        def forward(self, sample: torch.Tensor) -> torch.Tensor:
            log.append("run")
            return sample

    batcher = StepBatcher(max_calls=4, mark=record_waits(log))
    batched = BatchedForward(Logged(), batcher)
    with batcher.participating(), torch.no_grad():
        for _ in range(4):
            call_at(batched, torch.zeros(1, 2))
    assert log == ["run", "run", "wait for 1", "run", "wait for 2", "run"]


def test_a_decoder_does_not_count_against_the_look_ahead_limit() -> None:
    """The next batch is enqueued while a decoder runs, so the device does not become idle."""
    log: list[str] = []
    batcher = StepBatcher(max_calls=4, mark=record_waits(log))
    batched = BatchedForward(torch.nn.Identity(), batcher)
    decoder = BatchedForward(torch.nn.Identity(), batcher, enabled=False, is_denoiser=False)
    with batcher.participating(), torch.no_grad():
        call_at(batched, torch.zeros(1, 2))
        call_at(decoder, torch.zeros(1, 2))
        call_at(batched, torch.zeros(1, 2))
        assert log == []
        call_at(batched, torch.zeros(1, 2))
    assert log == ["wait for 2"], "the wait must cover the first batch and the decoder after it"


def test_a_missing_call_is_waited_for_until_the_device_is_idle() -> None:
    log: list[str] = []
    batcher = StepBatcher(max_calls=4, max_wait_s=0, mark=lambda: lambda: log.append("idle"))
    batched = BatchedForward(torch.nn.Identity(), batcher)
    with batcher.participating(), torch.no_grad():
        call_at(batched, torch.zeros(1, 2))
        with batcher.changed:
            batcher.active_calls[-1] = batched  # another call that is about to arrive
        assert log == []
        call_at(batched, torch.zeros(1, 2))
        assert log == ["idle"]
        with batcher.changed:
            del batcher.active_calls[-1]


def test_one_thread_at_a_time_runs_python_between_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyaccel.server.batching.step_batcher._SLOT_TIMEOUT_S", 60)
    batcher = StepBatcher(max_calls=4, max_wait_s=60)
    batched = BatchedForward(torch.nn.Identity(), batcher)
    running, peak = [0], [0]

    def use_slot() -> None:
        running[0] += 1
        peak[0] = max(peak[0], running[0])
        time.sleep(0.002)
        running[0] -= 1

    step_together(batched, 4, 6, use_slot)
    assert peak == [1]
    assert batcher.slot_owner is None
    assert batcher.gil_slot.acquire(blocking=False)


def test_the_slot_is_waited_for_as_long_as_threads_release_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout restarts with every release, so many threads that hold the slot briefly do not exceed it."""
    monkeypatch.setattr("anyaccel.server.batching.step_batcher._SLOT_TIMEOUT_S", 1)
    batcher = StepBatcher(max_calls=8)
    running, peak = [0], [0]

    def use_slot() -> None:
        batcher.acquire_gil_slot()
        running[0] += 1
        peak[0] = max(peak[0], running[0])
        time.sleep(0.15)
        running[0] -= 1
        batcher.release_gil_slot()

    with ThreadPoolExecutor(8) as threads:
        for future in [threads.submit(use_slot) for _ in range(8)]:
            future.result(60)
    assert peak == [1]


def test_a_blocked_slot_owner_does_not_block_other_calls() -> None:
    batcher = StepBatcher(max_calls=4, max_wait_s=0.01)
    batched = BatchedForward(torch.nn.Identity(), batcher)
    has_slot, other_done = threading.Event(), threading.Event()

    def wait() -> None:
        with batcher.participating(), torch.no_grad():
            call_at(batched, torch.zeros(1, 2))
            has_slot.set()
            assert other_done.wait(60), "the other call is blocked"

    def run() -> None:
        with batcher.participating(), torch.no_grad():
            assert has_slot.wait(60)
            call_at(batched, torch.zeros(1, 2))
            other_done.set()

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(wait), threads.submit(run)]:
            future.result(60)


@torch.no_grad()
def test_a_captured_graph_is_dropped_when_the_weights_change() -> None:
    """Graphs that were captured before batching stay in use beneath it until an adapter changes the weights."""
    pipe: Any = recipes()["stable-diffusion"].make()

    def record(function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        return function(), lambda: None

    capture = GraphCapture(pipe.unet, Recorder(record, warmup_runs=1), lambda: None)
    set_override(pipe.unet, Slot.CAPTURE, capture)
    capture.begin_call()
    inputs = {
        "sample": torch.ones(1, 4, 8, 8),
        "timestep": torch.tensor(1),
        "encoder_hidden_states": torch.ones(1, 7, 32),
    }
    for _ in range(3):
        pipe.unet(**inputs)
    assert capture.captured_shapes == 1
    shared = SharedPipeline(pipe)
    shared.drop_stale_captures()
    assert capture.captured_shapes == 1, "nothing changed"
    pipe.unet.conv_in.weight = torch.nn.Parameter(pipe.unet.conv_in.weight * 2)
    shared.drop_stale_captures()
    assert not capture.captured_shapes
    shared.close()


def test_a_decoder_call_does_not_take_the_gil_slot() -> None:
    batcher = StepBatcher(max_calls=4)
    decoder = BatchedForward(torch.nn.Identity(), batcher, is_denoiser=False)
    with batcher.participating(), torch.no_grad():
        call_at(decoder, torch.zeros(1, 2))
        assert batcher.slot_owner is None


@pytest.mark.parametrize("source", ["comparison", "device"])
def test_an_error_outside_the_model_fails_only_one_call(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that hits the error raises it, and the next call runs normally."""
    failing = [True]

    def fail() -> None:
        if failing[0]:
            failing[0] = False
            raise RuntimeError("out of memory")

    def can_join(*_: object) -> bool:
        fail()
        return True

    batcher = StepBatcher(max_calls=4, mark=lambda: lambda: None)
    batched = BatchedForward(torch.nn.Identity(), batcher)
    with batcher.participating(), torch.no_grad():
        for _ in range(2):
            call_at(batched, torch.zeros(1, 2))
        if source == "comparison":
            monkeypatch.setattr("anyaccel.server.batching.batched_args.CallArgs.can_join", can_join)
        else:
            batcher.enqueued[0] = replace(batcher.enqueued[0], wait=fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            call_at(batched, torch.zeros(1, 2))
        assert not batcher.busy
        assert batched.pending == []
        assert call_at(batched, torch.ones(1, 2)).tolist() == [[1.0, 1.0]]


def test_a_device_without_exact_events_runs_one_batch_at_a_time() -> None:
    log: list[str] = []
    batcher = StepBatcher(max_calls=4, mark=lambda: lambda: log.append(f"wait, busy: {batcher.busy}"), exact=False)
    batched = BatchedForward(torch.nn.Identity(), batcher)
    with batcher.participating(), torch.no_grad():
        for _ in range(3):
            call_at(batched, torch.zeros(1, 2))
            log.append("enqueued")
    assert log == ["enqueued", "wait, busy: True", "enqueued", "wait, busy: True", "enqueued"]


def test_shared_tensors_are_compared_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.equal` synchronizes with the device."""
    compared: list[bool] = []
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda left, right: compared.append(True) or equal(left, right))  # type: ignore[func-returns-value]
    rows, ids, other_ids = torch.zeros(1, 2), torch.arange(6.0).view(3, 2), torch.arange(6.0).view(3, 2)
    first, second = make_call_args((rows, ids), {}), make_call_args((rows, other_ids), {})
    assert first is not None
    assert second is not None
    assert [first.can_join(second) for _ in range(3)] == [True] * 3
    assert len(compared) == 1
    other_ids.add_(1)
    assert not first.can_join(second), "the tensor changed"


def test_a_batch_has_at_most_max_calls_calls() -> None:
    batcher = StepBatcher(max_calls=2, max_wait_s=60)
    batched = BatchedForward(torch.nn.Identity(), batcher)
    step_together(batched, 3, 4)
    assert batched.stats.sizes == {2: 4, 1: 4}, "the two oldest calls together, then the third"


def test_a_call_in_reserve_replaces_only_a_missing_one() -> None:
    batcher = StepBatcher(max_calls=2)
    batched = BatchedForward(torch.nn.Identity(), batcher)
    call_args = make_call_args((torch.zeros(1, 2),), {})
    assert call_args is not None
    batcher.active_calls = dict.fromkeys((1, 2, 3), batched)  # oldest first
    third, first, second = (_PendingCall(call_args, thread_id, enqueued_at=0.0) for thread_id in (3, 1, 2))
    batched.pending = [third, first]
    assert not batched._all_arrived(), "the second call is missing, although two are waiting"
    batched.pending = [first, second]
    assert batched._all_arrived(), "the third call is not needed"
    batched.pending = [third, first, second]
    assert batched._claim_batch() == [first, second], "the third call waits longest but is the newest"
    batched.pending = [third, second]
    assert batched._claim_batch() == [second, third]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({1: 1.0, 2: 1.9, 4: 4.0}, {2: 4, 1: 4}),  # a full batch of two has more throughput than four rows with three
        ({1: 1.0, 2: 1.9, 4: 2.0}, {3: 4}),  # four rows take barely longer than two: three calls and one padded row
    ],
)
def test_the_batch_size_with_the_highest_throughput_is_used(
    seconds: dict[int, float], expected: dict[int, int]
) -> None:
    class CheckedSize(torch.nn.Module):
        def forward(self, sample: torch.Tensor) -> torch.Tensor:
            assert sample.shape[0] in seconds, "a batch size that was not prepared"
            return sample + 1

    batcher = StepBatcher(max_calls=4, max_wait_s=60)
    batched = BatchedForward(CheckedSize(), batcher)
    batched.batch_seconds = seconds
    together = threading.Barrier(3)

    def move_to(model: BatchedForward | None) -> None:
        with batcher.changed:
            batcher.active_calls[threading.get_ident()] = model
            batcher.changed.notify_all()
        together.wait(60)

    def call(start: float) -> list[float]:
        sample, values = torch.full((1, 2), start), []
        with batcher.participating(), torch.no_grad():
            for _ in range(4):  # the barriers hold the three calls at the same step
                move_to(batched)
                sample = call_at(batched, sample)
                move_to(None)  # a call that was left out must not wait for the finished ones
                values.append(float(sample[0, 0]))
        return values

    with ThreadPoolExecutor(3) as threads:
        values = list(threads.map(call, (0.0, 10.0, 20.0)))
    assert values == [[start + step for step in (1, 2, 3, 4)] for start in (0.0, 10.0, 20.0)]
    assert batched.stats.sizes == expected
    assert not batched.pending


def test_an_interrupt_in_the_running_thread_does_not_end_other_calls() -> None:
    class InterruptOnce(torch.nn.Module):
        runs = 0

        def forward(self, sample: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            if self.runs == 1:
                raise KeyboardInterrupt
            return sample + 1

    batcher = StepBatcher(max_calls=3)
    batched, begin = BatchedForward(InterruptOnce(), batcher), threading.Barrier(3)

    def call(start: float) -> float | str:
        with batcher.participating(), torch.no_grad():
            with batcher.changed:
                batcher.active_calls[threading.get_ident()] = batched
            begin.wait(60)
            try:
                return float(call_at(batched, torch.full((1, 2), start))[0, 0])
            except KeyboardInterrupt:
                return "interrupted"

    starts = (0.0, 10.0, 20.0)
    with ThreadPoolExecutor(3) as threads:
        results = [future.result(60) for future in [threads.submit(call, start) for start in starts]]
    assert results.count("interrupted") == 1, results
    assert all(value in ("interrupted", start + 1) for value, start in zip(results, starts, strict=True)), results
    assert not batched.pending
    assert not batcher.busy


def test_without_a_mark_only_earlier_work_is_waited_for() -> None:
    waits: list[float] = []
    batcher = StepBatcher(max_calls=4, mark=lambda: lambda: waits.append(time.monotonic()))
    batched = BatchedForward(torch.nn.Identity(), batcher)
    with batcher.participating(), torch.no_grad():
        for _ in range(3):
            call_at(batched, torch.zeros(1, 2))
        assert len(waits) == 1
        batcher.mark = None
        for _ in range(3):
            call_at(batched, torch.zeros(1, 2))
    assert len(waits) == 2, "the work enqueued before"
    assert not batcher.busy
