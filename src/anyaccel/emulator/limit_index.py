"""Index of a sheet's limits by operation, dtype and size, for fast checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from anyaccel.backends.claim import DtypeLimit, Limit, OperationLimit, SizeLimit
from anyaccel.backends.quirks import HOST_NUMBER_OFFSET_IGNORED, UNINITIALISED_MEMORY_IS_NAN
from anyaccel.backends.sheet import Sheet
from anyaccel.upstream.torch_internals import read_schema

__all__ = ["LimitIndex", "OperationFacts", "read_operation"]

# Names of aten operations without their overloads, by the property that a limit can depend on.
_RANDOM = {
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "native_dropout",
    "normal", "normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random_",
    "randperm", "uniform_",
}  # fmt: skip
_DATA_DEPENDENT = {"_unique2", "bincount", "masked_select", "nonzero", "repeat_interleave", "unique_dim"}
_HOST_READS = {"_local_scalar_dense", "equal", "is_nonzero"}  # _local_scalar_dense is Tensor.item()


@dataclass(frozen=True)
class OperationFacts:
    """Properties of a torch operator, derived from its name and schema."""

    name: str
    """`baddbmm`."""
    overload: str
    """`baddbmm.out`; the plain name for the default overload."""
    label: str
    """`aten::baddbmm`."""
    mutates: bool
    is_view: bool
    is_random: bool
    takes_generator: bool
    has_data_dependent_shape: bool
    reads_to_host: bool


def read_operation(func: Any) -> OperationFacts:
    """Return an operator's properties, such as whether it is random or modifies its inputs."""
    schema = read_schema(func)
    name = schema.name.split("::")[-1]
    # repeat_interleave with a scalar count has a static shape; only the overload with a tensor of counts does not.
    is_data_dependent = name != "repeat_interleave" or schema.overload_name == "Tensor"
    return OperationFacts(
        name=name,
        overload=f"{name}.{schema.overload_name}" if schema.overload_name else name,
        label=schema.name,
        mutates=schema.is_mutable,
        is_view=any(result.alias_info is not None for result in schema.returns) and not schema.is_mutable,
        is_random=name in _RANDOM,
        takes_generator=any(argument.name == "generator" for argument in schema.arguments),
        has_data_dependent_shape=name in _DATA_DEPENDENT and is_data_dependent,
        reads_to_host=name in _HOST_READS,
    )


@dataclass
class LimitIndex:
    """Index of the limits on a sheet, except those that depend on an unspecified product or version."""

    sheet: Sheet
    dtypes: dict[torch.dtype, tuple[str, DtypeLimit]] = field(default_factory=dict)
    operations: dict[str, list[tuple[str, OperationLimit]]] = field(default_factory=dict)
    tensor_sizes: list[tuple[str, SizeLimit]] = field(default_factory=list)
    score_sizes: list[tuple[str, SizeLimit]] = field(default_factory=list)
    random: Limit | None = None
    shapes: Limit | None = None
    round_trip: Limit | None = None
    nan_in_empty: bool = False
    host_scalar: tuple[str, Limit] | None = None

    def __post_init__(self) -> None:
        certain = {name: limit for name, limit in self.sheet.limits(Limit).items() if _is_certain(limit)}
        for name, limit in certain.items():
            if isinstance(limit, DtypeLimit):
                self.dtypes[getattr(torch, name.removeprefix("dtypes."))] = (name, limit)
            elif isinstance(limit, OperationLimit):
                for operation in limit.operations:
                    self.operations.setdefault(operation, []).append((name, limit))
            elif isinstance(limit, SizeLimit):
                (self.tensor_sizes if limit.of == "tensor" else self.score_sizes).append((name, limit))
        self.random = certain.get("random_numbers")
        self.shapes = certain.get("data_dependent_shapes")
        self.round_trip = certain.get("host_round_trip")
        self.nan_in_empty = f"quirks.{UNINITIALISED_MEMORY_IS_NAN}" in certain
        quirk = f"quirks.{HOST_NUMBER_OFFSET_IGNORED}"
        self.host_scalar = (quirk, certain[quirk]) if quirk in certain else None

    def match_size(self, elements: int, element_bytes: int, scores: bool) -> list[tuple[str, Limit]]:
        """Return the size limits that a tensor exceeds; `scores` adds the limits on attention scores."""
        # Materialized scores are a tensor too, so both kinds of limit apply to them.
        limits = [*self.tensor_sizes, *self.score_sizes] if scores else self.tensor_sizes
        return [
            (name, limit)
            for name, limit in limits
            if (elements if limit.unit == "elements" else elements * element_bytes) > limit.amount
        ]

    def match_operation(self, facts: OperationFacts, args: Any, result: Any) -> list[tuple[str, Limit]]:
        """Return the limits on an operator that a call hits, given its arguments and result."""
        return [
            (name, limit)
            for operation in {facts.name, facts.overload}
            for name, limit in self.operations.get(operation, ())
            if _applies(limit, args, result)
        ]


def _is_certain(limit: Limit) -> bool:
    """Return whether a limit should be enforced.

    A limit is not enforced if it depends on an unspecified product or version, or if it is only
    inferred and other evidence contradicts it.
    """
    return not limit.conditional and not (limit.evidence == "inferred" and limit.contradicted_by)


def _applies(limit: OperationLimit, args: Any, result: Any) -> bool:
    tensors = [value for value in (*args, result) if isinstance(value, torch.Tensor)]
    if limit.dtypes and not any(str(tensor.dtype).removeprefix("torch.") in limit.dtypes for tensor in tensors):
        return False
    if limit.past_elements is not None and not any(tensor.numel() > limit.past_elements for tensor in tensors):
        return False
    return not limit.reads_ignored_input  # depends on the values: dispatch checks it
