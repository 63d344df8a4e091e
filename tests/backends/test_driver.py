"""Drivers: default behavior through the torch device module, and backend overrides.

The fake device modules have only the functions under test, with the vendors' names and signatures.
"""

from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from anyaccel.backends.claim import DtypeLimit, Yes
from anyaccel.backends.devices import cpu, cuda, hpu, mps, neuron, npu, xpu
from anyaccel.backends.devices.cpu import SHEET as CPU
from anyaccel.backends.driver import Driver, Memory
from anyaccel.backends.dtype_probe import probe_dtype
from anyaccel.backends.registry import Backend
from anyaccel.backends.sheet import Sheet
from anyaccel.errors import NotMeasurableError

CPU_DEVICE = torch.device("cpu")
CUDA_FP8 = cuda.CUDA.dtypes.float8_e4m3fn


def attach(backend: Backend, monkeypatch: pytest.MonkeyPatch, **functions: Any) -> Driver:
    module: Any = SimpleNamespace(**functions)
    driver = backend.driver(backend.sheet)

    def get_module(_: Driver) -> ModuleType:
        fake: ModuleType = module
        return fake

    monkeypatch.setattr(type(driver), "module", get_module)
    return driver


def test_mps_uses_its_own_memory_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = attach(
        mps.BACKEND,
        monkeypatch,
        recommended_max_memory=lambda: 40,
        driver_allocated_memory=lambda: 25,
        current_allocated_memory=lambda: 10,
        synchronize=lambda: None,
    )
    assert driver.memory(0) == Memory(used_bytes=10, free_bytes=15, total_bytes=40)
    driver.synchronize(0)


def test_neuron_synchronizes_before_reading_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def count(index: int) -> int:
        calls.append("count")
        return 9

    driver = attach(
        neuron.BACKEND,
        monkeypatch,
        synchronize=lambda: calls.append("synchronize"),
        get_device_properties=lambda index: SimpleNamespace(total_memory=24),
        memory_reserved=count,
        memory_allocated=lambda index: 5,
    )
    assert driver.memory(3) == Memory(used_bytes=5, free_bytes=15, total_bytes=24)
    assert calls == ["synchronize", "count"]


def test_empty_cache_without_a_caching_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    driver = attach(hpu.BACKEND, monkeypatch, synchronize=lambda: calls.append("synchronize"))
    driver.empty_cache()
    assert calls == []
    driver.synchronize(0)
    assert calls == ["synchronize"]


def test_missing_memory_figure_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = attach(npu.BACKEND, monkeypatch)
    with pytest.raises(
        NotMeasurableError, match=r"neither torch\.npu nor torch\.accelerator .* provides max_memory_allocated"
    ):
        driver.max_memory(0)


def test_manual_seed_seeds_the_cpu_and_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    driver = attach(npu.BACKEND, monkeypatch, manual_seed_all=seeds.append, manual_seed=lambda seed: 1 / 0)
    driver.manual_seed(7)
    assert seeds == [7]
    assert torch.initial_seed() == 7


def test_count_is_zero_if_the_runtime_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = attach(npu.BACKEND, monkeypatch, is_available=lambda: False, device_count=lambda: 8)
    assert driver.count() == 0


@pytest.mark.parametrize(
    ("reported", "product"), [("GAUDI", "gaudi1"), ("GAUDI2", "gaudi2"), ("GAUDI3", "gaudi3"), ("GAUDI4", None)]
)
def test_product_is_found_by_the_reported_name(
    reported: str, product: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = attach(hpu.BACKEND, monkeypatch, get_device_name=lambda index: reported)
    assert driver.product(0) == product


@pytest.mark.parametrize(
    ("sheet", "reported", "memory_gib", "product"),
    [
        (cuda.CUDA, "NVIDIA GeForce RTX 4090", 24, "rtx4090"),
        (cuda.CUDA, "NVIDIA GeForce RTX 4090 Laptop GPU", 16, "rtx4090-laptop"),
        (cuda.CUDA, "NVIDIA GeForce RTX 4070 Ti", 12, "rtx4070ti"),
        (cuda.CUDA, "NVIDIA GeForce RTX 4060 Ti", 7.6, "rtx4060ti-8gb"),
        (cuda.CUDA, "NVIDIA GeForce RTX 4060 Ti", 15.6, "rtx4060ti-16gb"),
        (cuda.CUDA, "NVIDIA GeForce RTX 3050 6GB Laptop GPU", 6, "rtx3050-laptop-6gb"),
        (cuda.CUDA, "NVIDIA GeForce RTX 2060", 6, None),
        (cuda.CUDA, "NVIDIA H200", 140, "h200"),
        (cuda.ROCM, "AMD Radeon RX 7900 XT", 20, "rx7900xt"),
        (cuda.ROCM, "AMD Radeon RX 7900 XTX", 24, "rx7900xtx"),
        (cuda.ROCM, "AMD Instinct MI300X", 192, "mi300x"),
        (xpu.SHEET, "Intel(R) Arc(TM) B580 Graphics", 12, "arc-b580"),
        (xpu.SHEET, "Intel(R) Arc(TM) A770 Graphics", 7.9, "arc-a770-8gb"),
        (xpu.SHEET, "Intel(R) Arc(TM) A770M Graphics", 16, "arc-a770m"),
        (xpu.SHEET, "Intel(R) Arc(TM) Pro B60 Graphics", 24, "arc-pro-b60"),
    ],
)
def test_gpu_is_found_by_its_name_and_memory_size(
    sheet: Sheet, reported: str, memory_gib: float, product: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = int(memory_gib * 2**30)
    driver = attach(
        Backend(sheet=sheet),
        monkeypatch,
        get_device_name=lambda index: reported,
        mem_get_info=lambda index: (total, total),
        memory_allocated=lambda index: 0,
    )
    assert driver.product(0) == product


@pytest.mark.parametrize("dtype", ["float64", "int64", "float32", "bfloat16", "complex64", "complex128"])
def test_cpu_supports_every_dtype(dtype: str) -> None:
    assert probe_dtype(dtype, CPU_DEVICE) is None


class NarrowTensor(torch.Tensor):
    """A tensor that is narrowed by a move to a device, like float64 on Gaudi: the value changes, the dtype does not."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        moved = func is torch.Tensor.to and isinstance(args[1], torch.device)
        return result.to(torch.float32).to(torch.float64) if moved and result.dtype == torch.float64 else result


@pytest.mark.parametrize(
    ("kind", "error", "effect"),
    [("narrow", None, "narrowed"), ("reject", TypeError("no float64"), "error")],
)
def test_probe_distinguishes_narrowing_from_an_error(
    kind: str, error: Exception | None, effect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = torch.tensor

    def reject(self: torch.Tensor, target: Any) -> torch.Tensor:
        if isinstance(target, torch.device) and error is not None:
            raise error
        return self

    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = original(*args, **kwargs)
        return tensor.as_subclass(NarrowTensor) if kind == "narrow" else tensor

    monkeypatch.setattr(torch, "tensor", create)
    if error is not None:
        monkeypatch.setattr(torch.Tensor, "to", reject)
    assert probe_dtype("float64", CPU_DEVICE) == effect


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("full"), RuntimeError("MPS backend out of memory (MPS allocated: 18 GB)")]
)
def test_probe_on_a_full_device_decides_nothing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(self: torch.Tensor, target: Any) -> torch.Tensor:
        raise error

    contradicted = DtypeLimit(
        says="Rejected.", source="https://x", evidence="documented", effect="narrowed", contradicted_by="https://y"
    )
    sheet = replace(CPU, dtypes=replace(CPU.dtypes, float64=contradicted))
    monkeypatch.setattr(torch.Tensor, "to", run_out)
    assert Driver(sheet).resolve_conditions(CPU_DEVICE).dtype("float64") == contradicted
    with pytest.raises(RuntimeError, match=str(error)[:20]):
        probe_dtype("float64", CPU_DEVICE)


def test_fp8_is_not_probed() -> None:
    assert isinstance(CUDA_FP8, DtypeLimit)
    sheet = replace(CPU, dtypes=replace(CPU.dtypes, float8_e4m3fn=replace(CUDA_FP8, contradicted_by="https://y")))
    assert Driver(sheet).resolve_conditions(CPU_DEVICE).dtype("float8_e4m3fn") == sheet.dtypes.float8_e4m3fn


@pytest.mark.parametrize(("current", "index"), [(2, 2), (torch.device("xpu", 5), 5), (torch.device("xpu"), 0)])
def test_current_device_may_be_an_integer_or_a_torch_device(
    current: object, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attach(npu.BACKEND, monkeypatch, current_device=lambda: current).current_index() == index


def test_memory_limit_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/sys/fs/cgroup/memory.max": "2000\n", "/sys/fs/cgroup/memory.current": "1500\n"}
    monkeypatch.setattr(cpu, "_read", lambda path: files.get(path, ""))
    memory = cpu.BACKEND.driver(CPU).memory(0)
    assert (memory.free_bytes, memory.total_bytes) == (500, 2000)


def test_contradicted_dtype_is_probed() -> None:
    contradicted = DtypeLimit(
        says="Rejected.", source="https://x", evidence="documented", effect="error", contradicted_by="https://y"
    )
    uncontradicted = replace(contradicted, contradicted_by="")
    sheet = replace(CPU, dtypes=replace(CPU.dtypes, float64=contradicted, int64=uncontradicted))
    resolved = Driver(sheet).resolve_conditions(CPU_DEVICE)
    assert isinstance(resolved.dtype("float64"), Yes)
    assert resolved.dtype("float64").evidence == "hardware"  # type: ignore[union-attr]
    assert resolved.dtype("int64") == uncontradicted, "an uncontradicted limit is not probed"
