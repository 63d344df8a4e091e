"""The state of an object that `copy` and `pickle` read, without anyaccel's overrides of its methods.

An override in an object's `__dict__` refers to that object. A copy of the `__dict__` would therefore
run the method of the original. `copy.copy`, `copy.deepcopy` and `pickle` look up `__getstate__` on
the instance, so a callable of that name in the `__dict__` can leave the overrides out.
"""

from __future__ import annotations

from typing import Any

__all__ = ["STATE_KEY", "replace_state_entries"]

# The attribute that holds the callable.
STATE_KEY = "__getstate__"


def replace_state_entries(owner: Any, entries: dict[str, Any]) -> Any:
    """Return the state of an object, with other values for some attributes; None removes an attribute."""
    # The method of the class: `owner.__getstate__` is the callable that calls this function.
    get_state = getattr(type(owner), STATE_KEY, None)  # `object` has one since Python 3.11
    state = vars(owner) if get_state is None else get_state(owner)
    if not isinstance(state, dict):
        return state
    state = {name: value for name, value in state.items() if name not in entries and name != STATE_KEY}
    return state | {name: value for name, value in entries.items() if value is not None}
