"""How a device compiles, and how it executes what is not compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anyaccel.backends.sheet import Compiler, Sheet
from anyaccel.errors import UsageError
from anyaccel.planning.decision import Decision
from anyaccel.planning.options import PlacementOptions

__all__ = ["CompileRule", "choose_compiler", "choose_mode"]


@dataclass(frozen=True)
class CompileRule:
    """How `torch.compile` is called where the user asks for it."""

    backend: str
    """Empty where none is known for the device."""
    fullgraph: bool = False
    static: bool = False
    """Whether every size is a graph of its own."""
    cache_variable: str = ""
    cache_value: str = "{}"
    """How the variable names a folder: `{}`, or `{},false,1024,false`."""

    def __str__(self) -> str:
        if not self.backend:
            return "not known here"
        shapes = "a graph for each size" if self.static else "sizes may vary"
        return f"{self.backend}, {'whole graphs' if self.fullgraph else 'graphs may break'}, {shapes}"


def choose_compiler(sheet: Sheet) -> Decision[CompileRule]:
    """The compiler that the sheet names; sizes are kept in buckets where every shape is a graph."""
    compiler = sheet.compiler
    if not isinstance(compiler, Compiler):
        return Decision(CompileRule(""), compiler.says)
    static = sheet.static_shapes or not compiler.dynamic
    rule = CompileRule(compiler.backend, compiler.fullgraph, static, compiler.cache_variable, compiler.cache_value)
    return Decision(rule, compiler.says)


def choose_mode(sheet: Sheet, options: PlacementOptions, environment: Mapping[str, str]) -> Decision[str]:
    """How the device executes: what was asked for, else what the environment says, else the sheet's first way."""
    modes = {mode.name: mode for mode in sheet.modes}
    if not modes:
        if options.mode not in (None, "eager"):
            raise UsageError(f"{sheet.title} executes in one way only, not {options.mode!r}", hint="leave mode out")
        return Decision("eager", "the only way that the sheet knows of")
    set_before = [
        mode for mode in sheet.modes if any(environment.get(variable) == value for variable, value in mode.settings)
    ]
    if options.mode is None and set_before:
        chosen = set_before[0]
        settings = ", ".join(f"{variable}={value}" for variable, value in chosen.settings)
        return Decision(chosen.name, f"the environment says so ({settings}); {chosen.says} ({chosen.source})")
    name = options.mode or next(iter(modes))
    if name not in modes:
        raise UsageError(f"{sheet.title} has no mode {name!r}", hint=f"take one of {', '.join(modes)}")
    asked = "asked for; " if options.mode else ""
    return Decision(name, f"{asked}{modes[name].says} ({modes[name].source})")
