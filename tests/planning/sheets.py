"""Sheets for planning tests: a device without limits, and limits to add to it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Literal

import anyaccel
from anyaccel.backends.claim import DtypeLimit, Effect, Limit, OperationLimit, Quirk, RoundTrip, SizeLimit, Unknown, Yes
from anyaccel.backends.sheet import DtypeOrder, Dtypes, Sheet

__all__ = [
    "ANSWER", "NAMES", "dtype_limit", "limit", "operation_limit", "quirk", "real_sheet", "round_trip", "size_limit",
    "without_limits",
]  # fmt: skip

NAMES = ("cpu", "cuda", "rocm", "mps", "hpu", "neuron", "xpu", "npu", "mlu")
_CLAIM: dict[str, Any] = {"says": "A documented fact.", "source": "https://example.org", "evidence": "documented"}
ANSWER = Yes(**_CLAIM)


def without_limits(**changes: Any) -> Sheet:
    """Return the sheet of a device without limits, except for the given fields; dtype names set that dtype."""
    names = [field.name for field in fields(Dtypes)]
    dtypes = Dtypes(**{name: changes.pop(name, ANSWER) for name in names})
    base = Sheet(
        name="best",
        title="The best device",
        vendor="Nobody",
        documentation="https://example.org",
        preference=1,
        dtypes=dtypes,
        default_dtypes=DtypeOrder(order=("bfloat16", "float16", "float32"), **_CLAIM),
        random_numbers=ANSWER,
        data_dependent_shapes=ANSWER,
        new_shapes=ANSWER,
        host_round_trip=ANSWER,
        batches=ANSWER,
        training=ANSWER,
        largest_tensor=(ANSWER,),
        compiler=Unknown(says="No compiler was found."),
        distributed=Unknown(says="Nothing was found."),
    )
    return replace(base, **changes)


def dtype_limit(effect: Effect, **more: Any) -> DtypeLimit:
    return DtypeLimit(effect=effect, **_CLAIM | more)


def limit(effect: Effect, **more: Any) -> Limit:
    return Limit(effect=effect, **_CLAIM | more)


def round_trip(**more: Any) -> RoundTrip:
    return RoundTrip(effect="slow", cost_us=10.0, **_CLAIM | more)


def size_limit(
    amount: int,
    unit: Literal["elements", "bytes"] = "elements",
    of: Literal["tensor", "attention_scores"] = "attention_scores",
    **more: Any,
) -> SizeLimit:
    return SizeLimit(effect="wrong", amount=amount, unit=unit, of=of, **_CLAIM | more)


def operation_limit(effect: Effect, **more: Any) -> OperationLimit:
    return OperationLimit(effect=effect, operations=("mul",), **{"name": "an_operation"} | _CLAIM | more)


def quirk(name: str, **more: Any) -> Quirk:
    return Quirk(effect="wrong", name=name, **_CLAIM | more)


def real_sheet(name: str) -> Sheet:
    """Return a built-in sheet with its conditions resolved for torch 2.13 and macOS 15."""
    return anyaccel.sheet(name).on(versions={"torch": "2.13.0", "macos": "15.0"})
