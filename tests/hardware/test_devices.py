"""On real accelerators: the drivers work and the sheets tell the truth; skipped with the reason where there is none."""

import pytest
import torch

import anyaccel
from anyaccel.backends.claim import DtypeLimit, Yes
from anyaccel.backends.dtype_probe import probe_dtype

pytestmark = pytest.mark.hardware

PRESENT = [device.name for device in anyaccel.devices() if device.available and device.name != "cpu"]


@pytest.fixture(params=PRESENT or ["none"])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if not PRESENT:
        pytest.skip("no accelerator is here; `anyaccel devices` says why")
    return name


def test_auto_prefers_an_accelerator(device: str) -> None:
    assert anyaccel.open_device("auto").sheet.torch_name in PRESENT
    assert anyaccel.is_available(device)


def test_memory_is_counted(device: str) -> None:
    anyaccel.reset_peak_memory(device)
    before = anyaccel.memory(device)
    block = torch.ones(64 * 2**20 // 4, device=device)
    anyaccel.synchronize(device)
    after = anyaccel.memory(device)
    assert after.used_bytes - before.used_bytes >= 64 * 2**20
    assert anyaccel.max_memory(device) >= after.used_bytes
    del block
    anyaccel.empty_cache(device)
    assert anyaccel.memory(device).used_bytes < after.used_bytes
    assert 0 < before.free_bytes <= before.total_bytes


def test_tensors_go_there_and_come_back_beside_other_work(device: str) -> None:
    opened = anyaccel.open_device(device)
    host = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(7))
    there = opened.driver.send(host, opened.torch_device) * 2
    opened.driver.record_event(opened.index)()
    with opened.driver.side_stream(opened.index):
        assert torch.equal(there.cpu(), host * 2)


def test_noise_from_a_host_generator_is_the_host_noise(device: str) -> None:
    host = anyaccel.randn((2, 4, 8, 8), generator=torch.Generator().manual_seed(7))
    there = anyaccel.randn((2, 4, 8, 8), generator=torch.Generator().manual_seed(7), device=device)
    assert there.device.type == device
    assert torch.equal(there.cpu(), host)


def test_a_seed_determines_noise_on_the_device(device: str) -> None:
    anyaccel.manual_seed(device, 7)
    first = anyaccel.randn((16,), device=device)
    anyaccel.manual_seed(device, 7)
    assert torch.equal(first, anyaccel.randn((16,), device=device))


@pytest.mark.parametrize("dtype", ["float64", "int64", "float32", "float16", "bfloat16", "complex64", "complex128"])
def test_the_sheet_tells_the_truth_about_types(device: str, dtype: str) -> None:
    """The sheet as it was written, not as the device settled it; what is in doubt there may go either way."""
    opened = anyaccel.open_device(device)
    claimed, seen = anyaccel.sheet(device).dtype(dtype), probe_dtype(dtype, opened.torch_device)
    if isinstance(claimed, Yes):
        assert seen is None
    elif isinstance(claimed, DtypeLimit) and not claimed.conditional and not claimed.contradicted_by:
        assert seen == claimed.effect
