"""Factories that fail, and one with a pipeline that fails on the CPU."""

import sys
from typing import Any

from tests.checking.bad_pipeline import BadPipeline, make

__all__ = ["make_exit", "make_raise", "make_that_fails_on_the_cpu"]


def make_exit() -> Any:
    """Exit, as a script would."""
    sys.exit(0)


def make_raise() -> Any:
    """Raise an error."""
    raise ValueError("in make")


class _Fails(BadPipeline):
    def __call__(self, num_inference_steps: int = 2, output_type: str = "np") -> Any:
        raise KeyError("boom")


def make_that_fails_on_the_cpu() -> Any:
    """Return a pipeline that fails on every device."""
    good = make()
    return _Fails(good.model, good.scheduler)
