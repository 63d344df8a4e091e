"""Temporary overrides of a scheduler's methods: the only way that `scheduler.step` and its neighbours are replaced.

The class of a scheduler stays as it is, because pipelines compare it. An override is a callable in the scheduler's
`__dict__` that runs a list of wrappers around the original method and has its signature, which pipelines read for
`generator` and `eta`.

Known limitation: `copy.copy` of a scheduler shares its `__dict__` values, so a shallow copy that is made during a call
steps the original. diffusers' pipelines make deep copies.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["MethodOverride", "MethodWrapper", "override_method"]

MethodWrapper = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Runs instead of a method: gets the scheduler, the next callable to run, and the arguments."""


@contextmanager
def override_method(
    scheduler: Any, name: str, wrapper: MethodWrapper, *, in_deep_copies: bool = False
) -> Iterator[None]:
    """Run a wrapper around one method of a scheduler during the block; the last one added is the outermost.

    A deep copy that is made meanwhile has the original method, or also the wrapper if `in_deep_copies` is set.
    """
    override = vars(scheduler).get(name)
    if not isinstance(override, MethodOverride):
        override = vars(scheduler)[name] = MethodOverride(scheduler, name, override)
    entry = (wrapper, in_deep_copies)
    override.wrappers.append(entry)
    try:
        yield
    finally:
        override.wrappers.remove(entry)
        # Somebody may have replaced the method during the block: then theirs stays.
        if not override.wrappers and vars(scheduler).get(name) is override:
            del vars(scheduler)[name]
            if override.own is not None:
                vars(scheduler)[name] = override.own


class MethodOverride:
    """A method of one scheduler with wrappers around it; without wrappers it is the original method."""

    def __init__(self, scheduler: Any, name: str, own: Any) -> None:
        self._scheduler, self.name = weakref.ref(scheduler), name
        self.own = own
        """The callable that a user put on this scheduler; None if the method is its class's."""
        self.wrappers: list[tuple[MethodWrapper, bool]] = []
        self.__name__, self.__doc__ = name, getattr(own or getattr(type(scheduler), name, None), "__doc__", None)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._find_original(self._get_scheduler()))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrappers around the original method."""
        scheduler = self._get_scheduler()
        run = self._find_original(scheduler)
        for wrapper, _ in self.wrappers:
            run = _bind(wrapper, scheduler, run)
        return run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        original = self._get_scheduler()
        scheduler = memo.get(id(original), original)
        override = MethodOverride(scheduler, self.name, copy.deepcopy(self.own, memo))
        override.wrappers = [entry for entry in self.wrappers if entry[1]]
        return override if override.wrappers else override._find_original(scheduler)

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_original, (self._get_scheduler(), self.name, self.own)

    def _get_scheduler(self) -> Any:
        scheduler = self._scheduler()
        if scheduler is None:
            raise ReferenceError(f"the scheduler of this {self.name!r} method no longer exists")
        return scheduler

    def _find_original(self, scheduler: Any) -> Any:
        """Return the method as it is without overrides; a class that is patched later has its patch run."""
        return self.own if self.own is not None else _load_original(scheduler, self.name, None)


def _bind(wrapper: MethodWrapper, scheduler: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: wrapper(scheduler, run, args, kwargs)


def _load_original(scheduler: Any, name: str, own: Any) -> Any:
    """Return the method of a scheduler that is put on it, or of its class."""
    if own is not None:
        return own
    for kind in type(scheduler).__mro__:
        if name in vars(kind):
            return vars(kind)[name].__get__(scheduler, type(scheduler))
    return type(scheduler).__getattr__(scheduler, name)  # a scheduler that delegates to another one
