"""Temporary overrides of scheduler methods such as `scheduler.step`.

An override is a callable in the scheduler's `__dict__` that runs a list of wrappers around the
original method. It has the signature of the method, because pipelines inspect that signature for
`generator` and `eta`. The scheduler's class does not change, because pipelines check it. Copies of
the scheduler have the original methods; deep copies can keep some wrappers.
"""

from __future__ import annotations

import copy
import inspect
import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from anyaccel.copied_state import STATE_KEY, replace_state_entries

__all__ = ["MethodOverride", "MethodWrapper", "override_method"]

# Runs instead of a method: gets the scheduler, the next callable, and the arguments.
MethodWrapper = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
# An attribute of copies, which adds wrappers to deep copies.
_COPIED_KEY = "_anyaccel_copied_overrides"


@contextmanager
def override_method(
    scheduler: Any, name: str, wrapper: MethodWrapper, *, in_deep_copies: bool = False
) -> Iterator[None]:
    """Wrap a scheduler method inside the `with` block; the wrapper added last is the outermost.

    Copies made inside the block have the original method; deep copies have the wrapper if
    `in_deep_copies` is set.
    """
    override = vars(scheduler).get(name)
    if not isinstance(override, MethodOverride) or override.scheduler() is not scheduler:
        override = vars(scheduler)[name] = MethodOverride(scheduler, name, override)
    if not isinstance(vars(scheduler).get(STATE_KEY), _SchedulerState):
        vars(scheduler)[STATE_KEY] = _SchedulerState(scheduler)
    entry = (wrapper, in_deep_copies)
    override.wrappers.append(entry)
    try:
        yield
    finally:
        override.wrappers.remove(entry)
        # A callback may have replaced the method during the block; do not undo that.
        if not override.wrappers and vars(scheduler).get(name) is override:
            del vars(scheduler)[name]
            if override.instance_method is not None:
                vars(scheduler)[name] = override.instance_method
        if not _find_overrides(scheduler):
            vars(scheduler).pop(STATE_KEY, None)


class MethodOverride:
    """A scheduler method with wrappers around it; without wrappers, it runs the original method."""

    def __init__(self, scheduler: Any, name: str, instance_method: Any) -> None:
        # Weak: the scheduler holds this object, and a cycle would delay releasing it until a garbage collection.
        self.scheduler, self.name = weakref.ref(scheduler), name
        self.instance_method = instance_method
        """The callable that a user set on this scheduler; None if the method is defined by the class."""
        self.wrappers: list[tuple[MethodWrapper, bool]] = []
        method = instance_method or getattr(type(scheduler), name, None)
        self.__name__, self.__doc__ = name, getattr(method, "__doc__", None)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._find_original(self._get_scheduler()))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original method through all wrappers."""
        scheduler = self._get_scheduler()
        run = self._find_original(scheduler)
        for wrapper, _ in self.wrappers:
            run = _bind(wrapper, scheduler, run)
        return run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> MethodOverride:
        # Reached only by a copy of the scheduler's `__dict__`, which StableDiffusionPanoramaPipeline restores later.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickle contains the original method and loads without anyaccel.
        if self.instance_method is not None:
            return operator.itemgetter(0), ((self.instance_method,),)
        return getattr, (self._get_scheduler(), self.name)

    def _get_scheduler(self) -> Any:
        scheduler = self.scheduler()
        if scheduler is None:
            raise ReferenceError(f"the scheduler of this {self.name!r} method no longer exists")
        return scheduler

    def _find_original(self, scheduler: Any) -> Any:
        """Return the original method, looked up at call time so that patches to the class take effect."""
        if self.instance_method is not None:
            return self.instance_method
        # Not `getattr`: that would find the override in the instance's `__dict__`.
        for base in type(scheduler).__mro__:
            if self.name in vars(base):
                return vars(base)[self.name].__get__(scheduler, type(scheduler))
        return type(scheduler).__getattr__(scheduler, self.name)  # a scheduler that delegates to another one


class _SchedulerState:
    """Callable that returns the state of a scheduler for a copy or a pickle: with the original methods."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = weakref.ref(scheduler)

    def __call__(self) -> Any:
        scheduler = self.scheduler()
        overrides = _find_overrides(scheduler)
        kept = [override for override in overrides if any(in_copies for _, in_copies in override.wrappers)]
        return replace_state_entries(
            scheduler,
            {
                **{override.name: override.instance_method for override in overrides},
                _COPIED_KEY: _CopiedOverrides(kept) if kept else None,
            },
        )


class _CopiedOverrides:
    """The overrides that deep copies of a scheduler have; shallow copies and pickles ignore them."""

    def __init__(self, overrides: list[MethodOverride]) -> None:
        self.overrides = overrides

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        for override in self.overrides:
            scheduler = memo.get(id(override.scheduler()))
            if scheduler is None:  # a deep copy of a shallow copy
                return
            instance_method = copy.deepcopy(override.instance_method, memo)
            copied = MethodOverride(scheduler, override.name, instance_method)
            copied.wrappers = [entry for entry in override.wrappers if entry[1]]
            vars(scheduler)[override.name] = copied

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # so a pickle loads without anyaccel


def _find_overrides(scheduler: Any) -> list[MethodOverride]:
    return [
        value
        for value in vars(scheduler).values()
        if isinstance(value, MethodOverride) and value.scheduler() is scheduler
    ]


def _bind(wrapper: MethodWrapper, scheduler: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: wrapper(scheduler, run, args, kwargs)
