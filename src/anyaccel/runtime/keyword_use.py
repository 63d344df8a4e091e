"""Keyword arguments that a pipeline accepts through `**kwargs` but never reads."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from anyaccel.upstream.torch_internals import unwrap_no_grad

__all__ = ["find_unused_keywords", "list_parameters", "reads_keyword"]

_READ_METHODS = ("get", "pop", "setdefault")


@dataclass(frozen=True)
class _KeywordUse:
    """What a function does with its `**kwargs`."""

    names: frozenset[str]
    """Names that the function reads, for example with `kwargs.pop("callback", None)`."""
    passed_to_super: bool
    """Whether `**kwargs` is passed to `super().__call__`."""
    other_use: bool
    """Whether it is used in another way, so the names may be incomplete."""


def find_unused_keywords(pipeline_class: type, names: Iterable[str]) -> list[str]:
    """Return the names of keyword arguments that have no effect in a call to a pipeline of this class.

    A name is not returned if it is unknown whether the pipeline reads it.
    """
    return [name for name in names if not _may_use(pipeline_class.__mro__, name)]


def reads_keyword(function: Any, name: str) -> bool:
    """Return whether a function has a parameter of this name or reads it from its `**kwargs`."""
    if name in inspect.signature(function).parameters:
        return True
    code = getattr(inspect.unwrap(function), "__code__", None)
    use = _read_keyword_use(code) if code is not None and code.co_flags & inspect.CO_VARKEYWORDS else None
    return use is not None and name in use.names


def list_parameters(pipeline_class: type) -> list[str]:
    """Return the names of the parameters of a pipeline's `__call__`, including those of its base classes."""
    names: list[str] = []
    for base in pipeline_class.__mro__:
        function = vars(base).get("__call__")
        if function is not None:
            names += [name for name, kind in inspect.signature(function).parameters.items() if _is_named(kind)]
    return names


def _may_use(classes: tuple[type, ...], name: str) -> bool:
    """Return whether the first `__call__` in these classes may read a keyword argument."""
    index = next((index for index, base in enumerate(classes) if "__call__" in vars(base)), None)
    if index is None:
        return True
    function = unwrap_no_grad(vars(classes[index])["__call__"])
    if not hasattr(function, "__code__") or hasattr(function, "__wrapped__"):
        return True  # an unknown decorator may read any argument
    code = function.__code__
    # Not inspect.signature, which would take a noticeable part of a short call.
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if name in parameters or not code.co_flags & inspect.CO_VARKEYWORDS:
        return True
    use = _read_keyword_use(code)
    if use is None or use.other_use or name in use.names:
        return True
    return use.passed_to_super and _may_use(classes[index + 1 :], name)


def _is_named(parameter: inspect.Parameter) -> bool:
    return parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) and parameter.name != "self"


@functools.lru_cache(maxsize=1024)
def _read_keyword_use(code: CodeType) -> _KeywordUse | None:
    """Return what a function does with its `**kwargs`; None if this cannot be read from its source."""
    try:
        lines, _ = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):
        return None
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or function.args.kwarg is None:
        return None
    reader = _KeywordReader(function.args.kwarg.arg)
    for statement in function.body:
        reader.visit(statement)
    return _KeywordUse(frozenset(reader.names), reader.passed_to_super, reader.other_use)


class _KeywordReader(ast.NodeVisitor):
    """A visitor that records how the body of a function uses its `**kwargs`."""

    def __init__(self, kwargs: str) -> None:
        self.kwargs = kwargs
        self.names: set[str] = set()
        self.passed_to_super = False
        self.other_use = False
        self._understood: set[int] = set()

    def _is_kwargs(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == self.kwargs

    def _read(self, kwargs: ast.AST, key: ast.AST) -> None:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            self.names.add(key.value)
            self._understood.add(id(kwargs))

    def visit_Call(self, node: ast.Call) -> None:
        """Read `kwargs.pop("name", None)` and `super().__call__(**kwargs)`."""
        function = node.func
        if isinstance(function, ast.Attribute) and node.args and self._is_kwargs(function.value):
            if function.attr in _READ_METHODS:
                self._read(function.value, node.args[0])
        elif ast.unparse(function) == "super().__call__":
            for keyword in node.keywords:
                if keyword.arg is None and self._is_kwargs(keyword.value):
                    self.passed_to_super = True
                    self._understood.add(id(keyword.value))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Read `kwargs["name"]`."""
        if self._is_kwargs(node.value):
            self._read(node.value, node.slice)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Read `"name" in kwargs`."""
        if len(node.ops) == 1 and isinstance(node.ops[0], ast.In | ast.NotIn) and self._is_kwargs(node.comparators[0]):
            self._read(node.comparators[0], node.left)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        """Note any other use, for example `helper(kwargs)`."""
        if self._is_kwargs(node) and id(node) not in self._understood:
            self.other_use = True
