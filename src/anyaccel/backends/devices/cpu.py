"""The CPU backend: always available, correct in every dtype, and the reference for all other devices."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from anyaccel.backends.citations import (
    DIFFUSERS_TORCH_UTILS,
    INDUCTOR_CACHE,
    PYTORCH,
    TENSORS,
    TORCH_DISTRIBUTED,
    TORCH_INSTALL,
    TORCH_SOURCE,
    UV_TORCH,
)
from anyaccel.backends.claim import DtypeLimit, Quirk, Unknown, Yes
from anyaccel.backends.driver import Driver, Memory
from anyaccel.backends.installation import InstallCommand
from anyaccel.backends.quirks import HALF_KERNELS_MISSING
from anyaccel.backends.registry import Backend
from anyaccel.backends.requirement import VersionIs
from anyaccel.backends.sheet import Compiler, Distributed, DtypeOrder, Dtypes, Product, Sheet
from anyaccel.errors import NotMeasurableError

SHEET = Sheet(
    name="cpu",
    title="CPU",
    vendor="any",
    documentation="https://docs.pytorch.org/docs/stable/cpu.html",
    preference=0,
    can_be_virtual=False,
    is_host=True,
    unified_memory=True,
    dtypes=Dtypes(
        float64=Yes(says="Every operation supports float64.", source=TENSORS, evidence="documented"),
        int64=Yes(says="The default integer dtype of torch.", source=TENSORS, evidence="documented"),
        float32=Yes(says="The default dtype of torch.", source=TENSORS, evidence="documented"),
        float16=DtypeLimit(
            says="Without hardware support, half precision is about 500 times slower than float32 (2000 × 2000 "
            "matrix product: 61.8 s vs. 123 ms).",
            source=PYTORCH + "146508",
            evidence="hardware",
            effect="slow",
            hint="run in float32 unless a measurement on this CPU shows that half precision is faster",
            contradicted_by="https://github.com/pytorch/pytorch/releases/tag/v2.6.0",
        ),
        bfloat16=DtypeLimit(
            says="Fast only with AVX512-BF16, AMX or similar; otherwise about 500 times slower than float32.",
            source=PYTORCH + "146508",
            evidence="hardware",
            effect="slow",
            hint="run in float32 unless a measurement on this CPU shows that half precision is faster",
            contradicted_by=PYTORCH + "118499",
        ),
        complex64=Yes(says="Complex dtypes are supported.", source=TENSORS, evidence="documented"),
        complex128=Yes(says="Complex dtypes are supported.", source=TENSORS, evidence="documented"),
        float8_e4m3fn=DtypeLimit(
            says="Storage only: operations such as addition raise.",
            source=PYTORCH + "107087",
            evidence="hardware",
            effect="error",
            hint="store the weights in float8 and cast them to float32 for computation",
        ),
        float8_e5m2=DtypeLimit(
            says="Storage only: operations such as index_copy raise.",
            source=PYTORCH + "180855",
            evidence="hardware",
            effect="error",
            hint="store the weights in float8 and cast them to float32 for computation",
        ),
    ),
    default_dtypes=DtypeOrder(
        says="float32 is correct and fast on every CPU.",
        source=PYTORCH + "146508",
        evidence="hardware",
        order=("float32",),
    ),
    random_numbers=Yes(
        says="The CPU generator can draw the noise for every device.",
        source="https://docs.pytorch.org/docs/stable/notes/randomness.html",
        evidence="documented",
    ),
    data_dependent_shapes=Yes(says="Data-dependent shapes are supported.", source=TENSORS, evidence="documented"),
    new_shapes=Yes(says="A new shape costs nothing in eager mode.", source=TENSORS, evidence="documented"),
    host_round_trip=Yes(
        says="No copy and no synchronization: the data is already in CPU memory.", source=TENSORS, evidence="documented"
    ),
    batches=Yes(
        says="The tests of every diffusers pipeline compare batched with single-image results on the CPU.",
        source="https://github.com/huggingface/diffusers/blob/v0.42.1/tests/pipelines/test_pipelines_common.py",
        evidence="documented",
    ),
    training=Yes(says="Supported by diffusers.", source=DIFFUSERS_TORCH_UTILS, evidence="documented"),
    memory=Unknown(says="No figure for the memory reserved by torch was found."),
    fused_attention=Yes(
        says="torch has a flash attention kernel for the CPU.",
        source=TORCH_SOURCE + "aten/src/ATen/native/cpu/FlashAttentionKernel.cpp",
        evidence="documented",
    ),
    largest_tensor=(Yes(says="Sizes and indices are 64 bits wide.", source=TENSORS, evidence="documented"),),
    quirks=(
        Quirk(
            name=HALF_KERNELS_MISSING,
            says="A few operations have no half-precision kernel, such as LocalResponseNorm in float16.",
            source=PYTORCH + "171948",
            evidence="hardware",
            effect="error",
            hint="run in float32",
        ),
    ),
    compiler=Compiler(
        says="torch.compile generates C++ code and requires a C++ compiler.",
        source=INDUCTOR_CACHE,
        evidence="documented",
        backend="inductor",
        dynamic=True,
        fullgraph=False,
        modes=("default", "reduce-overhead", "max-autotune"),
        cache_variable="TORCHINDUCTOR_CACHE_DIR",
        cache_default="torchinductor_$USER in the temporary directory",
    ),
    distributed=Distributed(
        says="gloo is torch's backend for the CPU.", source=TORCH_DISTRIBUTED, evidence="documented", backend="gloo"
    ),
    ray_resource="CPU",
    requirements=(
        VersionIs(
            subject="torch",
            wanted=">=2.6",
            hint=f'pip install "torch>=2.6" (to select a build: {TORCH_INSTALL})',
            says="anyaccel uses torch.accelerator, which was introduced in torch 2.6.",
            source="https://github.com/pytorch/pytorch/releases/tag/v2.6.0",
            evidence="documented",
        ),
    ),
    installation=(
        InstallCommand(
            command="uv pip install torch torchvision --torch-backend=cpu",
            systems=("Linux", "Windows"),
            says="The build without CUDA libraries.",
            source=UV_TORCH,
            evidence="documented",
        ),
        InstallCommand(
            command="pip install torch torchvision",
            systems=("Darwin",),
            says="The build on PyPI.",
            source=TORCH_INSTALL,
            evidence="documented",
        ),
    ),
    products=(
        Product(
            name="host",
            title="any CPU that torch runs on",
            memory_bytes=None,
            per_server=1,
            software="torch",
            says="Memory size of the machine.",
            source=TORCH_INSTALL,
            evidence="documented",
        ),
    ),
)


# cgroup v2, then v1: the limit and the usage.
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class CpuDriver(Driver):
    """Driver for the CPU.

    The CPU has no caching allocator and no streams. Memory figures come from the operating system.
    """

    def count(self) -> int:
        return 1

    def current_index(self) -> int:
        return 0

    def device_name(self, index: int) -> str:
        model = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
        return model[1] if model else platform.processor() or platform.machine()

    def memory(self, index: int) -> Memory:
        import psutil

        system = psutil.virtual_memory()
        total, free = system.total, system.available
        for limit_file, used_file in _CGROUPS:  # in a container, psutil reports the memory of the whole machine
            limit, used = _read(limit_file).strip(), _read(used_file).strip()
            if limit.isdigit() and used.isdigit() and int(limit) < total:
                total, free = int(limit), min(free, max(0, int(limit) - int(used)))
        return Memory(used_bytes=psutil.Process().memory_info().rss, free_bytes=free, total_bytes=total)

    def max_memory(self, index: int) -> int:
        peak = re.search(r"^VmHWM:\s+(\d+) kB$", _read("/proc/self/status"), re.MULTILINE)
        if peak is None:
            raise self._not_measurable()
        return int(peak[1]) * 1024

    def reset_peak_memory(self, index: int) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # 5 resets the peak of resident memory: man 5 proc
        except OSError as error:
            raise self._not_measurable() from error

    def _not_measurable(self) -> NotMeasurableError:
        return NotMeasurableError(
            f"the peak memory of the process cannot be measured on this system ({platform.system()})",
            hint='use anyaccel.memory("cpu") for the current memory usage',
        )


def _read(path: str) -> str:
    """Return the contents of a system file, or an empty string if it does not exist."""
    file = Path(path)
    return file.read_text() if file.is_file() else ""


BACKEND = Backend(sheet=SHEET, driver=CpuDriver)
