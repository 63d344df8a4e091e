"""Syntax trees of source files, parsed once for all tests of a process."""

import ast
import functools

__all__ = ["parse"]


@functools.cache
def parse(source: str) -> ast.Module:
    """Return the syntax tree of source code. The tests share it and must not change it."""
    return ast.parse(source)
