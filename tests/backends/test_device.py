"""Opening a device: names, indices, `auto`, and `ANYACCEL_DEVICE`."""

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


def test_auto_takes_the_best_device_that_is_here() -> None:
    here = [device for device in anyaccel.devices() if device.available and device.sheet]
    best = max(here, key=lambda device: device.sheet.preference if device.sheet else 0)
    assert anyaccel.open_device("auto").sheet.torch_name == best.name


@pytest.mark.parametrize("asked", ["cpu", "cpu:0", torch.device("cpu")])
def test_a_device_is_opened_by_name_index_or_torch_device(asked: str | torch.device) -> None:
    opened = anyaccel.open_device(asked)
    assert opened.torch_device == torch.device("cpu", 0)
    assert opened.sheet.name == "cpu"


def test_the_variable_overrides_auto_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("value", ["cuda:", "cuda:x", "cuda:-1", ":0", "cuda 0", "cuda:0:1", "gpu!"])
def test_a_malformed_variable_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ANYACCEL_DEVICE", value)
    with pytest.raises(UsageError, match="ANYACCEL_DEVICE") as caught:
        anyaccel.open_device("auto")
    assert "cuda, hpu:3" in caught.value.hint


def test_an_index_that_is_not_there() -> None:
    for asked in ("cpu:3", "cpu:99999"):
        with pytest.raises(DeviceUnavailableError, match=f"there is no {asked}: this process sees 1 of them"):
            anyaccel.open_device(asked)
    assert not anyaccel.is_available("cpu:3")
    assert anyaccel.is_available("cpu:0")


def test_an_unknown_device() -> None:
    with pytest.raises(UnknownDeviceError, match="unknown device 'tpu'"):
        anyaccel.open_device("tpu")
    with pytest.raises(UnknownDeviceError):
        anyaccel.is_available("tpu")
    with pytest.raises(UnknownDeviceError):
        anyaccel.sheet("tpu")


def test_an_absent_device_says_why_and_what_would_help() -> None:
    absent = next(device for device in anyaccel.devices() if not device.available)
    with pytest.raises(DeviceUnavailableError) as caught:
        anyaccel.open_device(absent.name)
    assert absent.reason in caught.value.message
    assert caught.value.hint == absent.hint


@pytest.mark.parametrize("wrong", [0, 1.5, b"cpu", None])
def test_what_is_no_device_at_all(wrong: str) -> None:
    for function in (anyaccel.open_device, anyaccel.is_available, anyaccel.sheet, anyaccel.supports_training):
        with pytest.raises(UsageError, match=r"is not a valid device|unknown device"):
            function(wrong)


def test_names_are_read_in_any_case_and_from_torch() -> None:
    assert anyaccel.sheet("MPS") is anyaccel.sheet(torch.device("mps"))
    assert anyaccel.is_available(torch.device("cpu"))


def test_no_device_at_all_is_an_error_with_the_reason_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "is_available", lambda name: False)
    with pytest.raises(DeviceUnavailableError, match="no device is available, not even cpu"):
        anyaccel.open_device("auto")


def test_auto_goes_by_preference_and_takes_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two accelerators seem to be here; the better one is opened, at the index that the process works on."""
    opened: list[tuple[str, int]] = []
    monkeypatch.setattr(device_module, "is_available", lambda name: name in ("cpu", "xpu", "mlu"))
    monkeypatch.setattr(Driver, "current_index", lambda self: 3)
    monkeypatch.setattr(device_module, "_settle", lambda name, index: opened.append((name, index)))
    anyaccel.open_device("auto")
    assert opened == [("mlu", 3)]
    assert anyaccel.sheet("mlu").preference > anyaccel.sheet("xpu").preference


def test_opening_settles_by_product_by_version_and_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first Gaudi on which everything that is asked of the device itself is right."""
    device_module._settle.cache_clear()
    monkeypatch.setattr(Driver, "device_name", lambda self, index: "GAUDI")
    monkeypatch.setattr(Driver, "load", lambda self: None)
    asked: list[str] = []
    monkeypatch.setattr("anyaccel.backends.driver.probe_dtype", lambda dtype, device: asked.append(dtype))
    settled = device_module._settle("hpu", 0).sheet
    device_module._settle.cache_clear()
    float16 = settled.dtype("float16")
    assert isinstance(float16, Limit)
    assert not float16.conditional
    assert asked == ["int64"], "what is certain for a first Gaudi is not asked, what is contradicted is"
    assert settled.dtype("int64").evidence == "hardware"  # type: ignore[union-attr]


def test_rocm_has_a_sheet_of_its_own() -> None:
    rocm = anyaccel.sheet("rocm")
    assert (rocm.name, rocm.torch_name) == ("rocm", "cuda")


def test_a_slow_type_stays_slow_after_the_device_was_asked() -> None:
    answer = device_module.open_device("cpu").sheet.dtype("bfloat16")
    assert getattr(answer, "effect", None) == "slow"
