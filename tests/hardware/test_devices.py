"""Drivers and sheets on the real accelerators of this machine."""

import pytest
import torch

import anyaccel
from anyaccel.backends.claim import DtypeLimit, Yes
from anyaccel.backends.dtype_probe import probe_dtype
from anyaccel.runtime.placement.weight_moves import stage_weights

pytestmark = pytest.mark.hardware

PRESENT = [device.name for device in anyaccel.devices() if device.available and device.name != "cpu"]


@pytest.fixture(params=PRESENT or ["none"])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if not PRESENT:
        pytest.skip("no accelerator available; `anyaccel devices` shows the reason")
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


def test_tensors_are_copied_in_both_directions_with_other_streams(device: str) -> None:
    opened = anyaccel.open_device(device)
    expected = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(7))
    on_device = opened.driver.send(expected, opened.torch_device) * 2
    opened.driver.record_event(opened.index)()
    with opened.driver.side_stream(opened.index):
        assert torch.equal(on_device.cpu(), expected * 2)


def test_weights_copied_in_parts_are_unchanged(device: str) -> None:
    opened = anyaccel.open_device(device)
    sizes = (2**12, 2**18 + 3, 10**7)
    expected = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in sizes]
    model = torch.nn.ParameterList(expected[:2])
    model.register_buffer("table", expected[2].clone())
    stage_weights([model], opened)
    assert [weight.device.type for weight in model.parameters()] == ["cpu", opened.torch_device.type]
    model.to(opened.torch_device)
    weights = [*model.parameters(), *model.buffers()]
    assert all(torch.equal(weight.cpu(), other) for weight, other in zip(weights, expected, strict=True))


def test_noise_from_a_cpu_generator_equals_the_cpu_noise(device: str) -> None:
    expected = anyaccel.randn((2, 4, 8, 8), generator=torch.Generator().manual_seed(7))
    on_device = anyaccel.randn((2, 4, 8, 8), generator=torch.Generator().manual_seed(7), device=device)
    assert on_device.device.type == device
    assert torch.equal(on_device.cpu(), expected)


def test_a_seed_determines_noise_on_the_device(device: str) -> None:
    anyaccel.manual_seed(device, 7)
    first = anyaccel.randn((16,), device=device)
    anyaccel.manual_seed(device, 7)
    assert torch.equal(first, anyaccel.randn((16,), device=device))


@pytest.mark.parametrize("dtype", ["float64", "int64", "float32", "float16", "bfloat16", "complex64", "complex128"])
def test_the_dtypes_on_the_sheet_are_right(device: str, dtype: str) -> None:
    """Compare the sheet as written, without probe results. Conditional and contradicted claims may hold or not."""
    opened = anyaccel.open_device(device)
    claim, effect = anyaccel.sheet(device).dtype(dtype), probe_dtype(dtype, opened.torch_device)
    if isinstance(claim, Yes):
        assert effect is None
    elif isinstance(claim, DtypeLimit) and not claim.conditional and not claim.contradicted_by:
        assert effect == claim.effect
