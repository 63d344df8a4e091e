"""Names of the quirks that anyaccel handles in code.

A quirk with any other name must set `information_only`.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "CONVOLUTIONS_REORDER",
    "FLOAT32_ATTENTION",
    "HALF_KERNELS_MISSING",
    "HOST_NUMBER_OFFSET_IGNORED",
    "KNOWN_QUIRKS",
    "NON_CONTIGUOUS_ATTENTION",
    "UNINITIALISED_MEMORY_IS_NAN",
]

# Evidence files contain these strings: renaming a quirk would orphan existing evidence.
CONVOLUTIONS_REORDER: Final = "convolutions_reorder"
FLOAT32_ATTENTION: Final = "float32_attention"
HALF_KERNELS_MISSING: Final = "half_kernels_missing"
HOST_NUMBER_OFFSET_IGNORED: Final = "host_number_offset_ignored"
NON_CONTIGUOUS_ATTENTION: Final = "non_contiguous_attention"
UNINITIALISED_MEMORY_IS_NAN: Final = "uninitialised_memory_is_nan"

KNOWN_QUIRKS: Final = frozenset(
    {
        CONVOLUTIONS_REORDER,
        FLOAT32_ATTENTION,
        HALF_KERNELS_MISSING,
        HOST_NUMBER_OFFSET_IGNORED,
        NON_CONTIGUOUS_ATTENTION,
        UNINITIALISED_MEMORY_IS_NAN,
    }
)
