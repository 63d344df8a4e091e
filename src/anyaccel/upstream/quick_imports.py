"""Faster import of diffusers 0.42 and transformers 5.22, by skipping what a process does not use.

On import, both libraries list the files of all installed packages, which takes a third of a second each, and import
peft and torch's distributed tensors even if nothing uses them. transformers also searches all lines of its 1600 modules
for the names that they export.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from anyaccel.upstream.lazy_dynamo import import_dynamo_lazily

__all__ = ["import_for_tracing", "list_packages", "quick_imports"]

_SEARCHING = "transformers.utils.import_utils"
_LIST_PACKAGES = importlib.metadata.packages_distributions
_NAME = re.compile(r"^Name:\s*(\S+)", re.MULTILINE)


def import_for_tracing() -> None:
    """Import diffusers and transformers without peft, distributed tensors and `torch._dynamo`.

    Call this only in a process that neither compiles, nor loads LoRAs, nor runs a model on several devices. Libraries
    that are already imported do not change.
    """
    import_dynamo_lazily()
    if "diffusers" not in sys.modules:
        sys.modules.setdefault("peft", None)  # type: ignore[arg-type]  # the libraries treat it as not installed
    with quick_imports():
        import torch.distributed

        if "transformers" not in sys.modules:
            torch.distributed.is_available = lambda: False
        import diffusers  # noqa: F401
        import transformers  # noqa: F401


@contextmanager
def quick_imports() -> Iterator[None]:
    """Inside the `with` block, list the installed packages once, and find exported names without splitting lines."""
    finder = _SearchFinder()
    sys.meta_path.insert(0, finder)
    importlib.metadata.packages_distributions = list_packages  # type: ignore[assignment]
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = _LIST_PACKAGES
        sys.meta_path.remove(finder)


class _SearchFinder(MetaPathFinder):
    """Finder that replaces a function of transformers when its module is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of the module with another loader; return None for all other modules."""
        spec = PathFinder.find_spec(name, path, target) if name == _SEARCHING else None
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _SearchLoader(spec.loader.name, spec.loader.path)
        return spec


class _SearchLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then make its search for exported names faster."""
        super().exec_module(module)
        search: Any = getattr(module, "fetch__all__", None)
        if search is not None:
            vars(module)["fetch__all__"] = functools.partial(_search_end, search)


def _search_end(search: Callable[[str], list[str]], content: str) -> list[str]:
    """Return the names that a module exports, from the part of its file that begins with them."""
    start = content.rfind("\n__all__") + 1
    return search(content[start:]) if start or content.startswith("__all__") else []


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
