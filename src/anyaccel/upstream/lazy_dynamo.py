"""Lazy import of `torch._dynamo`, for processes that do not compile.

diffusers 0.42 and transformers 5 import it for decorators that matter only to compiled code. With torch 2.13, this
takes two fifths of the time to import diffusers.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

__all__ = ["import_dynamo_lazily"]

_NAME = "torch._dynamo"
_DECORATORS = ("allow_in_graph", "assume_constant_result", "disable")
# torch 2.13 imports this submodule for flex attention. It does not use the others.
_INDEPENDENT = f"{_NAME}._trace_wrapped_higher_order_op"


class _LazyDynamo(types.ModuleType):
    """Placeholder for `torch._dynamo` that becomes the real module when anything but the decorators is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        _import_fully(self)
        return getattr(self, name)


class _SubmoduleFinder(MetaPathFinder, Loader):
    """Finder that imports `torch._dynamo` fully before one of its submodules, which depend on each other."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Return a spec for a submodule that the import of the package has imported, or None."""
        if not name.startswith(f"{_NAME}.") or name == _INDEPENDENT:
            return None
        _import_fully(sys.modules[_NAME])
        return ModuleSpec(name, self) if name in sys.modules else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Return the imported module."""
        return sys.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module is already executed."""


class _CompiledModel:
    """Class without instances: no model is compiled before `torch._dynamo` is imported."""


def import_dynamo_lazily() -> None:
    """Do not import `torch._dynamo` until it is needed; do nothing if it is already imported.

    Call this only in a process that does not compile: functions that libraries exclude from compilation while they
    are imported are not excluded.
    """
    torch_spec = importlib.util.find_spec("torch")
    if _NAME in sys.modules or torch_spec is None or torch_spec.origin is None:
        return
    folder = Path(torch_spec.origin).parent / "_dynamo"
    spec = importlib.util.spec_from_file_location(
        _NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None:
        return
    module: Any = importlib.util.module_from_spec(spec)
    module.__class__ = _LazyDynamo
    module._is_lazy = True
    for decorator in _DECORATORS:
        setattr(module, decorator, _return_unchanged)
    # diffusers checks whether a model is an instance of the class of compiled models.
    module.eval_frame = types.SimpleNamespace(OptimizedModule=_CompiledModel)
    sys.modules[_NAME] = module
    sys.meta_path.insert(0, _SubmoduleFinder())


def _import_fully(module: Any) -> None:
    """Execute the real module in the placeholder, so that references to it stay valid."""
    if not vars(module).pop("_is_lazy", False):
        return
    loader: Any = module.__spec__.loader
    module.__class__ = types.ModuleType
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _SubmoduleFinder)]
    for name in (*_DECORATORS, "eval_frame"):
        delattr(module, name)
    loader.exec_module(module)


def _return_unchanged(fn: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Return a function or class unchanged; without one, return a decorator that does so."""
    return _return_unchanged if fn is None else fn
