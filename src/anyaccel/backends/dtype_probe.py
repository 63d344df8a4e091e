"""Ask a device itself what the sources disagree about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyaccel.backends.claim import Effect
from anyaccel.backends.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    import torch

__all__ = ["probe_dtype"]

# Each holds where the type is kept and is lost where it is narrowed to the next smaller one.
_TELLTALES: dict[str, tuple[complex, complex]] = {
    "float64": (1.0 + 2.0**-40, 1.0),
    "int64": (2**40 + 1, 1),
    "complex128": (complex(1.0 + 2.0**-40, 1.0), 1.0),
}
_PLAIN = (2.0, 1.0)


def probe_dtype(dtype: str, device: torch.device) -> Effect | None:
    """What happens to a number type on a device: None if it is kept, else `error`, `narrowed` or `wrong`.

    Two numbers go there, are added and read back. It tells of storage and addition, not of every kernel.
    """
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    left, right = (torch.tensor([value], dtype=kind) for value in _TELLTALES.get(dtype, _PLAIN))
    expected = left + right
    try:
        back = (left.to(device) + right.to(device)).cpu()
    except (TypeError, RuntimeError, ValueError, AssertionError) as error:
        if is_out_of_memory(error):  # a busy device is not one without the type
            raise
        return "error"
    if back.dtype != expected.dtype:
        return "narrowed"
    if torch.equal(back, expected):
        return None
    return "narrowed" if dtype in _TELLTALES else "wrong"
