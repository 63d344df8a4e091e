"""Checks that run on every virtual device, with one process a device for all checks of a file."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable

import pytest
import torch

from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked

__all__ = ["DEVICES", "KNOWN_TO_TORCH", "UNKNOWN_TO_TORCH", "Everywhere"]

KNOWN_TO_TORCH = ("mps", "hpu", "xpu")
UNKNOWN_TO_TORCH = ("neuron", "npu", "mlu")
DEVICES = (*KNOWN_TO_TORCH, *UNKNOWN_TO_TORCH)

Check = Callable[[VirtualAccelerator], None]


class Everywhere:
    """A decorator: `@everywhere()` makes of `check(accelerator)` a test for each device.

    All checks of one instance share a process for each device, since a process costs half a second. A bug is named with
    `broken=` and the devices that show it.
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
            return pytest.mark.parametrize("device", _mark(broken, on))(test)

        return decorate

    def _run(self, device: str) -> dict[str, str]:
        return run_forked(device, self._check_all, count=2, memory="16GiB")

    def _check_all(self, accelerator: VirtualAccelerator) -> dict[str, str]:
        return {name: _try(check, accelerator) for name, check in self._checks.items()}


def _mark(broken: str, on: tuple[str, ...]) -> list[object]:
    marks = pytest.mark.xfail(strict=True, reason=broken)
    return [pytest.param(device, marks=marks) if broken and device in on else device for device in DEVICES]


def _try(check: Check, accelerator: VirtualAccelerator) -> str:
    """What went wrong, or nothing; each check finds the process as it was."""
    try:
        check(accelerator)
        return ""
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - whatever it is, the test says so
        return traceback.format_exc(limit=-6)
    finally:
        accelerator.current_index = 0
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
