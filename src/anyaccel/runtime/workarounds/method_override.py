"""Temporary overrides of scheduler methods such as `scheduler.step`.

An override is a callable in the scheduler's `__dict__` that runs a list of wrappers around the
original method. It has the signature of the method, because pipelines inspect that signature for
`generator` and `eta`. The scheduler's class does not change, because pipelines check it.

Known limitation: `copy.copy` of a scheduler shares its `__dict__` values, so calling `step` on a
shallow copy made during a call advances the original. Diffusers pipelines use `copy.deepcopy`.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["MethodOverride", "MethodWrapper", "override_method"]

# Runs instead of a method: gets the scheduler, the next callable, and the arguments.
MethodWrapper = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def override_method(
    scheduler: Any, name: str, wrapper: MethodWrapper, *, in_deep_copies: bool = False
) -> Iterator[None]:
    """Wrap a scheduler method inside the `with` block; the wrapper added last is the outermost.

    Deep copies made inside the block have the original method, unless `in_deep_copies` is set.
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
        # A callback may have replaced the method during the block; do not undo that.
        if not override.wrappers and vars(scheduler).get(name) is override:
            del vars(scheduler)[name]
            if override.instance_method is not None:
                vars(scheduler)[name] = override.instance_method


class MethodOverride:
    """A scheduler method with wrappers around it; without wrappers, it runs the original method."""

    def __init__(self, scheduler: Any, name: str, instance_method: Any) -> None:
        # Weak: the scheduler holds this object, and a cycle would delay releasing it until a garbage collection.
        self._scheduler, self.name = weakref.ref(scheduler), name
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        original = self._get_scheduler()
        scheduler = memo.get(id(original), original)
        override = MethodOverride(scheduler, self.name, copy.deepcopy(self.instance_method, memo))
        override.wrappers = [entry for entry in self.wrappers if entry[1]]
        return override if override.wrappers else override._find_original(scheduler)

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickle contains the original method and loads without the wrappers.
        return _load_original, (self._get_scheduler(), self.name, self.instance_method)

    def _get_scheduler(self) -> Any:
        scheduler = self._scheduler()
        if scheduler is None:
            raise ReferenceError(f"the scheduler of this {self.name!r} method no longer exists")
        return scheduler

    def _find_original(self, scheduler: Any) -> Any:
        """Return the original method, looked up at call time so that patches to the class take effect."""
        if self.instance_method is not None:
            return self.instance_method
        return _load_original(scheduler, self.name, None)


def _bind(wrapper: MethodWrapper, scheduler: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: wrapper(scheduler, run, args, kwargs)


def _load_original(scheduler: Any, name: str, instance_method: Any) -> Any:
    """Return the instance's own method, or the class's method bound to the instance."""
    if instance_method is not None:
        return instance_method
    # Not `getattr`: that would find the override in the instance's `__dict__`.
    for base in type(scheduler).__mro__:
        if name in vars(base):
            return vars(base)[name].__get__(scheduler, type(scheduler))
    return type(scheduler).__getattr__(scheduler, name)  # a scheduler that delegates to another one
