"""Intel Arc A and B series, for desktops, laptops and workstations."""

from __future__ import annotations

from anyaccel.backends.citations import GIB, PYTORCH
from anyaccel.backends.sheet import Product

__all__ = ["ARC", "ARC_A"]

_A_SERIES = "https://www.intel.com/content/www/us/en/ark/products/series/227957/intel-arc-a-series-graphics.html"
_B_SERIES = "https://www.intel.com/content/www/us/en/ark/products/series/240391/intel-arc-b-series-graphics.html"
_PRO_B60 = "https://www.intel.com/content/www/us/en/products/sku/243916/intel-arc-pro-b60-graphics/specifications.html"
_OPS = "https://github.com/intel/torch-xpu-ops/issues/"
_IPEX = "https://github.com/intel/intel-extension-for-pytorch/issues/"
_MIB = 2**20

# The memory size in bytes as reported by the device, and where.
_REPORTED = {
    "arc-a770": (15473 * _MIB, _IPEX + "519"),
    "arc-b580": (12216 * _MIB, _OPS + "3663"),
    "arc-pro-b60": (24480 * _MIB, _OPS + "5258"),
}

# Name, title, GiB of memory, GB/s of memory bandwidth, published int8 TOPS, source. Matrix engines compute half as many
# half-precision as int8 operations. The clock of laptop GPUs depends on the power limit, so they have no throughput.
_ROWS: tuple[tuple[str, str, int, int | None, int | None, str], ...] = (
    ("arc-pro-b70", "Arc Pro B70", 32, 608, 367, PYTORCH + "179891"),
    ("arc-pro-b60", "Arc Pro B60", 24, 456, 197, _PRO_B60),
    ("arc-pro-b50", "Arc Pro B50", 16, 224, 170, _B_SERIES),
    ("arc-b580", "Arc B580", 12, 456, 233, _B_SERIES),
    ("arc-b570", "Arc B570", 10, 380, 203, _B_SERIES),
    ("arc-a770", "Arc A770 16 GB", 16, 560, 262, _A_SERIES),
    ("arc-a770-8gb", "Arc A770 8 GB", 8, 512, 262, _A_SERIES),
    ("arc-a750", "Arc A750", 8, 512, 229, _A_SERIES),
    ("arc-a580", "Arc A580", 8, 512, 197, _A_SERIES),
    ("arc-a380", "Arc A380", 6, 186, 66, _A_SERIES),
    ("arc-a310", "Arc A310", 4, 124, None, _A_SERIES),
    ("arc-a770m", "Arc A770M", 16, None, None, _A_SERIES),
    ("arc-a730m", "Arc A730M", 12, None, None, _A_SERIES),
    ("arc-a570m", "Arc A570M", 8, None, None, _A_SERIES),
    ("arc-a550m", "Arc A550M", 8, None, None, _A_SERIES),
    ("arc-a370m", "Arc A370M", 4, None, None, _A_SERIES),
    ("arc-a350m", "Arc A350M", 4, None, None, _A_SERIES),
)


def _arc(name: str, title: str, memory_gib: int, bandwidth_gb_s: int | None, tops: int | None, source: str) -> Product:
    reported = _REPORTED.get(name)
    throughput = f" Half of the {tops} TOPS in int8 published by Intel." if tops else ""
    return Product(
        name=name,
        title=title,
        memory_bytes=reported[0] if reported else memory_gib * GIB,
        per_server=None,
        software="an XPU build of torch",
        reported_as=rf"\b{title.split()[-3 if title.endswith('GB') else -1]}\b",
        half_precision_flops=None if tops is None else tops / 2 * 1e12,
        memory_bytes_per_s=None if bandwidth_gb_s is None else bandwidth_gb_s * 1e9,
        figures_source=source if reported else "",
        says=("Memory size as reported by the device." if reported else "Nominal memory size.") + throughput,
        source=reported[1] if reported else source,
        evidence="hardware" if reported else "documented",
    )


ARC = tuple(_arc(*row) for row in _ROWS)
ARC_A = tuple(product.name for product in ARC if product.name.startswith("arc-a"))
"""The products of the architecture Alchemist, without float64."""
