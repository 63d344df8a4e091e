"""AMD Radeon RX 7000 and 9000 series, for desktops and laptops."""

from __future__ import annotations

from anyaccel.backends.citations import GIB
from anyaccel.backends.sheet import Product

__all__ = ["RADEON", "RX_7000"]

_SOURCE = "https://www.amd.com/en/products/specifications/graphics.html"

# Name, title, GiB of memory, GB/s of memory bandwidth, dense half-precision TFLOPS of matrix operations.
_ROWS: tuple[tuple[str, str, int, int | None, float | None], ...] = (
    ("rx9070xt", "RX 9070 XT", 16, 640, 195.0),
    ("rx9070", "RX 9070", 16, 640, 145.0),
    ("rx9070gre", "RX 9070 GRE", 12, 432, None),
    ("rx9060xt-16gb", "RX 9060 XT", 16, 320, 103.0),
    ("rx9060xt-8gb", "RX 9060 XT", 8, 320, 103.0),
    ("rx9060", "RX 9060", 8, 288, None),
    ("rx7900xtx", "RX 7900 XTX", 24, 960, 122.8),
    ("rx7900xt", "RX 7900 XT", 20, 800, 103.0),
    ("rx7900gre", "RX 7900 GRE", 16, 576, 92.0),
    ("rx7800xt", "RX 7800 XT", 16, 624, 74.7),
    ("rx7700xt", "RX 7700 XT", 12, 432, 70.3),
    ("rx7600xt", "RX 7600 XT", 16, 288, 45.1),
    ("rx7600", "RX 7600", 8, 288, 43.5),
    # For laptops. The clock depends on the power limit, so there is no throughput.
    ("rx7900m", "RX 7900M", 16, None, None),
    ("rx7800m", "RX 7800M", 12, None, None),
    ("rx7700s", "RX 7700S", 8, None, None),
    ("rx7600m-xt", "RX 7600M XT", 8, None, None),
    ("rx7600m", "RX 7600M", 8, None, None),
    ("rx7600s", "RX 7600S", 8, None, None),
)


def _radeon(name: str, title: str, memory_gib: int, bandwidth_gb_s: int | None, tflops: float | None) -> Product:
    size = f" {memory_gib} GB" if name.endswith("gb") else ""
    return Product(
        name=name,
        title=f"AMD Radeon {title}{size}",
        memory_bytes=memory_gib * GIB,
        per_server=None,
        software="a ROCm build of torch",
        reported_as=rf"{title}$",
        half_precision_flops=None if tflops is None else tflops * 1e12,
        memory_bytes_per_s=None if bandwidth_gb_s is None else bandwidth_gb_s * 1e9,
        says="Nominal memory size.",
        source=_SOURCE,
        evidence="documented",
    )


RADEON = tuple(_radeon(*row) for row in _ROWS)
RX_7000 = tuple(product.name for product in RADEON if product.name.startswith("rx7"))
"""The products of the architecture gfx11."""
