"""Errors of pipeline calls, converted to errors with a hint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from PIL import Image

from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.errors import AnyaccelError, UsageError, first_line
from anyaccel.generation.call_validation import find_default, find_missing_image
from anyaccel.generation.inputs import INPUT_OPTIONS
from anyaccel.runtime.introspection import plain_class

__all__ = ["translating_errors"]


@contextmanager
def translating_errors(pipe: Any, call: Mapping[str, Any]) -> Iterator[None]:
    """Convert out-of-memory errors, and errors that the arguments explain, to errors with a hint."""
    try:
        yield
    except AnyaccelError:
        raise
    except (RuntimeError, MemoryError, TypeError, ValueError, AttributeError, IndexError) as error:
        if is_out_of_memory(error):
            raise AnyaccelError(
                f"out of memory on {pipe.plan.device}: {first_line(error)}",
                hint="use a smaller image size, or a 16-bit dtype such as bfloat16",
            ) from error
        name = plain_class(pipe).__name__
        cause = None if isinstance(error, MemoryError) else _find_cause(pipe, call, error)
        if cause is not None:
            reason, hint = cause
            raise UsageError(f"{name} failed, probably because {reason}: {first_line(error)}", hint=hint) from error
        if isinstance(error, ValueError):
            raise UsageError(
                f"{name} rejected the call: {first_line(error)}", hint="correct the arguments or the inputs"
            ) from error
        raise


def _find_cause(pipe: Any, call: Mapping[str, Any], error: Exception) -> tuple[str, str] | None:
    """Return a likely cause of an error, and a hint."""
    # Image-to-image pipelines accept None as an input image and fail later, with an unrelated message.
    missing = None if isinstance(error, RuntimeError) else find_missing_image(pipe, call)
    if missing is not None:
        hint = f"add {INPUT_OPTIONS.get(missing, missing)} PATH (in Python {missing}=…)"
        return f"it requires an input image ({missing})", hint
    steps = call.get("num_inference_steps") or find_default(pipe, "num_inference_steps")
    strength = call.get("strength")
    if isinstance(steps, int) and isinstance(strength, int | float) and strength > 0 and steps * strength < 1:
        # diffusers denoises only this share of the steps.
        reason = f"a strength of {strength:g} leaves none of {steps} steps"
        minimum = math.ceil(1 / max(strength, 1e-6))  # of the smallest numbers, the reciprocal is infinite
        return reason, f"use at least {minimum} steps, or a higher strength"
    sizes = {name: value.size for name, value in call.items() if isinstance(value, Image.Image)}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {width}x{height}" for name, (width, height) in sizes.items())
        return f"the sizes of the input images differ ({listed})", "pass --size WxH (height= and width=) or resize them"
    return None
