"""Device-independent functions."""

import subprocess
import sys

import numpy
import pytest
import torch

import anyaccel
from anyaccel.errors import DeviceUnavailableError, NotMeasurableError, UnknownDtypeError, UsageError


@pytest.mark.parametrize(
    ("dtype", "device", "expected"),
    [
        (torch.float64, "mps", torch.float32),
        (torch.float64, torch.device("mps"), torch.float32),
        (torch.float64, torch.device("mps", 0), torch.float32),
        ("float64", "neuron:3", torch.float32),
        ("fp64", "npu", torch.float32),
        ("torch.float64", "npu", torch.float32),
        ("double", "npu", torch.float32),
        (torch.int64, "neuron", torch.int32),
        (torch.float64, "cuda", torch.float64),
        (torch.float64, "cpu", torch.float64),
        (torch.float64, "auto", torch.float64),
        (torch.int8, "mps", torch.int8),
        ("bf16", "hpu", torch.bfloat16),
    ],
)
def test_adjust_dtype(
    dtype: str | torch.dtype, device: str | torch.device, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYACCEL_DEVICE", "cpu")
    assert anyaccel.adjust_dtype(dtype, device) is expected


@pytest.mark.parametrize("dtype", ["float128", "", "Tensor", "flaot32"])
def test_unknown_dtype_raises(dtype: str) -> None:
    with pytest.raises(UnknownDtypeError, match="unknown dtype") as caught:
        anyaccel.adjust_dtype(dtype, "mps")
    assert "float32" in caught.value.hint


def test_randn_uses_the_generator() -> None:
    drawn = anyaccel.randn((2, 3), generator=torch.Generator().manual_seed(7), device="cpu")
    assert torch.equal(drawn, torch.randn((2, 3), generator=torch.Generator().manual_seed(7)))


def test_randn_draws_one_image_per_generator() -> None:
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2, 3)]
    batch = anyaccel.randn((3, 4, 8, 8), generator=generators)
    single = anyaccel.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(2))
    assert torch.equal(batch[1:2], single)


@pytest.mark.parametrize("dtype", ["float16", torch.bfloat16, "float64", "float8_e4m3fn"])
def test_randn_gives_the_same_noise_in_every_dtype(dtype: str | torch.dtype) -> None:
    full = anyaccel.randn((4, 16), generator=torch.Generator().manual_seed(7), dtype="float32")
    half = anyaccel.randn((4, 16), generator=torch.Generator().manual_seed(7), dtype=dtype)
    assert half.dtype == anyaccel.adjust_dtype(dtype, "cpu")
    assert torch.equal(half, full.to(half.dtype))


@pytest.mark.parametrize("dtype", ["int64", "bool", "complex64"])
def test_noise_needs_a_floating_point_dtype(dtype: str) -> None:
    with pytest.raises(UsageError, match="noise requires a floating-point dtype"):
        anyaccel.randn((2,), dtype=dtype)
    with pytest.raises(UnknownDtypeError):
        anyaccel.randn((2,), dtype="")


def test_numpy_integers_are_accepted() -> None:
    assert anyaccel.randn((numpy.int64(2), 3)).shape == (2, 3)  # type: ignore[arg-type]
    anyaccel.manual_seed("cpu", numpy.int64(7))  # type: ignore[arg-type]
    assert torch.initial_seed() == 7


@pytest.mark.parametrize("shape", [(-1, 4), (2.5, 4), (True, 4), 5, None, "12"])
def test_randn_rejects_invalid_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="shape must be a sequence of non-negative integers"):
        anyaccel.randn(shape)


def test_randn_rejects_a_wrong_number_of_generators() -> None:
    with pytest.raises(UsageError, match=r"got 2 generators, but shape \(3, 4\) has a batch size of 3"):
        anyaccel.randn((3, 4), generator=[torch.Generator(), torch.Generator()])
    with pytest.raises(UsageError, match="0 generators"):
        anyaccel.randn((3, 4), generator=[])
    for wrong in (7, "7", [7, 8, 9], [None, None, None]):
        with pytest.raises(UsageError, match=r"must be a torch.Generator or a list"):
            anyaccel.randn((3, 4), generator=wrong)  # type: ignore[arg-type]


def test_manual_seed_makes_noise_reproducible() -> None:
    anyaccel.manual_seed("cpu", 7)
    first = anyaccel.randn((4,))
    anyaccel.manual_seed("cpu", 7)
    assert torch.equal(first, anyaccel.randn((4,)))


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "7", True, None])
def test_manual_seed_rejects_invalid_seeds(seed: int) -> None:
    with pytest.raises(UsageError, match="a seed must be an integer"):
        anyaccel.manual_seed("cpu", seed)


def test_device_count_of_unavailable_devices_is_zero() -> None:
    assert anyaccel.device_count("cpu") == anyaccel.device_count("cpu:7") == 1
    assert anyaccel.device_count("auto") >= 1
    assert anyaccel.device_count("mlu") == 0
    with pytest.raises(UsageError, match="unknown device"):
        anyaccel.device_count("tpu")


def test_memory_of_the_cpu() -> None:
    memory = anyaccel.memory("cpu")
    assert 0 < memory.used_bytes < memory.total_bytes
    assert 0 < memory.free_bytes <= memory.total_bytes


def test_peak_memory_of_the_cpu_includes_an_allocation() -> None:
    try:
        anyaccel.reset_peak_memory("cpu")
    except NotMeasurableError as error:
        pytest.skip(f"not reported on this system: {error.message}")
    # In a new process: here the allocator may reuse memory that earlier tests freed.
    program = (
        "import anyaccel, torch; anyaccel.reset_peak_memory('cpu'); before = anyaccel.max_memory('cpu'); "
        "block = torch.ones(256 * 2**20 // 4); print(anyaccel.max_memory('cpu') - before)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) > 128 * 2**20


def test_synchronize_and_empty_cache_on_the_cpu_do_not_touch_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("an accelerator was used")

    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.accelerator, name, fail, raising=False)
    anyaccel.synchronize("cpu")
    anyaccel.empty_cache("cpu")


@pytest.mark.parametrize("function", ["synchronize", "empty_cache", "memory", "max_memory", "reset_peak_memory"])
def test_unavailable_device_raises_with_a_hint(function: str) -> None:
    with pytest.raises(DeviceUnavailableError, match="mlu is not available") as caught:
        getattr(anyaccel, function)("mlu")
    assert caught.value.hint


def test_supports_training_of_auto() -> None:
    assert anyaccel.supports_training("auto") == anyaccel.open_device("auto").sheet.trains
