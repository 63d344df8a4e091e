"""Choice of the `torch.compile` backend and the execution mode, such as eager or lazy, for a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anyaccel.backends.sheet import Compiler, Sheet
from anyaccel.errors import UsageError
from anyaccel.planning.decision import Decision, cite
from anyaccel.planning.options import PlacementOptions

__all__ = ["CompileRule", "choose_compiler", "choose_mode"]


@dataclass(frozen=True)
class CompileRule:
    """`torch.compile` arguments and compile-cache settings for a device."""

    backend: str
    """Empty if no compiler is known for the device."""
    fullgraph: bool = False
    static: bool = False
    """Whether every input size is compiled as its own graph."""
    cache_variable: str = ""
    cache_value: str = "{}"
    """Template of the variable's value, `{}` being the directory: `{},false,1024,false`."""

    def __str__(self) -> str:
        if not self.backend:
            return "unknown"
        shapes = "one graph per size" if self.static else "dynamic shapes"
        return f"{self.backend}, {'full graph' if self.fullgraph else 'graph breaks allowed'}, {shapes}"


def choose_compiler(sheet: Sheet) -> Decision[CompileRule]:
    """Return the `torch.compile` settings for a device; the backend is empty if none is known.

    Shapes are dynamic only if both the device and the compiler support them.
    """
    compiler = sheet.compiler
    if not isinstance(compiler, Compiler):
        return Decision(CompileRule(""), compiler.says)
    # Static shapes make every new size a compilation, which `warm` can do ahead of time.
    static = sheet.static_shapes or not compiler.dynamic
    rule = CompileRule(compiler.backend, compiler.fullgraph, static, compiler.cache_variable, compiler.cache_value)
    return Decision(rule, compiler.says)


def choose_mode(sheet: Sheet, options: PlacementOptions, environment: Mapping[str, str]) -> Decision[str]:
    """Return the execution mode, such as `eager` or `lazy`; raise if the device does not support it.

    If no mode is requested, use the one set by environment variables, or else the sheet's default.
    """
    modes = {mode.name: mode for mode in sheet.modes}
    if not modes:
        if options.mode not in (None, "eager"):
            raise UsageError(f"{sheet.title} supports only mode='eager', not {options.mode!r}", hint="omit mode")
        return Decision("eager", "the only mode that this device supports")
    # The vendor reads its variables at import time, so an exported one has usually taken effect already.
    set_in_environment = [
        mode for mode in sheet.modes if any(environment.get(variable) == value for variable, value in mode.settings)
    ]
    if options.mode is None and set_in_environment:
        mode = set_in_environment[0]
        settings = ", ".join(f"{variable}={value}" for variable, value in mode.settings)
        return Decision(mode.name, f"{settings} is set in the environment. {cite(mode)}")
    name = options.mode or next(iter(modes))
    if name not in modes:
        hint = f"use {' or '.join(f'mode={mode!r}' for mode in modes)}, or omit mode"
        raise UsageError(f"{sheet.title} does not support mode={name!r}", hint=hint)
    prefix = f"mode={options.mode!r} was requested. " if options.mode else ""
    return Decision(name, f"{prefix}{cite(modes[name])}")
