"""Functions that fail to make a pipeline, and one whose pipeline fails on the CPU already."""

import sys
from typing import Any

from tests.checking.bad_pipeline import BadPipeline, make

__all__ = ["make_exit", "make_raise", "make_that_fails_on_the_cpu"]


def make_exit() -> Any:
    """Ends the process, as a script would."""
    sys.exit(0)


def make_raise() -> Any:
    """Fails."""
    raise ValueError("in make")


class _Fails(BadPipeline):
    def __call__(self, num_inference_steps: int = 2, output_type: str = "np") -> Any:
        raise KeyError("boom")


def make_that_fails_on_the_cpu() -> Any:
    """A pipeline that fails wherever it runs."""
    good = make()
    return _Fails(good.model, good.scheduler)
