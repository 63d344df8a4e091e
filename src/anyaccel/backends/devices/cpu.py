"""The host itself: always there, right in every type, and the yardstick for every other device."""

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
)
from anyaccel.backends.claim import DtypeLimit, Quirk, Yes
from anyaccel.backends.driver import Driver, Memory
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
        float64=Yes(says="Every operation takes float64.", source=TENSORS, evidence="documented"),
        int64=Yes(says="The default integer type of torch.", source=TENSORS, evidence="documented"),
        float32=Yes(says="The default type of torch.", source=TENSORS, evidence="documented"),
        float16=DtypeLimit(
            says="Without hardware for it, half precision is some 500 times slower than float32 (2000² product: "
            "123 ms against 61.8 s).",
            source=PYTORCH + "146508",
            evidence="hardware",
            effect="slow",
            hint="run in float32 unless a measurement on this processor says otherwise",
            contradicted_by="https://github.com/pytorch/pytorch/releases/tag/v2.6.0",
        ),
        bfloat16=DtypeLimit(
            says="Fast only with AVX512-BF16, AMX or their like; some 500 times slower than float32 without.",
            source=PYTORCH + "146508",
            evidence="hardware",
            effect="slow",
            hint="run in float32 unless a measurement on this processor says otherwise",
            contradicted_by=PYTORCH + "118499",
        ),
        complex64=Yes(says="Complex numbers are supported.", source=TENSORS, evidence="documented"),
        complex128=Yes(says="Complex numbers are supported.", source=TENSORS, evidence="documented"),
        float8_e4m3fn=DtypeLimit(
            says="Stored, but operations on it raise, such as addition.",
            source=PYTORCH + "107087",
            evidence="hardware",
            effect="error",
            hint="keep weights in it and cast them to float32 for use",
        ),
        float8_e5m2=DtypeLimit(
            says="Stored, but operations on it raise, such as index_copy.",
            source=PYTORCH + "180855",
            evidence="hardware",
            effect="error",
            hint="keep weights in it and cast them to float32 for use",
        ),
    ),
    default_dtypes=DtypeOrder(
        says="float32 is right and fast on every processor; half precision must earn its place by a measurement.",
        source=PYTORCH + "146508",
        evidence="hardware",
        order=("float32",),
    ),
    random_numbers=Yes(
        says="The host's generator is the one that every device's noise can be drawn from.",
        source="https://docs.pytorch.org/docs/stable/notes/randomness.html",
        evidence="documented",
    ),
    data_dependent_shapes=Yes(says="Shapes may depend on values.", source=TENSORS, evidence="documented"),
    new_shapes=Yes(says="A new shape costs nothing in eager mode.", source=TENSORS, evidence="documented"),
    host_round_trip=Yes(says="The host reads its own memory.", source=TENSORS, evidence="documented"),
    batches=Yes(
        says="diffusers compares batched with single images on the CPU in the tests of every pipeline.",
        source="https://github.com/huggingface/diffusers/blob/v0.42.1/tests/pipelines/test_pipelines_common.py",
        evidence="documented",
    ),
    training=Yes(says="diffusers trains on it.", source=DIFFUSERS_TORCH_UTILS, evidence="documented"),
    fused_attention=Yes(
        says="Flash attention has a kernel for the CPU.",
        source=TORCH_SOURCE + "aten/src/ATen/native/cpu/FlashAttentionKernel.cpp",
        evidence="documented",
    ),
    largest_tensor=(Yes(says="Sizes and indices are 64 bits wide.", source=TENSORS, evidence="documented"),),
    quirks=(
        Quirk(
            name=HALF_KERNELS_MISSING,
            says="A few operations have no half precision kernel, such as LocalResponseNorm in float16.",
            source=PYTORCH + "171948",
            evidence="hardware",
            effect="error",
            hint="run in float32",
        ),
    ),
    compiler=Compiler(
        says="torch.compile generates C++ and needs a C++ compiler.",
        source=INDUCTOR_CACHE,
        evidence="documented",
        backend="inductor",
        dynamic=True,
        fullgraph=False,
        modes=("default", "reduce-overhead", "max-autotune"),
        cache_variable="TORCHINDUCTOR_CACHE_DIR",
        cache_default="torchinductor_$USER in the folder for temporary files",
    ),
    distributed=Distributed(
        says="gloo is torch's backend for the CPU.", source=TORCH_DISTRIBUTED, evidence="documented", backend="gloo"
    ),
    ray_resource="CPU",
    requirements=(
        VersionIs(
            subject="torch",
            wanted=">=2.6",
            hint=f'pip install "torch>=2.6" (which build: {TORCH_INSTALL})',
            says="anyaccel uses torch.accelerator, which came with torch 2.6.",
            source="https://github.com/pytorch/pytorch/releases/tag/v2.6.0",
            evidence="documented",
        ),
    ),
    products=(
        Product(
            name="host",
            title="any processor that torch runs on",
            memory_bytes=None,
            per_server=1,
            software="torch",
            says="The host's own memory.",
            source=TORCH_INSTALL,
            evidence="documented",
        ),
    ),
)


_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class CpuDriver(Driver):
    """The host: no caching allocator, nothing to wait for, and memory counted by the system."""

    def count(self) -> int:
        return 1

    def current_index(self) -> int:
        return 0

    def device_name(self, index: int) -> str:
        model = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
        return model[1] if model else platform.processor() or platform.machine()

    def memory(self, index: int) -> Memory:
        import psutil

        host = psutil.virtual_memory()
        total, free = host.total, host.available
        for limit_file, used_file in _CGROUPS:  # a container's share, where it has one
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
            f"this system ({platform.system()}) does not let a process count its peak of memory anew",
            hint='anyaccel.memory("cpu") tells what is used now',
        )


def _read(path: str) -> str:
    """A file of the system's, or nothing where the system has none."""
    file = Path(path)
    return file.read_text() if file.is_file() else ""


BACKEND = Backend(sheet=SHEET, driver=CpuDriver)
