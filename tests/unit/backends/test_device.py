"""Opening a device: names, indices, `auto`, and `ANYACCEL_DEVICE`."""

import pytest
import torch

import anyaccel
from anyaccel.backends import device as device_module
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
    monkeypatch.setenv("ANYACCEL_DEVICE", "auto")
    assert anyaccel.open_device("auto")


@pytest.mark.parametrize("value", ["", "cuda:", "cuda:x", "cuda:-1", ":0", "cuda 0", "cuda:0:1", "gpu!", "cuda:99999"])
def test_a_malformed_variable_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ANYACCEL_DEVICE", value)
    with pytest.raises(UsageError, match="ANYACCEL_DEVICE") as caught:
        anyaccel.open_device("auto")
    assert "cuda, hpu:3" in caught.value.hint


def test_an_index_that_is_not_there() -> None:
    with pytest.raises(DeviceUnavailableError, match="there is no cpu:3: this process sees 1 of them"):
        anyaccel.open_device("cpu:3")
    assert not anyaccel.is_available("cpu:3")
    assert anyaccel.is_available("cpu:0")


def test_an_unknown_device() -> None:
    with pytest.raises(UnknownDeviceError, match="there is no device 'tpu'"):
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


def test_rocm_has_a_sheet_of_its_own() -> None:
    rocm = anyaccel.sheet("rocm")
    assert (rocm.name, rocm.torch_name) == ("rocm", "cuda")


def test_a_slow_type_stays_slow_after_the_device_was_asked() -> None:
    answer = device_module.open_device("cpu").sheet.dtype("bfloat16")
    assert getattr(answer, "effect", None) == "slow"
