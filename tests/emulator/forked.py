"""Decorator for tests that run on every virtual device; all tests of a file share one process per device."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable

import pytest
import torch

from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked

__all__ = ["DEVICES", "KNOWN_TO_TORCH", "UNKNOWN_TO_TORCH", "OnEveryDevice"]

KNOWN_TO_TORCH = ("mps", "hpu", "xpu")
UNKNOWN_TO_TORCH = ("neuron", "npu", "mlu")
DEVICES = (*KNOWN_TO_TORCH, *UNKNOWN_TO_TORCH)

Check = Callable[[VirtualAccelerator], None]


class OnEveryDevice:
    """Decorator: `@on_every_device()` turns `check(accelerator)` into one test per device.

    All checks of an instance share one process per device, because starting one takes half a second. `broken=`
    describes a known bug; `on=` lists the devices that have it.
    """

    def __init__(self) -> None:
        self._checks: dict[str, Check] = {}
        self._outcomes = functools.cache(self._run)

    def __call__(self, broken: str = "", on: tuple[str, ...] = DEVICES) -> Callable[[Check], Callable[[str], None]]:
        def decorate(check: Check) -> Callable[[str], None]:
            name = check.__name__
            self._checks[name] = check

            def test(device: str) -> None:
                problem = self._outcomes(device)[name]
                if problem:
                    pytest.fail(problem, pytrace=False)

            test.__name__ = name
            return pytest.mark.parametrize("device", _make_parameters(broken, on))(test)

        return decorate

    def _run(self, device: str) -> dict[str, str]:
        return run_forked(device, self._check_all, count=2, memory="16GiB")

    def _check_all(self, accelerator: VirtualAccelerator) -> dict[str, str]:
        return {name: _run_check(check, accelerator) for name, check in self._checks.items()}


def _make_parameters(broken: str, on: tuple[str, ...]) -> list[object]:
    marks = pytest.mark.xfail(strict=True, reason=broken)
    return [pytest.param(device, marks=marks) if broken and device in on else device for device in DEVICES]


def _run_check(check: Check, accelerator: VirtualAccelerator) -> str:
    """Run a check and restore global state; return the traceback of a failure, or an empty string."""
    try:
        check(accelerator)
        return ""
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - the test reports it
        return traceback.format_exc(limit=-6)
    finally:
        accelerator.current_index = 0
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
