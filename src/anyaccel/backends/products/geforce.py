"""NVIDIA GeForce RTX 30, 40 and 50 series, for desktops and laptops."""

from __future__ import annotations

from anyaccel.backends.citations import GIB
from anyaccel.backends.sheet import Product

__all__ = ["GEFORCE", "RTX_30"]

_DESKTOP_SOURCE = "https://www.nvidia.com/en-us/geforce/graphics-cards/compare/"
_LAPTOP_SOURCE = "https://www.nvidia.com/en-us/geforce/laptops/compare/"
# Dense half-precision FLOPs per CUDA core and clock, with float32 accumulation: NVIDIA's architecture papers state
# 71 TFLOPS for the RTX 3090, 165.2 for the RTX 4090 and 209.5 for the RTX 5090.
_FLOPS_PER_CORE = 4

# Name, title, GiB of memory, GB/s of memory bandwidth, CUDA cores, boost clock in GHz.
_DESKTOP = (
    ("rtx3050-6gb", "RTX 3050", 6, 168, 2304, 1.47),
    ("rtx3050-8gb", "RTX 3050", 8, 224, 2560, 1.78),
    ("rtx3060-8gb", "RTX 3060", 8, 240, 3584, 1.78),
    ("rtx3060-12gb", "RTX 3060", 12, 360, 3584, 1.78),
    ("rtx3060ti", "RTX 3060 Ti", 8, 448, 4864, 1.67),
    ("rtx3070", "RTX 3070", 8, 448, 5888, 1.73),
    ("rtx3070ti", "RTX 3070 Ti", 8, 608, 6144, 1.77),
    ("rtx3080-10gb", "RTX 3080", 10, 760, 8704, 1.71),
    ("rtx3080-12gb", "RTX 3080", 12, 912, 8960, 1.71),
    ("rtx3080ti", "RTX 3080 Ti", 12, 912, 10240, 1.67),
    ("rtx3090", "RTX 3090", 24, 936, 10496, 1.70),
    ("rtx3090ti", "RTX 3090 Ti", 24, 1008, 10752, 1.86),
    ("rtx4060", "RTX 4060", 8, 272, 3072, 2.46),
    ("rtx4060ti-8gb", "RTX 4060 Ti", 8, 288, 4352, 2.54),
    ("rtx4060ti-16gb", "RTX 4060 Ti", 16, 288, 4352, 2.54),
    ("rtx4070", "RTX 4070", 12, 504, 5888, 2.48),
    ("rtx4070-super", "RTX 4070 SUPER", 12, 504, 7168, 2.48),
    ("rtx4070ti", "RTX 4070 Ti", 12, 504, 7680, 2.61),
    ("rtx4070ti-super", "RTX 4070 Ti SUPER", 16, 672, 8448, 2.61),
    ("rtx4080", "RTX 4080", 16, 717, 9728, 2.51),
    ("rtx4080-super", "RTX 4080 SUPER", 16, 736, 10240, 2.55),
    ("rtx4090", "RTX 4090", 24, 1008, 16384, 2.52),
    ("rtx4090d", "RTX 4090 D", 24, 1008, 14592, 2.52),
    ("rtx5050", "RTX 5050", 8, 320, 2560, 2.57),
    ("rtx5060", "RTX 5060", 8, 448, 3840, 2.50),
    ("rtx5060ti-8gb", "RTX 5060 Ti", 8, 448, 4608, 2.57),
    ("rtx5060ti-16gb", "RTX 5060 Ti", 16, 448, 4608, 2.57),
    ("rtx5070", "RTX 5070", 12, 672, 6144, 2.51),
    ("rtx5070ti", "RTX 5070 Ti", 16, 896, 8960, 2.45),
    ("rtx5080", "RTX 5080", 16, 960, 10752, 2.62),
    ("rtx5090", "RTX 5090", 32, 1792, 21760, 2.41),
    ("rtx5090d", "RTX 5090 D", 32, 1792, 21760, 2.41),
)

# Name, title, GiB of memory. The clock depends on the power limit of the laptop, so there is no throughput.
_LAPTOP = (
    ("rtx3050-laptop-4gb", "RTX 3050", 4),
    ("rtx3050-laptop-6gb", "RTX 3050", 6),
    ("rtx3050ti-laptop", "RTX 3050 Ti", 4),
    ("rtx3060-laptop", "RTX 3060", 6),
    ("rtx3070-laptop", "RTX 3070", 8),
    ("rtx3070ti-laptop", "RTX 3070 Ti", 8),
    ("rtx3080-laptop-8gb", "RTX 3080", 8),
    ("rtx3080-laptop-16gb", "RTX 3080", 16),
    ("rtx3080ti-laptop", "RTX 3080 Ti", 16),
    ("rtx4050-laptop", "RTX 4050", 6),
    ("rtx4060-laptop", "RTX 4060", 8),
    ("rtx4070-laptop", "RTX 4070", 8),
    ("rtx4080-laptop", "RTX 4080", 12),
    ("rtx4090-laptop", "RTX 4090", 16),
    ("rtx5050-laptop", "RTX 5050", 8),
    ("rtx5060-laptop", "RTX 5060", 8),
    ("rtx5070-laptop", "RTX 5070", 8),
    ("rtx5070ti-laptop", "RTX 5070 Ti", 12),
    ("rtx5080-laptop", "RTX 5080", 16),
    ("rtx5090-laptop", "RTX 5090", 24),
)


def _desktop(name: str, title: str, memory_gib: int, bandwidth_gb_s: int, cores: int, boost_ghz: float) -> Product:
    return Product(
        name=name,
        title=_add_size(f"NVIDIA GeForce {title}", name),
        memory_bytes=memory_gib * GIB,
        per_server=None,
        software="a CUDA build of torch",
        reported_as=rf"{title}$",
        half_precision_flops=_FLOPS_PER_CORE * cores * boost_ghz * 1e9,
        memory_bytes_per_s=bandwidth_gb_s * 1e9,
        says=f"Nominal memory size; throughput computed from {cores} cores at {boost_ghz:.2f} GHz, with float32 "
        "accumulation.",
        source=_DESKTOP_SOURCE,
        evidence="documented",
    )


def _laptop(name: str, title: str, memory_gib: int) -> Product:
    return Product(
        name=name,
        title=_add_size(f"NVIDIA GeForce {title} Laptop GPU", name),
        memory_bytes=memory_gib * GIB,
        per_server=None,
        software="a CUDA build of torch",
        reported_as=rf"{title}( \d+GB)? Laptop GPU$",
        says="Nominal memory size; the clock and the throughput depend on the laptop.",
        source=_LAPTOP_SOURCE,
        evidence="documented",
    )


def _add_size(title: str, name: str) -> str:
    """Return the title with the memory size if the product exists with several sizes."""
    size = name.rpartition("-")[2]
    return f"{title} {size.removesuffix('gb')} GB" if size.endswith("gb") else title


GEFORCE = (*(_desktop(*row) for row in reversed(_DESKTOP)), *(_laptop(*row) for row in reversed(_LAPTOP)))
RTX_30 = tuple(product.name for product in GEFORCE if product.name.startswith("rtx30"))
"""The products with compute capability 8.6."""
