"""Step batching: the calls of several requests meet at a model, run as one batch, and go on by themselves.

Each request runs its own pipeline call in a thread of its own, and the pipeline knows nothing of others. What is put
in the place of a model's forward holds a call back for as long as others are on their way to the same model: they are
joined row by row, at whatever timestep each is, and each gets its rows of the result. The thread that completes a round
runs it.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from anyaccel.forward_overrides import Slot, run_beneath
from anyaccel.runtime.workarounds.nan_check import Mark
from anyaccel.server.batching.batched_args import CallArgs, are_alike, join, make_call_args, split

__all__ = ["BatchStats", "BatchedForward", "StepBatcher"]

_LOG = logging.getLogger(__name__)

RunJob = Callable[..., Any]
_SHORTEST_S, _LONGEST_S, _TURN_S = 0.005, 0.5, 0.005
_RUNS = 4
"""Of a size of batch that is made ready: the first compiles, and the third is recorded."""


@dataclass(eq=False)
class _Waiting:
    """A call that waits for its round."""

    ticket: CallArgs
    who: int
    since: float
    taken: bool = False
    done: bool = False
    answered: bool = False
    """Whether there is a result or an error."""
    result: Any = None
    error: Exception | None = None


@dataclass(frozen=True, eq=False)
class _Asked:
    """A round that a device was asked for, and whatever else until the next one."""

    begun: float
    wait: Callable[[], None]
    """Waits until it is done."""


@dataclass
class BatchStats:
    """What was run, for those who look."""

    rounds: int = 0
    calls: int = 0
    largest: int = 0
    alone: int = 0
    """Calls that could not be joined with any."""
    sizes: dict[int, int] = field(default_factory=dict)
    """How many rounds had so many calls."""

    def note(self, calls: int) -> None:
        """A round of so many calls was run."""
        self.rounds, self.calls, self.largest = self.rounds + 1, self.calls + calls, max(self.largest, calls)
        self.sizes[calls] = self.sizes.get(calls, 0) + 1


class StepBatcher:
    """Where the calls of one pipeline's models meet: one lock, who is on the way to which model, and whether one runs.

    Nobody waits for another any longer than `patience_s` after the device became free; without one, than half of the
    time that the last round took.

    An accelerator is asked for a round and does it later. `mark` notes how far it was asked, and gives what waits until
    it is there. Where that is exact, the device is asked for the next round while it does one, so that it never stands
    idle between two, but for no more: whoever comes would find the steps of all others asked for already.
    """

    def __init__(
        self, *, most_calls: int, patience_s: float | None = None, mark: Mark | None = None, exact: bool = True
    ) -> None:
        self.most_calls, self.patience_s, self.mark = most_calls, patience_s, mark
        self.ahead = 1 if exact else 0
        """Rounds that the device may have to do when it is asked for one more."""
        self.changed = threading.Condition()
        self.busy = False
        """Whether somebody asks the device for something, or the host does it."""
        self.asked: deque[_Asked] = deque(maxlen=2)
        """The last rounds that the device was asked for, unless it is known to have done them."""
        self.settling = False
        self.unsaid = False
        """Whether the device has done a round, and whoever waited for that has told nobody."""
        self.free_since, self.last_round_s = 0.0, 0.0
        self.turn = threading.Lock()
        self.whose: int | None = None
        """The call that has the turn."""
        self.turns = 0
        """How many had it."""
        self.where: dict[int, BatchedForward | None] = {}
        """Each call that is under way, with the model that it was last at."""

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """While the block runs, this thread's call counts as one that others may wait for."""
        who = threading.get_ident()
        with self.changed:
            self.where[who] = None
        try:
            yield
        finally:
            self.pass_on()
            with self.changed:
                self.where.pop(who, None)
                if not self.where:
                    self.asked.clear()
                self.changed.notify_all()

    def take_turn(self) -> None:
        """Wait for this thread's turn to go on after a round, or until it seems that whoever has it waits as well.

        All could go on at once, but Python runs one at a time: what they do between two rounds takes twice as long
        where each operation is another thread's.
        """
        before = -1
        while before != self.turns:
            before = self.turns
            if self.turn.acquire(timeout=_TURN_S):
                self.whose = threading.get_ident()
                return

    def pass_on(self) -> None:
        """Let the next one go on."""
        if self.whose == threading.get_ident():
            self.whose, self.turns = None, self.turns + 1
            self.turn.release()

    def is_part(self) -> bool:
        """Whether this thread's call takes part."""
        return threading.get_ident() in self.where

    def find_patience(self) -> float:
        """How long the device may stand idle for the sake of a fuller round."""
        if self.patience_s is not None:
            return self.patience_s
        return min(_LONGEST_S, max(_SHORTEST_S, self.last_round_s / 2))

    @contextmanager
    def occupying(self) -> Iterator[None]:
        """Wait for the device, and have it while the block runs."""
        with self.changed:
            while self.busy:
                self.changed.wait()
            self.busy = True
        with self.releasing():
            yield

    @contextmanager
    def releasing(self, *, is_round: bool = False) -> Iterator[None]:
        """Let go of the device after the block; it was taken already."""
        begun = time.monotonic()
        try:
            yield
        finally:
            with self.changed:
                self.busy = False
                self.changed.notify_all()
                if self.mark is None:
                    self._note_free(begun)
                elif self.where:
                    self._note_asked(begun, is_round=is_round)

    def _note_asked(self, begun: float, *, is_round: bool) -> None:
        """Mark how far the device was asked; what is no round, such as a decoder, keeps none from being asked for."""
        assert self.mark is not None
        if self.asked and not is_round:
            self.asked[-1] = replace(self.asked[-1], wait=self.mark())
        else:
            self.asked.append(_Asked(begun, self.mark()))

    def settle(self) -> None:
        """Wait until the device has done the first round that it was asked for; others may ask it for more meanwhile.

        Not where more is waited for than that. The lock is held when this is called, and is not while it waits.
        """
        first, self.settling, self.busy = self.asked[0], True, not self.ahead
        self.changed.release()
        try:
            first.wait()
        finally:
            self.changed.acquire()
            self.settling = False
            if not self.ahead:
                self.busy = False
            if self.asked and self.asked[0] is first:
                self.asked.popleft()
            self._note_free(first.begun)
            self.unsaid = True

    def tell(self) -> None:
        """Let others look whether they can go on, if the device has done something and this thread cannot."""
        if self.unsaid:
            self.unsaid = False
            self.changed.notify_all()

    def _note_free(self, begun: float) -> None:
        now = time.monotonic()
        self.last_round_s, self.free_since = now - max(begun, self.free_since), now


class BatchedForward:
    """The override of one model's forward."""

    def __init__(
        self, module: torch.nn.Module, rendezvous: StepBatcher, *, joins: bool = True, steps: bool = True
    ) -> None:
        self.module, self.rendezvous, self.joins = module, rendezvous, joins
        self.steps = steps
        """Whether calls come again after a round; if not, they may wait for the device next, and take no turns."""
        self.waiting: list[_Waiting] = []
        self.heard: list[CallArgs] | None = None
        """Where the arguments of the first run in each call are kept while somebody listens."""
        self.example: CallArgs | None = None
        """A call that was seen, for rounds that are run ahead."""
        self.full_rows: dict[int, float] = {}
        """The sizes of batch that rounds have, and the seconds that one takes; none where a batch may be of any."""
        self.seen = BatchStats()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward beneath this override, compiled or captured where it is."""
        return run_beneath(self.module, Slot.BATCHING, args, kwargs)

    def try_out(self, tickets: list[CallArgs]) -> bool:
        """Whether two calls give joined what they give alone."""
        if len(tickets) != 2 or not tickets[0].joins(tickets[1]):
            return False
        try:
            with torch.no_grad(), self.rendezvous.occupying():
                alone = [self.run(*one[0], **one[1]) for one in (join([ticket]) for ticket in tickets)]
                args, kwargs = join(tickets)
                joined = split(self.run(*args, **kwargs), [ticket.rows for ticket in tickets])
        except Exception as error:  # noqa: BLE001 - whatever it is, they are not joined
            _LOG.debug("anyaccel: %s is not joined: %r", type(self.module).__name__, error)
            return False
        return all(are_alike(one, other) for one, other in zip(joined, alone, strict=True))

    def prepare_rows(self, sizes: Sequence[int]) -> None:
        """Run rounds of so many calls ahead; from then on rounds are filled up to one of these sizes."""
        assert self.example is not None
        for calls in sizes:
            rows = calls * self.example.rows
            args, kwargs = join([self.example], rows)
            with torch.no_grad(), self.rendezvous.occupying():
                self.full_rows[rows] = min(self._time(args, kwargs) for _ in range(_RUNS))

    def _time(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        mark = self.rendezvous.mark or (lambda: lambda: None)
        mark()()
        start = time.monotonic()
        self.run(*args, **kwargs)
        mark()()
        return time.monotonic() - start

    def __call__(self, forward: RunJob, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the model's result for one call, by itself or among others."""
        there = self.rendezvous
        if not there.is_part() or torch.is_grad_enabled():
            with there.occupying():
                return forward(*args, **kwargs)
        there.pass_on()
        if self.heard is not None:
            self._listen(args, kwargs)
        ticket = make_call_args(args, kwargs) if self.joins else None
        if ticket is None:
            return self._run_alone(args, kwargs)
        one = _Waiting(ticket, threading.get_ident(), time.monotonic())
        self._enter(one)
        try:
            while not one.done:
                batch = self._await(one)
                if batch:
                    self._run_round(batch)
        finally:
            if not one.taken:
                self._leave(one)
        if self.steps:
            there.take_turn()
        if one.error is not None:
            raise one.error
        return one.result

    def _listen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = self.rendezvous.where.get(threading.get_ident()) is not self
        ticket = make_call_args(args, kwargs) if first else None
        if ticket is not None and self.heard is not None:
            self.heard.append(ticket)

    def _run_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        there = self.rendezvous
        with there.changed:
            there.where[threading.get_ident()] = self
            self.seen.alone += 1
            there.changed.notify_all()  # whoever waited for this one elsewhere need not
        with there.occupying():
            return self.run(*args, **kwargs)

    def _enter(self, one: _Waiting) -> None:
        there = self.rendezvous
        with there.changed:
            if there.where.get(one.who) is not self:
                there.where[one.who] = self
                there.changed.notify_all()  # whoever waited for this one elsewhere need not; those here see no change
            self.waiting.append(one)

    def _leave(self, one: _Waiting) -> None:
        """Whatever ended the wait, nobody is to count on the call any more."""
        with self.rendezvous.changed:
            if one in self.waiting:
                self.waiting.remove(one)
                self.rendezvous.changed.notify_all()

    def _await(self, one: _Waiting) -> list[_Waiting]:
        """Wait until the call is in a round that another runs, or a round is this thread's to run: the calls in it.

        Once all are here, a round is asked for while the device still does the one before. Until then they are waited
        for as long as it has something to do, and patiently after that.
        """
        there = self.rendezvous
        with there.changed:
            while not one.done:
                left: float | None = None
                if not one.taken and not there.busy:
                    ready = len(there.asked) <= there.ahead and self._all_here()
                    if there.asked and not ready:
                        if not there.settling:
                            there.settle()
                            continue
                    else:
                        left = max(one.since, there.free_since) + there.find_patience() - time.monotonic()
                        if ready or left <= 0:
                            batch = self._take()
                            there.busy, there.unsaid = True, False
                            return batch
                there.tell()
                there.changed.wait(left)
            there.tell()
        return []

    def _all_here(self) -> bool:
        """Whether nobody who was last at this model is still on the way, or at least nobody whom a full round needs."""
        here, where = {one.who for one in self.waiting}, self.rendezvous.where
        coming = {who for who, place in where.items() if place is self and who not in here}
        return not coming or (len(here) >= self.rendezvous.most_calls and not coming & self._list_regulars())

    def _list_regulars(self) -> set[int]:
        """Those that are under way longest, as many as go into a round; all others are in reserve."""
        return set(itertools.islice(self.rendezvous.where, self.rendezvous.most_calls))

    def _take(self) -> list[_Waiting]:
        """The call that waits longest and those that go with it, as many as fit and are worth it.

        Whoever is left out waits longest from then on, and goes into the next round, which may be another's to run. Who
        is in reserve takes the place of one that is missing, such as one that is decoded, and no other.
        """
        regulars = self._list_regulars()
        waiting = sorted(self.waiting, key=lambda one: one.who not in regulars)
        group = [one for one in waiting if one.ticket.joins(waiting[0].ticket)][: self.rendezvous.most_calls]
        most = self._find_size(sum(one.ticket.rows for one in group))
        batch, rows = [waiting[0]], waiting[0].ticket.rows
        for one in group[1:]:
            if rows + one.ticket.rows <= most:
                batch.append(one)
                rows += one.ticket.rows
        for one in batch:
            one.taken = True
            self.waiting.remove(one)
        return batch

    def _find_size(self, rows: int) -> int:
        """The size of batch in which most rows are done in a second: a larger one that is half empty may be slower."""
        if not self.full_rows:
            return rows
        return max(self.full_rows, key=lambda size: min(rows, size) / self.full_rows[size])

    def _run_round(self, batch: list[_Waiting]) -> None:
        there = self.rendezvous
        with there.releasing(is_round=self.steps):
            try:
                self._fill(batch)
            finally:
                with there.changed:
                    self.seen.note(len(batch))
                    for one in batch:
                        one.done = one.answered or one.who == threading.get_ident()
                    # What ends this thread, such as Ctrl-C, is its own: the others' round is another's to run.
                    left = [one for one in batch if not one.done]
                    for one in left:
                        one.taken = False
                    self.waiting += left

    def _fill(self, batch: list[_Waiting]) -> None:
        """Run a round, and where it fails as one each call by itself: the fault of one is not the others'."""
        try:
            rows = [one.ticket.rows for one in batch]
            full = next((size for size in self.full_rows if size >= sum(rows)), None)
            args, kwargs = join([one.ticket for one in batch], full)
            results = split(self.run(*args, **kwargs), rows if full is None else [*rows, full - sum(rows)])
            for one, result in zip(batch, results, strict=False):  # what it was filled up with is nobody's
                one.result, one.answered = result, True
        except Exception as error:  # noqa: BLE001 - every waiting call must hear of it
            if len(batch) == 1:
                batch[0].error, batch[0].answered = error, True
                return
            for one in batch:
                self._fill([one])
