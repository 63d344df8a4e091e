"""Split of a model call into calls with fewer rows, and the table of the classes for which that is verified.

`tools/row_table.py` generates the table: it runs the models of all recipes with batches of different sizes, and
stores how the size of each argument depends on the number of rows. An argument is split only as the table says.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

import torch

__all__ = [
    "Arguments",
    "NotSplittableError",
    "RowRules",
    "RowTable",
    "count_rows",
    "join_outputs",
    "load_table",
    "split_arguments",
]

_TABLE = "row_table.json"
# Values without rows.
_CONSTANTS = (bool, int, float, str, torch.dtype, torch.device, type(None))

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Path = str


class NotSplittableError(Exception):
    """A model call whose rows cannot be separated with certainty."""


@dataclass(frozen=True)
class RowRules:
    """How the arguments of one model class depend on the number of rows."""

    arguments: Mapping[Path, tuple[str, ...]]
    """The kinds of each tensor and list, by path: `sample`, `added_cond_kwargs.time_ids`, `residuals[]`.

    `rows`: the first dimension is the number of rows. `repeated`: a multiple of it. `columns`: the second dimension is
    the number of rows. `one`: the first dimension is 1. `scalar`: no dimension. `shared2`: two dimensions that do not
    depend on the number of rows. `list`: a list with one item per row. `items`: a list of another length.
    """
    joins_lists: bool
    """Whether the output contains lists with one item per row."""


@dataclass(frozen=True)
class RowTable:
    """The model classes whose rows are verified to be independent."""

    models: Mapping[str, RowRules]
    """By class name."""
    processors: frozenset[str]
    """Names of attention processors that do not combine rows."""
    vaes: frozenset[str]
    """Names of autoencoders whose images do not change with `enable_slicing`."""

    def find_rules(self, model: torch.nn.Module) -> RowRules | None:
        """Return the rules for a model; None if its class is not in the table."""
        kind = type(model)
        return self.models.get(kind.__name__) if kind.__module__.startswith("diffusers.") else None


@cache
def load_table() -> RowTable:
    """Return the table that is part of the package."""
    content = json.loads(resources.files(__package__).joinpath(_TABLE).read_text())
    models = {
        name: RowRules({path: tuple(kinds) for path, kinds in rules["arguments"].items()}, rules["joins_lists"])
        for name, rules in content["models"].items()
    }
    return RowTable(models, frozenset(content["processors"]), frozenset(content["vaes"]))


def count_rows(model: torch.nn.Module, rules: RowRules, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the number of rows of a model call; raise `NotSplittableError` if it cannot be determined."""
    name = next(iter(rules.arguments), "")
    value = _name_arguments(model, args, kwargs).get(name)
    if isinstance(value, torch.Tensor) and value.dim():
        return int(value.shape[0])
    if isinstance(value, list) and "list" in rules.arguments[name]:
        return len(value)
    raise NotSplittableError(f"the argument {name!r} has no rows")


def split_arguments(
    model: torch.nn.Module, rules: RowRules, args: tuple[Any, ...], kwargs: Mapping[str, Any], limit: int
) -> list[Arguments]:
    """Split the arguments of a model call into those of calls with at most `limit` rows.

    Raise `NotSplittableError` for an argument that is not in the table, or whose size contradicts it.
    """
    rows = count_rows(model, rules, args, kwargs)
    sizes = [min(limit, rows - start) for start in range(0, rows, limit)]
    splitter = _Splitter(rules, sizes)
    named = {name: splitter.split(value, name) for name, value in _name_arguments(model, args, kwargs).items()}
    positional = list(named)[: len(args)]
    return [
        (
            tuple(named[name][chunk] for name in positional),
            {name: values[chunk] for name, values in named.items() if name not in positional},
        )
        for chunk in range(len(sizes))
    ]


def _name_arguments(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments by name, positional ones first."""
    names = list(inspect.signature(type(model).forward).parameters)[1 : len(args) + 1]
    if len(names) < len(args):
        raise NotSplittableError("it has positional arguments without a name")
    return {**dict(zip(names, args, strict=True)), **kwargs}


class _Splitter:
    def __init__(self, rules: RowRules, sizes: Sequence[int]) -> None:
        self.rules, self.sizes, self.rows = rules, list(sizes), sum(sizes)
        # A tensor that is passed twice stays one object, because models may compare their arguments with `is`.
        self.done: dict[tuple[int, Path], list[Any]] = {}

    def split(self, value: Any, path: Path) -> list[Any]:
        """Return the value for each chunk of rows."""
        if isinstance(value, _CONSTANTS):
            return [value] * len(self.sizes)
        kinds = self.rules.arguments.get(path, ())
        if isinstance(value, torch.Tensor):
            key = id(value), ",".join(kinds)
            if key not in self.done:
                self.done[key] = self._split_tensor(value, path, kinds)
            return self.done[key]
        if type(value) is dict:
            parts = {name: self.split(item, f"{path}.{name}") for name, item in value.items()}
            return [{name: items[chunk] for name, items in parts.items()} for chunk in range(len(self.sizes))]
        if type(value) in (list, tuple):
            return self._split_list(value, path, kinds)
        raise NotSplittableError(f"the argument {path!r} is a {type(value).__name__}")

    def _split_tensor(self, tensor: torch.Tensor, path: Path, kinds: tuple[str, ...]) -> list[Any]:
        shape, rows = tuple(tensor.shape), self.rows
        if shape and "rows" in kinds and shape[0] == rows:
            return list(tensor.split(self.sizes))
        if shape and "repeated" in kinds and shape[0] and shape[0] % rows == 0:
            return list(tensor.split([size * (shape[0] // rows) for size in self.sizes]))
        if len(shape) > 1 and "columns" in kinds and shape[1] == rows:
            return list(tensor.split(self.sizes, dim=1))
        is_scalar = "scalar" in kinds and shape in ((), (1,))
        if is_scalar or ("one" in kinds and shape[:1] == (1,)) or f"shared{len(shape)}" in kinds:
            return [tensor] * len(self.sizes)
        reason = "is not known" if not kinds else f"has the unexpected shape {shape} for {rows} rows"
        raise NotSplittableError(f"the argument {path!r} {reason}")

    def _split_list(self, value: Any, path: Path, kinds: tuple[str, ...]) -> list[Any]:
        if "list" in kinds and len(value) == self.rows:
            starts = [sum(self.sizes[:chunk]) for chunk in range(len(self.sizes))]
            return [value[start : start + size] for start, size in zip(starts, self.sizes, strict=True)]
        if value and "items" not in kinds:
            raise NotSplittableError(f"the argument {path!r} is a {type(value).__name__} of {len(value)} items")
        items = [self.split(item, f"{path}[]") for item in value]
        return [type(value)(item[chunk] for item in items) for chunk in range(len(self.sizes))]


def join_outputs(outputs: Sequence[Any], *, joins_lists: bool) -> Any:
    """Join the outputs of calls with fewer rows into the output of one call."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(outputs))
    if isinstance(first, list) and joins_lists:
        return [item for output in outputs for item in output]
    join: Callable[[Sequence[Any]], Any] = lambda values: join_outputs(values, joins_lists=joins_lists)  # noqa: E731
    if type(first) in (list, tuple):
        return type(first)(join(values) for values in zip(*outputs, strict=True))
    if type(first) is dict:
        return {name: join([output[name] for output in outputs]) for name in first}
    if hasattr(first, "to_tuple"):
        names = [field.name for field in fields(first)]
        return type(first)(**{name: join([getattr(output, name) for output in outputs]) for name in names})
    if first is None:
        return None
    raise NotSplittableError(f"the output contains a {type(first).__name__}")
