"""Calls that meet at a model: joined step by step, each picture is the one that it would have been alone."""

import functools
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch

from anyaccel.backends.driver import Recorder
from anyaccel.forward_overrides import Slot, get_override, remove_override, set_override
from anyaccel.recipes import recipes
from anyaccel.runtime.pipeline import place
from anyaccel.runtime.speed.graph_capture import GraphCapture
from anyaccel.runtime.workarounds.nan_check import Mark
from anyaccel.server.batching.batched_args import join, make_call_args, split
from anyaccel.server.batching.shared_pipeline import SharedPipeline
from anyaccel.server.batching.step_batcher import BatchedForward, StepBatcher, _Waiting


def make_call(name: str, seed: int, steps: int) -> dict[str, Any]:
    call = {**recipes()[name].call(), "num_inference_steps": steps}
    return {**call, "generator": torch.Generator().manual_seed(seed)}


def begin_together(shared: SharedPipeline, model: str, calls: int) -> None:
    """Let so many calls wait for one another before their first step: from then on each waits for all by itself."""
    meeting, first, seen = shared.meetings[model], threading.Barrier(calls), set[int]()

    def wait_first(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        who = threading.get_ident()
        if who not in seen:
            seen.add(who)
            with shared.rendezvous.changed:
                shared.rendezvous.where[who] = meeting  # on the way there: the others will not begin without it
                shared.rendezvous.changed.notify_all()
            first.wait(60)
        return forward(*args, **kwargs)

    set_override(meeting.module, Slot.RECORDING, wait_first)


def call_at(meeting: BatchedForward, *args: Any) -> Any:
    """Call a model as its override does."""
    return meeting(meeting.run, args, {})


def step_together(meeting: BatchedForward, calls: int, steps: int, between: Callable[[], None] = lambda: None) -> None:
    """Let so many calls take so many steps, with something to do after each; none begins before all are there."""
    there, begin = meeting.rendezvous, threading.Barrier(calls)

    def call() -> None:
        with there.taking_part(), torch.no_grad():
            with there.changed:
                there.where[threading.get_ident()] = meeting
            begin.wait(60)
            for _ in range(steps):
                call_at(meeting, torch.zeros(1, 2))
                between()

    with ThreadPoolExecutor(calls) as threads:
        for one in [threads.submit(call) for _ in range(calls)]:
            one.result(60)


def mark_in(seen: list[str]) -> Mark:
    """Marks that are counted; whoever waits for one is written down."""
    marks = itertools.count(1)
    return lambda: functools.partial(seen.append, f"wait for {next(marks)}")


def pixels(made: Any) -> Any:
    return numpy.asarray(made.images if hasattr(made, "images") else made.frames)


@pytest.mark.parametrize(
    "name", ["stable-diffusion", "flux", "stable-diffusion-3", "pixart-alpha", "stable-diffusion-xl"]
)
def test_each_picture_is_what_it_would_be_alone(name: str) -> None:
    pipe = place(recipes()[name].make(), "cpu", dtype="float32")
    pipe.set_progress_bar_config(disable=True)
    asked = [(0, 6), (1, 4), (2, 8), (3, 6)]
    denoiser = "unet" if hasattr(pipe, "unet") else "transformer"
    runs: Counter[int] = Counter()
    alone: list[Any] = []
    counting = getattr(pipe, denoiser).register_forward_hook(lambda *_: runs.update([len(alone)]))
    for seed, steps in asked:
        alone.append(pixels(pipe(**make_call(name, seed, steps))))
    counting.remove()
    shared = SharedPipeline(pipe, patience_s=60.0)
    joins = shared.warm_up(make_call(name, 8, 2), make_call(name, 9, 2))
    assert joins[denoiser], joins
    begin_together(shared, denoiser, len(asked))
    with ThreadPoolExecutor(len(asked)) as threads:
        made = list(threads.map(lambda one: pixels(shared.run(make_call(name, *one))), asked))
    for one, other in zip(made, alone, strict=True):
        assert numpy.abs(one - other).max() < 1e-4
    seen = shared.meetings[denoiser].seen
    under_way = Counter(sum(count > past for count in runs.values()) for past in range(max(runs.values())))
    assert seen.sizes == under_way, "whoever was under way took part in every round"
    shared.close()
    assert get_override(getattr(pipe, denoiser), Slot.BATCHING) is None
    remove_override(getattr(pipe, denoiser), Slot.RECORDING)
    assert numpy.abs(pixels(pipe(**make_call(name, *asked[0]))) - alone[0]).max() < 1e-5


def test_one_that_fails_leaves_and_the_others_go_on() -> None:
    name = "stable-diffusion"
    pipe = place(recipes()[name].make(), "cpu", dtype="float32")
    pipe.set_progress_bar_config(disable=True)
    alone = pixels(pipe(**make_call(name, 1, 6)))
    shared = SharedPipeline(pipe, patience_s=5.0)
    shared.warm_up(make_call(name, 8, 2), make_call(name, 9, 2))

    def stop(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        if step == 1:
            raise RuntimeError("a client that went away")
        return values

    with ThreadPoolExecutor(2) as threads:
        failing = threads.submit(shared.run, {**make_call(name, 0, 6), "callback_on_step_end": stop})
        going = threads.submit(shared.run, make_call(name, 1, 6))
        with pytest.raises(RuntimeError, match="went away"):
            failing.result(60)
        assert numpy.abs(pixels(going.result(60)) - alone).max() < 1e-4
    assert not shared.rendezvous.where


def test_a_round_that_fails_as_one_is_run_call_by_call() -> None:
    pipe = place(recipes()["stable-diffusion"].make(), "cpu", dtype="float32")
    pipe.set_progress_bar_config(disable=True)
    shared = SharedPipeline(pipe, patience_s=60.0)
    shared.warm_up(make_call("stable-diffusion", 8, 2), make_call("stable-diffusion", 9, 2))
    begin_together(shared, "unet", 2)
    meeting = shared.meetings["unet"]
    plain, rows = meeting.run, []

    def run(sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows.append(len(sample))
        if len(sample) > 2:
            raise torch.OutOfMemoryError("too many")
        return plain(sample, *args, **kwargs)

    meeting.run = run  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(lambda seed: shared.run(make_call("stable-diffusion", seed, 4)), (0, 1)))
    assert len(made) == 2
    assert max(rows) == 4, "they were tried as one"


def test_whoever_is_not_taking_part_runs_as_ever() -> None:
    pipe = place(recipes()["stable-diffusion"].make(), "cpu", dtype="float32")
    pipe.set_progress_bar_config(disable=True)
    expected = pixels(pipe(**make_call("stable-diffusion", 0, 2)))
    SharedPipeline(pipe, patience_s=60.0)
    assert numpy.abs(pixels(pipe(**make_call("stable-diffusion", 0, 2))) - expected).max() < 1e-5


def test_arguments_are_joined_row_by_row() -> None:
    shared = torch.arange(6).view(2, 3)

    def ticket(rows: int, time: float, **more: Any) -> Any:
        return make_call_args((torch.full((rows, 5), time), torch.tensor(time)), {"ids": shared.clone(), **more})

    first, second = ticket(1, 1.0), ticket(3, 2.0)
    assert first.joins(second)
    (values, times), kwargs = join([first, second])
    assert values.shape == (4, 5)
    assert times.tolist() == [1.0, 2.0, 2.0, 2.0]
    assert torch.equal(kwargs["ids"], shared)
    one, other = split((values, {"a": values + 1}), [1, 3])
    assert one[0].shape == (1, 5)
    assert other[1]["a"].shape == (3, 5)
    assert not first.joins(ticket(1, 1.0, scale=2)), "another argument"
    assert not ticket(1, 1.0, scale=1).joins(ticket(1, 1.0, scale=2))
    assert make_call_args((object(),), {}) is None
    nested = make_call_args((torch.zeros(1, 5),), {"more": {"ids": [shared]}, "scale": 1})
    assert nested is not None
    assert nested.joins(nested)
    assert not nested.joins(first)
    (again,), named = join([nested])
    assert torch.equal(again, torch.zeros(1, 5))
    assert named == {"more": {"ids": [shared]}, "scale": 1}
    other_ids = make_call_args((torch.zeros(1, 5), torch.tensor(0.0)), {"ids": shared + 1})
    assert other_ids is not None
    assert not first.joins(other_ids), "what they share is not the same"


def test_nobody_waits_for_one_that_is_elsewhere() -> None:
    pipe = place(recipes()["stable-diffusion"].make(), "cpu", dtype="float32")
    pipe.set_progress_bar_config(disable=True)
    shared = SharedPipeline(pipe, patience_s=60.0)
    shared.warm_up(make_call("stable-diffusion", 8, 2), make_call("stable-diffusion", 9, 2))
    inside, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        with shared.rendezvous.taking_part():
            inside.set()
            go_on.wait(60)

    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(wait)
        assert inside.wait(60)
        shared.run(make_call("stable-diffusion", 0, 4))
        go_on.set()
        slow.result(60)


def test_calls_do_not_run_ahead_of_a_device_that_does_its_work_later() -> None:
    """Whoever comes while another call is at its steps joins it, though its steps are asked for in no time."""
    steps, marks = 8, itertools.count(1)
    under_way = threading.Event()

    class Later(torch.nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return given + 1

    def mark() -> Callable[[], None]:
        return functools.partial(wait, next(marks))

    def wait(number: int) -> None:
        """The device is done with the second step when the other call has come."""
        if number == 2:
            under_way.set()
            with there.changed:
                assert there.changed.wait_for(lambda: len(meeting.waiting) == 2, 60)

    there = StepBatcher(most_calls=4, patience_s=60, mark=mark)
    meeting = BatchedForward(Later(), there)

    def call() -> torch.Tensor:
        made = torch.zeros(1, 2)
        with there.taking_part(), torch.no_grad():
            for _ in range(steps):
                made = call_at(meeting, made)
        return made

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(call)
        assert under_way.wait(60), "the calls run ahead of the device"
        second = threads.submit(call)
        assert first.result(60).tolist() == second.result(60).tolist() == [[float(steps)] * 2]
    assert meeting.seen.sizes == {1: 6, 2: 5}, "three steps of each alone, and all others together"
    assert not there.busy
    assert not there.asked, "nobody is there to wait for it"


def test_a_device_is_asked_for_a_round_while_it_does_the_one_before() -> None:
    seen: list[str] = []

    class Told(torch.nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            seen.append("run")
            return given

    there = StepBatcher(most_calls=4, mark=mark_in(seen))
    meeting = BatchedForward(Told(), there)
    with there.taking_part(), torch.no_grad():
        for _ in range(4):
            call_at(meeting, torch.zeros(1, 2))
    assert seen == ["run", "run", "wait for 1", "run", "wait for 2", "run"]


def test_a_decoder_keeps_no_round_from_being_asked_for() -> None:
    """It lies behind one round, and the next one behind both: the device does not stand idle after a decoder."""
    seen: list[str] = []
    there = StepBatcher(most_calls=4, mark=mark_in(seen))
    meeting = BatchedForward(torch.nn.Identity(), there)
    decoder = BatchedForward(torch.nn.Identity(), there, joins=False, steps=False)
    with there.taking_part(), torch.no_grad():
        call_at(meeting, torch.zeros(1, 2))
        call_at(decoder, torch.zeros(1, 2))
        call_at(meeting, torch.zeros(1, 2))
        assert seen == []
        call_at(meeting, torch.zeros(1, 2))
    assert seen == ["wait for 2"], "the first round, with the decoder behind it"


def test_a_call_that_is_missing_is_waited_for_until_the_device_is_idle() -> None:
    seen: list[str] = []
    there = StepBatcher(most_calls=4, patience_s=0, mark=lambda: lambda: seen.append("idle"))
    meeting = BatchedForward(torch.nn.Identity(), there)
    with there.taking_part(), torch.no_grad():
        call_at(meeting, torch.zeros(1, 2))
        with there.changed:
            there.where[-1] = meeting  # another call, on the way here
        assert seen == []
        call_at(meeting, torch.zeros(1, 2))
        assert seen == ["idle"]
        with there.changed:
            del there.where[-1]


def test_between_rounds_one_goes_on_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyaccel.server.batching.step_batcher._TURN_S", 60)
    there = StepBatcher(most_calls=4, patience_s=60)
    meeting = BatchedForward(torch.nn.Identity(), there)
    inside, most = [0], [0]

    def go_on() -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.002)
        inside[0] -= 1

    step_together(meeting, 4, 6, go_on)
    assert most == [1]
    assert there.whose is None
    assert there.turn.acquire(blocking=False)


def test_a_turn_is_waited_for_as_long_as_it_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are before, each by itself is short."""
    monkeypatch.setattr("anyaccel.server.batching.step_batcher._TURN_S", 1)
    there = StepBatcher(most_calls=8)
    inside, most = [0], [0]

    def go_on() -> None:
        there.take_turn()
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.15)
        inside[0] -= 1
        there.pass_on()

    with ThreadPoolExecutor(8) as threads:
        for one in [threads.submit(go_on) for _ in range(8)]:
            one.result(60)
    assert most == [1]


def test_one_that_waits_for_something_else_does_not_keep_the_turn() -> None:
    there = StepBatcher(most_calls=4, patience_s=0.01)
    meeting = BatchedForward(torch.nn.Identity(), there)
    has_the_turn, other_done = threading.Event(), threading.Event()

    def wait() -> None:
        with there.taking_part(), torch.no_grad():
            call_at(meeting, torch.zeros(1, 2))
            has_the_turn.set()
            assert other_done.wait(60), "the other cannot go on"

    def go_on() -> None:
        with there.taking_part(), torch.no_grad():
            assert has_the_turn.wait(60)
            call_at(meeting, torch.zeros(1, 2))
            other_done.set()

    with ThreadPoolExecutor(2) as threads:
        for one in [threads.submit(wait), threads.submit(go_on)]:
            one.result(60)


@torch.no_grad()
def test_a_graph_of_another_model_is_not_replayed() -> None:
    """Graphs that were captured before stay in use beneath the batching, and are dropped when adapters change."""
    pipe: Any = recipes()["stable-diffusion"].make()

    def record(function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        return function(), lambda: None

    capture = GraphCapture(pipe.unet, Recorder(record, warm=1), lambda: None)
    set_override(pipe.unet, Slot.CAPTURE, capture)
    capture.begin_call()
    given = {
        "sample": torch.ones(1, 4, 8, 8),
        "timestep": torch.tensor(1),
        "encoder_hidden_states": torch.ones(1, 7, 32),
    }
    for _ in range(3):
        pipe.unet(**given)
    assert capture.captured_shapes == 1
    shared = SharedPipeline(pipe)
    shared.renew()
    assert capture.captured_shapes == 1, "nothing changed"
    pipe.unet.conv_in.weight = torch.nn.Parameter(pipe.unet.conv_in.weight * 2)
    shared.renew()
    assert not capture.captured_shapes
    shared.close()


def test_a_call_that_is_decoded_does_not_take_the_turn() -> None:
    there = StepBatcher(most_calls=4)
    decoder = BatchedForward(torch.nn.Identity(), there, steps=False)
    with there.taking_part(), torch.no_grad():
        call_at(decoder, torch.zeros(1, 2))
        assert there.whose is None


@pytest.mark.parametrize("where", ["a comparison", "the device"])
def test_an_error_beside_the_model_is_one_call_s_alone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that meets it hears of it; nothing of it stays, and the next one runs."""
    broken = [True]

    def fail() -> None:
        if broken[0]:
            broken[0] = False
            raise RuntimeError("out of memory")

    def joins(*_: object) -> bool:
        fail()
        return True

    there = StepBatcher(most_calls=4, mark=lambda: lambda: None)
    meeting = BatchedForward(torch.nn.Identity(), there)
    with there.taking_part(), torch.no_grad():
        for _ in range(2):
            call_at(meeting, torch.zeros(1, 2))
        if where == "a comparison":
            monkeypatch.setattr("anyaccel.server.batching.batched_args.Ticket.joins", joins)
        else:
            there.asked[0] = replace(there.asked[0], wait=fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            call_at(meeting, torch.zeros(1, 2))
        assert not there.busy
        assert meeting.waiting == []
        assert call_at(meeting, torch.ones(1, 2)).tolist() == [[1.0, 1.0]]


def test_a_device_that_cannot_tell_how_far_it_is_has_one_round_at_a_time() -> None:
    seen: list[str] = []
    there = StepBatcher(most_calls=4, mark=lambda: lambda: seen.append(f"wait, busy: {there.busy}"), exact=False)
    meeting = BatchedForward(torch.nn.Identity(), there)
    with there.taking_part(), torch.no_grad():
        for _ in range(3):
            call_at(meeting, torch.zeros(1, 2))
            seen.append("asked")
    assert seen == ["asked", "wait, busy: True", "asked", "wait, busy: True", "asked"]


def test_what_calls_share_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device the host waits for the answer."""
    asked: list[bool] = []
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda one, other: asked.append(True) or equal(one, other))  # type: ignore[func-returns-value]
    rows, places, others = torch.zeros(1, 2), torch.arange(6.0).view(3, 2), torch.arange(6.0).view(3, 2)
    first, second = make_call_args((rows, places), {}), make_call_args((rows, others), {})
    assert first is not None
    assert second is not None
    assert [first.joins(second) for _ in range(3)] == [True] * 3
    assert len(asked) == 1
    others.add_(1)
    assert not first.joins(second), "it changed"


def test_a_round_has_no_more_calls_than_were_asked_for() -> None:
    there = StepBatcher(most_calls=2, patience_s=60)
    meeting = BatchedForward(torch.nn.Identity(), there)
    step_together(meeting, 3, 4)
    assert meeting.seen.sizes == {2: 4, 1: 4}, "the two that came first together, and then the third"


def test_who_came_beyond_a_full_batch_takes_the_place_of_one_that_is_missing() -> None:
    there = StepBatcher(most_calls=2)
    meeting = BatchedForward(torch.nn.Identity(), there)
    ticket = make_call_args((torch.zeros(1, 2),), {})
    assert ticket is not None
    there.where = dict.fromkeys((1, 2, 3), meeting)  # in the order of their coming
    third, first, second = (_Waiting(ticket, who, since=0.0) for who in (3, 1, 2))
    meeting.waiting = [third, first]
    assert not meeting._all_here(), "the second is needed, though two are here"
    meeting.waiting = [first, second]
    assert meeting._all_here(), "the third is not"
    meeting.waiting = [third, first, second]
    assert meeting._take() == [first, second], "the third waits longest, but came last"
    meeting.waiting = [third, second]
    assert meeting._take() == [second, third]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({1: 1.0, 2: 1.9, 4: 4.0}, {2: 4, 1: 4}),  # a full batch of two is quicker a call than three quarters of four
        ({1: 1.0, 2: 1.9, 4: 2.0}, {3: 4}),  # four take hardly longer than two: all go together, and one row is empty
    ],
)
def test_a_batch_is_as_large_as_pays(seconds: dict[int, float], expected: dict[int, int]) -> None:
    class Count(torch.nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            assert given.shape[0] in seconds, "a size that nobody made ready"
            return given + 1

    there = StepBatcher(most_calls=4, patience_s=60)
    meeting = BatchedForward(Count(), there)
    meeting.full_rows = seconds
    together = threading.Barrier(3)

    def go(where: BatchedForward | None) -> None:
        with there.changed:
            there.where[threading.get_ident()] = where
            there.changed.notify_all()
        together.wait(60)

    def call(start: float) -> list[float]:
        made, seen = torch.full((1, 2), start), []
        with there.taking_part(), torch.no_grad():
            for _ in range(4):  # nobody is a step ahead, so that three come to each
                go(meeting)
                made = call_at(meeting, made)
                go(None)  # whoever was left out need not wait for one that is through
                seen.append(float(made[0, 0]))
        return seen

    with ThreadPoolExecutor(3) as threads:
        made = list(threads.map(call, (0.0, 10.0, 20.0)))
    assert made == [[start + step for step in (1, 2, 3, 4)] for start in (0.0, 10.0, 20.0)]
    assert meeting.seen.sizes == expected
    assert not meeting.waiting


def test_what_ends_the_thread_that_runs_a_round_ends_no_other() -> None:
    class Once(torch.nn.Module):
        rounds = 0

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.rounds += 1
            if self.rounds == 1:
                raise KeyboardInterrupt
            return rows + 1

    there = StepBatcher(most_calls=3)
    meeting, begin = BatchedForward(Once(), there), threading.Barrier(3)

    def call(start: float) -> float | str:
        with there.taking_part(), torch.no_grad():
            with there.changed:
                there.where[threading.get_ident()] = meeting
            begin.wait(60)
            try:
                return float(call_at(meeting, torch.full((1, 2), start))[0, 0])
            except KeyboardInterrupt:
                return "interrupted"

    with ThreadPoolExecutor(3) as threads:
        made = [one.result(60) for one in [threads.submit(call, start) for start in (0.0, 10.0, 20.0)]]
    assert made.count("interrupted") == 1, made
    assert all(one in ("interrupted", start + 1) for one, start in zip(made, (0.0, 10.0, 20.0), strict=True)), made
    assert not meeting.waiting
    assert not there.busy


def test_a_device_that_is_no_longer_waited_for_is_not() -> None:
    waited: list[float] = []
    there = StepBatcher(most_calls=4, mark=lambda: lambda: waited.append(time.monotonic()))
    meeting = BatchedForward(torch.nn.Identity(), there)
    with there.taking_part(), torch.no_grad():
        for _ in range(3):
            call_at(meeting, torch.zeros(1, 2))
        assert len(waited) == 1
        there.mark = None
        for _ in range(3):
            call_at(meeting, torch.zeros(1, 2))
    assert len(waited) == 2, "what it was asked for before"
    assert not there.busy
