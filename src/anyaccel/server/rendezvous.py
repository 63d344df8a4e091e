"""Step batching: the calls of several requests meet at a model, run as one batch, and go on by themselves.

Each request runs its own pipeline call in a thread of its own, and the pipeline knows nothing of others. What is put
in the place of a model's forward holds a call back for as long as others are on their way to the same model: they are
joined row by row, at whatever timestep each is, and each gets its rows of the result. The thread that completes a round
runs it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch

from anyaccel.server.joining import Ticket, are_alike, join, make_ticket, split

__all__ = ["MeetingPlace", "Rendezvous", "Rounds"]

_LOG = logging.getLogger(__name__)

Run = Callable[..., Any]
_SHORTEST_S, _LONGEST_S = 0.005, 0.5
_RUNS = 4
"""Of a size of batch that is made ready: the first compiles, and the third is recorded."""


@dataclass
class _Waiting:
    """A call that waits for its round."""

    ticket: Ticket
    who: int
    since: float
    taken: bool = False
    done: bool = False
    result: Any = None
    error: BaseException | None = None


@dataclass
class Rounds:
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


class Rendezvous:
    """Where the calls of one pipeline's models meet: one lock, who is on the way to which model, and whether one runs.

    Nobody waits for another any longer than `patience_s` after the device became free; without one, than half of the
    time that the last round took.

    An accelerator is asked for a round and does it later. `wait` waits until it has: without it calls would run ahead
    of the device, and whoever comes would find the steps of all others asked for already.
    """

    def __init__(
        self, *, most_rows: int, patience_s: float | None = None, wait: Callable[[], None] | None = None
    ) -> None:
        self.most_rows, self.patience_s, self.wait = most_rows, patience_s, wait
        self.changed = threading.Condition()
        self.busy = False
        self.asked = False
        """Whether the device was asked for a round that it may not have done yet."""
        self.begun, self.free_since = 0.0, 0.0
        self.last_round_s = 0.0
        self.where: dict[int, MeetingPlace | None] = {}
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
            with self.changed:
                self.where.pop(who, None)
                self.changed.notify_all()

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
    def releasing(self) -> Iterator[None]:
        """Let go of the device after the block; it was taken already."""
        self.begun = time.monotonic()
        try:
            yield
        finally:
            with self.changed:
                self.asked = self.wait is not None
                self._free()

    def settle(self) -> None:
        """Wait until the device has done what it was asked for; whoever comes meanwhile goes into the next round.

        The lock is held when this is called, and is not while it waits.
        """
        self.busy, self.asked = True, False
        self.changed.release()
        try:
            if self.wait is not None:
                self.wait()
        finally:
            self.changed.acquire()
            self._free()

    def _free(self) -> None:
        self.busy, self.free_since = False, time.monotonic()
        self.last_round_s = self.free_since - self.begun
        self.changed.notify_all()


class MeetingPlace:
    """Stands in for one model's forward."""

    def __init__(self, module: torch.nn.Module, rendezvous: Rendezvous, *, joins: bool = True) -> None:
        self.module, self.rendezvous, self.joins = module, rendezvous, joins
        self.before: Any = vars(module).get("forward")
        """What stood in for the model's forward already, such as what is compiled or recorded."""
        self.run: Run = self.before if self.before is not None else MethodType(type(module).forward, module)
        self.waiting: list[_Waiting] = []
        self.heard: list[Ticket] | None = None
        """Where the arguments of the first run in each call are kept while somebody listens."""
        self.example: Ticket | None = None
        """A call that was seen, for rounds that are run ahead."""
        self.full_rows: dict[int, float] = {}
        """The sizes of batch that rounds have, and the seconds that one takes; none where a batch may be of any."""
        self.seen = Rounds()

    def remove(self) -> None:
        """Let the model's forward be what it was."""
        vars(self.module).pop("forward", None)
        if self.before is not None:
            self.module.forward = self.before

    def try_out(self, tickets: list[Ticket]) -> bool:
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
        wait = self.rendezvous.wait or (lambda: None)
        wait()
        start = time.monotonic()
        self.run(*args, **kwargs)
        wait()
        return time.monotonic() - start

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result for one call, by itself or among others."""
        there = self.rendezvous
        if not there.is_part() or torch.is_grad_enabled() or torch.compiler.is_compiling():
            with there.occupying():
                return self.run(*args, **kwargs)
        if self.heard is not None:
            self._listen(args, kwargs)
        ticket = make_ticket(args, kwargs) if self.joins else None
        if ticket is None:
            return self._run_alone(args, kwargs)
        one = _Waiting(ticket, threading.get_ident(), time.monotonic())
        self._enter(one)
        while not one.done:
            batch = self._await(one)
            if batch:
                self._run_round(batch)
        if one.error is not None:
            raise one.error
        return one.result

    def _listen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = self.rendezvous.where.get(threading.get_ident()) is not self
        ticket = make_ticket(args, kwargs) if first else None
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

    def _await(self, one: _Waiting) -> list[_Waiting]:
        """Wait until the call is in a round that another runs, or a round is this thread's to run: the calls in it.

        While a round runs, whoever comes joins the next one: it is put together when the device is free.
        """
        there = self.rendezvous
        with there.changed:
            while not one.done:
                left: float | None = None
                if not one.taken and not there.busy:
                    if there.asked:
                        there.settle()
                        continue
                    left = max(one.since, there.free_since) + there.find_patience() - time.monotonic()
                    if left <= 0 or self._all_here(one):
                        batch = self._take()
                        there.busy = True
                        return batch
                there.changed.wait(left)
        return []

    def _all_here(self, one: _Waiting) -> bool:
        """Whether nobody who was last at this model is still on the way, or no more would go into the round."""
        here = {other.who for other in self.waiting}
        coming = [who for who, place in self.rendezvous.where.items() if place is self and who not in here]
        rows = sum(other.ticket.rows for other in self.waiting if other.ticket.joins(one.ticket))
        return not coming or rows >= self.rendezvous.most_rows

    def _take(self) -> list[_Waiting]:
        """The call that waits longest and those that go with it, as many as fit and are worth it.

        Whoever is left out waits longest from then on, and goes into the next round, which may be another's to run.
        """
        first = self.waiting[0]
        group = [other for other in self.waiting if other.ticket.joins(first.ticket)]
        most = min(self.rendezvous.most_rows, self._find_size(sum(other.ticket.rows for other in group)))
        batch, rows = [first], first.ticket.rows
        for other in group[1:]:
            if rows + other.ticket.rows <= most:
                batch.append(other)
                rows += other.ticket.rows
        for other in batch:
            other.taken = True
            self.waiting.remove(other)
        return batch

    def _find_size(self, rows: int) -> int:
        """The size of batch in which most rows are done in a second: a larger one that is half empty may be slower."""
        if not self.full_rows:
            return rows
        return max(self.full_rows, key=lambda size: min(rows, size) / self.full_rows[size])

    def _run_round(self, batch: list[_Waiting]) -> None:
        with self.rendezvous.releasing():
            try:
                self._fill(batch)
            finally:
                with self.rendezvous.changed:
                    for one in batch:
                        one.done = True
                    self.seen.note(len(batch))

    def _fill(self, batch: list[_Waiting]) -> None:
        """Run a round, and where it fails as one each call by itself: the fault of one is not the others'."""
        try:
            rows = [one.ticket.rows for one in batch]
            full = next((size for size in self.full_rows if size >= sum(rows)), None)
            args, kwargs = join([one.ticket for one in batch], full)
            results = split(self.run(*args, **kwargs), rows if full is None else [*rows, full - sum(rows)])
            for one, result in zip(batch, results, strict=False):  # what it was filled up with is nobody's
                one.result = result
        except BaseException as error:  # noqa: BLE001 - every waiting call must hear of it
            if len(batch) == 1 or not isinstance(error, Exception):
                for one in batch:
                    one.error = error
                return
            for one in batch:
                self._fill([one])
