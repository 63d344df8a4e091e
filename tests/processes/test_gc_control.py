"""The garbage collector: pauses, exempt objects, and reference cycles."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from anyaccel.processes.gc_control import gc_paused, ignore_existing_objects, release_unreachable


class Cycle:
    """An object that references itself."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def restore_collector() -> Iterator[None]:
    """Restore the collector's state."""
    was_enabled = gc.isenabled()
    yield
    gc.unfreeze()
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("before", [True, False])
def test_pause_restores_the_previous_state(before: bool) -> None:
    (gc.enable if before else gc.disable)()
    with gc_paused():
        assert not gc.isenabled()
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() is before
    with pytest.raises(ZeroDivisionError), gc_paused():
        1 / 0  # noqa: B018
    assert gc.isenabled() is before


def test_release_frees_cycles_and_optionally_exempt_ones() -> None:
    with gc_paused():
        plain = weakref.ref(Cycle())
        assert plain() is not None
        release_unreachable()
        assert plain() is None
        exempt = weakref.ref(Cycle())
        ignore_existing_objects()
        release_unreachable()
        assert exempt() is not None
        release_unreachable(also_ignored=True)
        assert exempt() is None
