"""Faster import of diffusers 0.42 and transformers 5.22, by skipping what a process does not use.

On import, both libraries list the files of all installed packages, which takes a third of a second each, and import
peft even if nothing uses it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from anyaccel.upstream.lazy_dynamo import import_dynamo_lazily

__all__ = ["import_for_tracing", "list_packages", "quick_package_lists"]

_LIST_PACKAGES = importlib.metadata.packages_distributions
_NAME = re.compile(r"^Name:\s*(\S+)", re.MULTILINE)


def import_for_tracing() -> None:
    """Import diffusers and transformers without peft and `torch._dynamo`.

    Call this only in a process that neither compiles nor loads LoRAs. Already imported libraries do not change.
    """
    import_dynamo_lazily()
    if "diffusers" not in sys.modules:
        modules: dict[str, Any] = sys.modules
        modules.setdefault("peft", None)  # the libraries treat it as not installed
    with quick_package_lists():
        import diffusers  # noqa: F401
        import transformers  # noqa: F401


@contextmanager
def quick_package_lists() -> Iterator[None]:
    """Inside the `with` block, list the installed packages once, and without reading the type of each file."""
    importlib.metadata.packages_distributions = list_packages
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = _LIST_PACKAGES


@functools.cache
def list_packages() -> Mapping[str, list[str]]:
    """Return the names of the distributions of each top-level package, like `packages_distributions`."""
    packages: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        declared = (distribution.read_text("top_level.txt") or "").split()
        record = distribution.read_text("RECORD")
        if not declared and record is None:  # not installed from a wheel
            return _LIST_PACKAGES()
        named = _NAME.search(distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "")
        for package in declared or _find_packages(record or ""):
            packages.setdefault(package, []).append(named[1] if named else distribution.metadata["Name"])
    return packages


def _find_packages(record: str) -> set[str]:
    """Return the top-level packages and modules in a wheel's list of files."""
    files = (line.partition(",")[0].strip('"') for line in record.splitlines())
    return {path.partition("/")[0].removesuffix(".py") for path in files if path.endswith(".py")}
