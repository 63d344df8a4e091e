"""`anyaccel.check`: reports whether a pipeline is portable, and lists the lines of code that are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anyaccel.backends.device_spec import DeviceSpec
from anyaccel.backends.registry import load_registry
from anyaccel.checking.fresh_process import CheckTask, can_fork, check_in_fresh_process
from anyaccel.checking.report import Report
from anyaccel.checking.run import CheckMode, OnReport, run_on_devices
from anyaccel.checking.target import quantize_target, read_target
from anyaccel.errors import UsageError, nearest
from anyaccel.planning.options import check_weights

__all__ = ["check", "find_devices"]

_ALL = "all"


def check(
    pipeline_or_model: Any,
    device: str | Sequence[str] = _ALL,
    *,
    plain: bool = False,
    strict: bool = False,
    compile: bool = False,  # noqa: A002 - the name of this option everywhere else
    weights: str | None = None,
    on_report: OnReport | None = None,
    **call: Any,
) -> Report:
    """Run a pipeline on virtual devices and report every line of code that hits a device limit.

    For example, use `check(pipe, "mps")`. The first argument is a pipeline, a model folder, a recipe
    name or `package.module:function`. A model folder needs only its configs: a small model with the
    same architecture is built from them. `plain` checks diffusers without anyaccel. `strict` raises an
    error wherever the device would. `weights` quantizes the pipeline, on the CPU too. `on_report` is called with
    each device's report as soon as it is complete. Additional keyword arguments are passed to the pipeline call.
    """
    if plain and compile:
        raise UsageError(
            "plain and compile cannot be combined: plain diffusers is checked without compilation",
            hint="omit plain or compile",
        )
    if plain and weights is not None:
        raise UsageError(
            "plain and weights cannot be combined: plain diffusers does not quantize a loaded pipeline",
            hint="omit plain or weights",
        )
    check_weights(weights)
    # Before the fork or the new process, so that a misspelled name fails immediately.
    devices = find_devices(device)
    # Virtual devices need forks of a single-threaded process.
    if not can_fork():
        options = {"plain": plain, "strict": strict, "compile": compile, "weights": weights}
        return check_in_fresh_process(
            CheckTask(target=pipeline_or_model, devices=tuple(devices), options=options, call=call)
        )
    target = quantize_target(read_target(pipeline_or_model, call), weights)
    mode = CheckMode(placed=not plain, strict=strict, compiled=compile)
    reports = run_on_devices(target.recipe, devices, mode, on_report)
    return Report(
        target=target.name,
        pipeline=target.recipe.pipeline,
        devices={report.device: report for report in reports},
        notes=target.notes,
    )


def find_devices(names: str | Sequence[str]) -> list[str]:
    """Return the names of the virtual devices to check, given one name, several names or `all`.

    Raise if a name is not a known virtual device.
    """
    supported = [backend.name for backend in load_registry().backends.values() if backend.sheet.can_be_virtual]
    requested = [names] if isinstance(names, str) else list(names)
    if requested == [_ALL]:
        return supported
    # Virtual devices exist per device and not per product, so `gaudi2` becomes `hpu`.
    requested = [DeviceSpec.parse(name, load_registry()).require_name() for name in requested]
    for name in requested:
        if name not in supported:
            raise UsageError(f"unknown virtual device {name!r}", hint=nearest(name, [*supported, _ALL]))
    # Without duplicates: the report has one entry per device.
    return list(dict.fromkeys(requested))
