"""NVIDIA and AMD GPUs for data centers."""

from __future__ import annotations

from anyaccel.backends.citations import GB, GIB
from anyaccel.backends.sheet import Product

__all__ = ["INSTINCT", "NVIDIA"]

_MIG = "https://docs.nvidia.com/datacenter/tesla/mig-user-guide/supported-gpus.html"
_NIM = "https://docs.nvidia.com/nim/large-language-models/1.7.0/supported-models.html"
_AMD_GPUS = "https://github.com/ROCm/legacy-rocm-build/blob/develop/docs/reference/gpu-arch-specs.rst"
_OUR_H200 = "benchmarks/results/round_trip_cuda.json"
# Pages of the vendors with half-precision throughput and memory bandwidth.
_B200_FIGURES = "https://www.nvidia.com/en-us/data-center/hgx/"
_H200_FIGURES = "https://www.nvidia.com/en-us/data-center/h200/"
_H100_FIGURES = "https://www.nvidia.com/en-us/data-center/h100/"
_A100_FIGURES = "https://www.nvidia.com/en-us/data-center/a100/"
_L40S_FIGURES = "https://www.nvidia.com/en-us/data-center/l40s/"
_INSTINCT_FIGURES = "https://www.amd.com/en/products/specifications/accelerators.html"
_ONE_DIE = "Half of the GPU, which has 128 GiB on two dies; torch counts each die as a device."


def _nvidia(
    name: str,
    title: str,
    memory_bytes: int,
    per_server: int | None,
    source: str,
    reported_as: str,
    tflops: float | None = None,
    bandwidth_gb_s: int | None = None,
    figures_source: str = "",
) -> Product:
    measured = source == _OUR_H200
    return Product(
        name=name,
        title=title,
        memory_bytes=memory_bytes,
        per_server=per_server,
        software="a CUDA build of torch",
        reported_as=reported_as,
        half_precision_flops=None if tflops is None else tflops * 1e12,
        memory_bytes_per_s=None if bandwidth_gb_s is None else bandwidth_gb_s * 1e9,
        figures_source=figures_source,
        says="Memory size as reported by the device." if measured else "Nominal memory size.",
        source=source,
        evidence="hardware" if measured else "documented",
    )


def _instinct(
    name: str, title: str, memory_bytes: int, tflops: float, bandwidth_gb_s: int, says: str = "Nominal memory size."
) -> Product:
    return Product(
        name=name,
        title=title,
        memory_bytes=memory_bytes,
        per_server=None,
        software="a ROCm build of torch",
        reported_as=title.removeprefix("AMD Instinct "),
        half_precision_flops=tflops * 1e12,
        memory_bytes_per_s=bandwidth_gb_s * 1e9,
        figures_source=_INSTINCT_FIGURES,
        says=says,
        source=_AMD_GPUS,
        evidence="documented",
    )


NVIDIA = (
    _nvidia("b200", "NVIDIA B200", 180 * GB, 8, _MIG, r"\bB200\b", 2250, 8000, _B200_FIGURES),
    _nvidia("h200", "NVIDIA H200", 150_109_880_320, 8, _OUR_H200, r"\bH200\b", 989.5, 4800, _H200_FIGURES),
    _nvidia("h100", "NVIDIA H100 80 GB", 80 * GB, 8, _MIG, r"\bH100\b.*80GB", 989.5, 3350, _H100_FIGURES),
    _nvidia("a100-80gb", "NVIDIA A100 80 GB", 80 * GB, 8, _MIG, r"\bA100\b.*80GB", 312, 2039, _A100_FIGURES),
    _nvidia("a100-40gb", "NVIDIA A100 40 GB", 40 * GB, 8, _MIG, r"\bA100\b.*40GB", 312, 1555, _A100_FIGURES),
    _nvidia("l40s", "NVIDIA L40S", 48 * GB, None, _NIM, r"\bL40S\b", 362, 864, _L40S_FIGURES),
    _nvidia("a10g", "NVIDIA A10G", 24 * GB, None, _NIM, r"\bA10G\b"),
)

INSTINCT = (
    _instinct("mi355x", "AMD Instinct MI355X", 288 * GIB, 2516.6, 8000),
    _instinct("mi325x", "AMD Instinct MI325X", 256 * GIB, 1307.4, 6000),
    _instinct("mi300x", "AMD Instinct MI300X", 192 * GIB, 1307.4, 5300),
    _instinct("mi250x", "AMD Instinct MI250X", 64 * GIB, 191.5, 1638, _ONE_DIE),
)
