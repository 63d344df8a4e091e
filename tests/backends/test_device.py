"""Opening devices: names, indices, `auto` and `ANYACCEL_DEVICE`."""

import pytest
import torch

import anyaccel
from anyaccel.backends import device as device_module
from anyaccel.backends.claim import Limit
from anyaccel.backends.driver import Driver
from anyaccel.errors import DeviceUnavailableError, UnknownDeviceError, UsageError


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANYACCEL_DEVICE", raising=False)


def test_auto_selects_the_best_available_device() -> None:
    available = [device for device in anyaccel.devices() if device.available and device.sheet]
    best = max(available, key=lambda device: device.sheet.preference if device.sheet else 0)
    assert anyaccel.open_device("auto").sheet.torch_name == best.name


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_open_device_by_name_index_or_torch_device(device: str | torch.device) -> None:
    opened = anyaccel.open_device(device)
    assert opened.torch_device == torch.device("cpu", 0)
    assert opened.sheet.name == "cpu"


def test_variable_overrides_only_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYACCEL_DEVICE", "mlu")
    with pytest.raises(
        DeviceUnavailableError, match=r"mlu is not available \(from ANYACCEL_DEVICE\): the module torch"
    ):
        anyaccel.open_device("auto")
    assert anyaccel.open_device("cpu").sheet.name == "cpu"
    monkeypatch.setenv("ANYACCEL_DEVICE", "cpu")
    assert anyaccel.open_device("auto").sheet.name == "cpu"
    for unset in ("auto", ""):
        monkeypatch.setenv("ANYACCEL_DEVICE", unset)
        assert anyaccel.open_device("auto")
    monkeypatch.setenv("ANYACCEL_DEVICE", "tpu")
    with pytest.raises(UnknownDeviceError, match=r"unknown device 'tpu' \(from ANYACCEL_DEVICE\)"):
        anyaccel.open_device("auto")


@pytest.mark.parametrize("value", ["cuda:", "cuda:x", "cuda:-1", ":0", "cuda/0", "cuda:0:1", "gpu!"])
def test_invalid_variable_raises(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ANYACCEL_DEVICE", value)
    with pytest.raises(UsageError, match="ANYACCEL_DEVICE") as caught:
        anyaccel.open_device("auto")
    assert "cuda, hpu:3" in caught.value.hint


def test_index_out_of_range_raises() -> None:
    for name in ("cpu:3", "cpu:99999"):
        with pytest.raises(
            DeviceUnavailableError, match=f"{name} is not available: this process has only 1 cpu device"
        ):
            anyaccel.open_device(name)
    assert not anyaccel.is_available("cpu:3")
    assert anyaccel.is_available("cpu:0")


def test_unknown_device_raises() -> None:
    with pytest.raises(UnknownDeviceError, match="unknown device 'tpu'"):
        anyaccel.open_device("tpu")
    with pytest.raises(UnknownDeviceError):
        anyaccel.is_available("tpu")
    with pytest.raises(UnknownDeviceError):
        anyaccel.sheet("tpu")


def test_unavailable_device_raises_with_reason_and_hint() -> None:
    unavailable = next(device for device in anyaccel.devices() if not device.available)
    with pytest.raises(DeviceUnavailableError) as caught:
        anyaccel.open_device(unavailable.name)
    assert unavailable.reason in caught.value.message
    assert caught.value.hint == unavailable.hint


@pytest.mark.parametrize("wrong", [0, 1.5, b"cpu", None])
def test_values_that_are_not_devices_raise(wrong: str) -> None:
    for function in (anyaccel.open_device, anyaccel.is_available, anyaccel.sheet, anyaccel.supports_training):
        with pytest.raises(UsageError, match=r"is not a valid device|unknown device"):
            function(wrong)


def test_names_are_case_insensitive_and_accept_torch_devices() -> None:
    assert anyaccel.sheet("MPS") is anyaccel.sheet(torch.device("mps"))
    assert anyaccel.is_available(torch.device("cpu"))


def test_no_available_device_raises_with_the_reason_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "is_available", lambda name: False)
    with pytest.raises(DeviceUnavailableError, match="no device is available, not even cpu"):
        anyaccel.open_device("auto")


def test_auto_selects_by_preference_and_opens_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two accelerators available, the preferred one is opened at the current index of the process."""
    opened: list[tuple[str, int]] = []
    monkeypatch.setattr(device_module, "is_available", lambda name: name in ("cpu", "xpu", "mlu"))
    monkeypatch.setattr(Driver, "current_index", lambda self: 3)
    monkeypatch.setattr(device_module, "_open_at", lambda name, index: opened.append((name, index)))
    anyaccel.open_device("auto")
    assert opened == [("mlu", 3)]
    assert anyaccel.sheet("mlu").preference > anyaccel.sheet("xpu").preference


def test_opening_resolves_conditions_by_product_version_and_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first-generation Gaudi on which every probe succeeds."""
    device_module._open_at.cache_clear()
    monkeypatch.setattr(Driver, "device_name", lambda self, index: "GAUDI")
    monkeypatch.setattr(Driver, "load", lambda self: None)
    probed: list[str] = []
    monkeypatch.setattr("anyaccel.backends.driver.probe_dtype", lambda dtype, device: probed.append(dtype))
    sheet = device_module._open_at("hpu", 0).sheet
    device_module._open_at.cache_clear()
    float16 = sheet.dtype("float16")
    assert isinstance(float16, Limit)
    assert not float16.conditional
    assert probed == ["int64"], "only contradicted dtypes are probed, not those that depend on the product"
    assert sheet.dtype("int64").evidence == "hardware"  # type: ignore[union-attr]


def test_rocm_has_its_own_sheet() -> None:
    rocm = anyaccel.sheet("rocm")
    assert (rocm.name, rocm.torch_name) == ("rocm", "cuda")


def test_slow_dtype_is_not_probed() -> None:
    answer = device_module.open_device("cpu").sheet.dtype("bfloat16")
    assert getattr(answer, "effect", None) == "slow"
