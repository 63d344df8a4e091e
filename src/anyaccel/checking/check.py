"""`anyaccel.check`: whether a pipeline is portable and, if not, which lines keep it from being so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anyaccel.backends.device_spec import DeviceSpec
from anyaccel.backends.registry import load_registry
from anyaccel.checking.fresh_process import CheckTask, can_fork, check_in_fresh_process
from anyaccel.checking.report import Report
from anyaccel.checking.run import CheckMode, OnReport, run_on_devices
from anyaccel.checking.target import read_target
from anyaccel.errors import UsageError, nearest

__all__ = ["check", "find_devices"]

_ALL = "all"


def check(
    pipeline_or_model: Any,
    device: str | Sequence[str] = _ALL,
    *,
    plain: bool = False,
    strict: bool = False,
    compile: bool = False,  # noqa: A002 - it is what the option is called everywhere
    told: OnReport | None = None,
    **call: Any,
) -> Report:
    """Run a pipeline on virtual devices and report every line that a device would not take: `check(pipe, "mps")`.

    A pipeline, the folder of one (its config files are enough: the same architecture is built small), the name of a
    recipe, or `package.module:function`. `plain` checks diffusers alone, without anyaccel; `strict` stops where the
    device would; `told` hears of each device as soon as it is done. Every further keyword goes to the pipeline's call.
    """
    if plain and compile:
        raise UsageError("plain diffusers compiles nothing by itself", hint="leave one of the two out")
    devices = find_devices(device)
    if not can_fork():
        options = {"plain": plain, "strict": strict, "compile": compile}
        return check_in_fresh_process(
            CheckTask(subject=pipeline_or_model, devices=tuple(devices), options=options, call=call)
        )
    subject = read_target(pipeline_or_model, call)
    ways = CheckMode(placed=not plain, strict=strict, compiled=compile)
    found = run_on_devices(subject.recipe, devices, ways, told)
    return Report(
        subject=subject.name,
        pipeline=subject.recipe.pipeline,
        devices={one.device: one for one in found},
        notes=subject.notes,
    )


def find_devices(asked: str | Sequence[str]) -> list[str]:
    """The devices that can be virtual, of those that are asked for: a name, several, or `all`."""
    known = [backend.name for backend in load_registry().backends.values() if backend.sheet.can_be_virtual]
    names = [asked] if isinstance(asked, str) else list(asked)
    if names == [_ALL]:
        return known
    names = [DeviceSpec.parse(name, load_registry()).require_name() for name in names]
    for name in names:
        if name not in known:
            raise UsageError(f"no virtual device is called {name!r}", hint=nearest(name, [*known, _ALL]))
    return list(dict.fromkeys(names))
