"""A probe that tests whether a dtype works on a device.

It is used if a limit is conditional or its sources contradict each other. See
docs/decisions/0002-asking-the-device.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyaccel.backends.claim import Effect
from anyaccel.backends.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    import torch

__all__ = ["probe_dtype"]

# Values that the dtype can represent and the next smaller one cannot.
_PROBE_VALUES: dict[str, tuple[complex, complex]] = {
    "float64": (1.0 + 2.0**-40, 1.0),
    "int64": (2**40 + 1, 1),
    "complex128": (complex(1.0 + 2.0**-40, 1.0), 1.0),
}
_DEFAULT_VALUES = (2.0, 1.0)


def probe_dtype(dtype: str, device: torch.device) -> Effect | None:
    """Return how a dtype fails on a device (`error`, `narrowed` or `wrong`), or None if it works.

    The probe copies two values to the device, adds them and reads back the sum. It tests storage and
    addition, not every kernel.
    """
    import torch

    torch_dtype: torch.dtype = getattr(torch, dtype)
    left, right = (torch.tensor([value], dtype=torch_dtype) for value in _PROBE_VALUES.get(dtype, _DEFAULT_VALUES))
    expected = left + right
    try:
        result = (left.to(device) + right.to(device)).cpu()
    except (TypeError, RuntimeError, ValueError, AssertionError) as error:
        if is_out_of_memory(error):  # a full device says nothing about the dtype
            raise
        return "error"
    if result.dtype != expected.dtype:
        return "narrowed"
    if torch.equal(result, expected):
        return None
    return "narrowed" if dtype in _PROBE_VALUES else "wrong"
