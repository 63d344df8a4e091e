"""A sheet in words: the same sections for the command line and for the documentation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from anyaccel.backends.claim import (
    Claim,
    DtypeLimit,
    EvidenceEntry,
    Limit,
    OperationLimit,
    RoundTrip,
    SizeLimit,
    Unknown,
    Yes,
)
from anyaccel.backends.requirement import Requirement
from anyaccel.backends.sheet import (
    Compiler,
    Distributed,
    DtypeOrder,
    MemoryTerms,
    Mode,
    Product,
    Quantization,
    Sheet,
    Speedup,
    Variable,
)

__all__ = ["SheetRow", "SheetSection", "describe_sheet", "sheet_as_json"]

_SECTIONS = {
    "dtypes": "Number types",
    "default_dtypes": "Number types",
    "random_numbers": "Behaviour",
    "data_dependent_shapes": "Behaviour",
    "new_shapes": "Behaviour",
    "host_round_trip": "Behaviour",
    "batches": "Behaviour",
    "training": "Behaviour",
    "fused_attention": "Behaviour",
    "memory": "Memory",
    "quantized_weights": "Memory",
    "speedups": "Speed",
    "largest_tensor": "Limits on size and operations",
    "operations": "Limits on size and operations",
    "quirks": "Quirks",
    "compiler": "Software",
    "distributed": "Software",
    "modes": "Software",
    "variables": "Software",
    "requirements": "Requirements",
    "products": "Products",
}

_SEEN = {"yes": "it works", "wrong": "silently wrong", "error": "an error", "narrowed": "silently narrowed"}
_KEPT_NAMES = ("dtypes", "variables", "operations", "quirks")
"""Fields whose parts are names that people type, underscores and all."""


@dataclass(frozen=True)
class SheetRow:
    """One claim in words."""

    matter: str
    verdict: str
    """`yes`, `error`, `narrowed → float32`, `not known`."""
    says: str
    evidence: str
    source: str
    contradicted_by: str = ""
    files: tuple[str, ...] = ()
    """The evidence files that speak of it."""


@dataclass(frozen=True)
class SheetSection:
    """The rows that belong together."""

    title: str
    rows: tuple[SheetRow, ...]


def describe_sheet(sheet: Sheet) -> list[SheetSection]:
    """Everything that a sheet claims, in the order in which a reader asks."""
    sections: dict[str, list[SheetRow]] = {}
    for name, claim in sheet.claims():
        field, _, rest = name.partition(".")
        matter = rest if field in _KEPT_NAMES else (rest or field).replace("_", " ")
        sections.setdefault(_SECTIONS[field], []).append(_describe(matter, claim))
    return [SheetSection(title, tuple(rows)) for title, rows in sections.items()]


def sheet_as_json(sheet: Sheet) -> dict[str, Any]:
    """A sheet as plain values, each claim with the kind of answer that it is."""
    plain: dict[str, Any] = _plain(sheet)
    return plain


def _describe(matter: str, claim: Claim | Unknown) -> SheetRow:
    if isinstance(claim, Unknown):
        return SheetRow(matter, "not known", claim.says, "", "")
    if isinstance(claim, Requirement):
        matter = claim.wants
    says = f"{claim.says} Instead: {claim.hint}." if isinstance(claim, Limit) and claim.hint else claim.says
    says = " ".join([says, *(_tell_sighting(sighting) for sighting in claim.seen_on)])
    contradicted = claim.contradicted_by if isinstance(claim, Limit) else ""
    files = tuple(sighting.file for sighting in claim.seen_on)
    return SheetRow(matter, _verdict(claim), says, claim.evidence, claim.source, contradicted, files)


def _tell_sighting(sighting: EvidenceEntry) -> str:
    """What a verification saw, in a sentence."""
    if sighting.agrees:
        return f"Seen on {sighting.where}."
    return f"Not so on {sighting.where}: {_SEEN.get(sighting.seen, sighting.seen)}."


def _verdict(claim: Claim) -> str:
    if isinstance(claim, Limit):
        return _limit_verdict(claim)
    if isinstance(claim, Product):
        return _product_verdict(claim)
    if isinstance(claim, MemoryTerms):
        return _memory_verdict(claim)
    verdicts: list[tuple[type[Claim], str]] = [
        (Yes, "yes"),
        (Quantization, f"{getattr(claim, 'bits', 0):g} bits a number"),
        (Mode, "yes"),
        (DtypeOrder, " > ".join(getattr(claim, "order", ()))),
        (Compiler, getattr(claim, "backend", "")),
        (Distributed, getattr(claim, "backend", "")),
        (Speedup, f"{getattr(claim, 'gain', 1):g} times as fast"),
        (Variable, f"={getattr(claim, 'value', '')}" if getattr(claim, "value", "") else "yours to set"),
    ]
    return next((text for kind, text in verdicts if isinstance(claim, kind)), "needed")


def _limit_verdict(limit: Limit) -> str:
    text: str = limit.effect
    if isinstance(limit, DtypeLimit) and limit.becomes:
        text += f" → {limit.becomes}"
    if isinstance(limit, SizeLimit):
        text += f" past {_power(limit.amount)} {limit.unit}"
    if isinstance(limit, RoundTrip) and limit.cost_us is not None:
        text += f", about {limit.cost_us:.0f} µs"
    if isinstance(limit, OperationLimit):
        text += f" in {', '.join(limit.operations)}"
    conditions = [*limit.only_on, *limit.only_if]
    return f"{text} (only {', '.join(conditions)})" if conditions else text


def _memory_verdict(terms: MemoryTerms) -> str:
    limits = [f"{share:.0%}" + (f" up to {most / 2**30:.0f} GiB" if most else "") for most, share in terms.shares]
    kept = f", less {terms.kept_bytes / 2**20:.0f} MiB" if terms.kept_bytes else ""
    return f"{', '.join(limits)}{kept}"


def _product_verdict(product: Product) -> str:
    memory = "memory varies" if product.memory_bytes is None else f"{product.memory_bytes / 2**30:.0f} GiB"
    count = "" if product.per_server is None else f", {product.per_server} a server"
    return f"{memory}{count}" if product.native else f"{memory}{count}; cannot run here: {product.software}"


def _power(amount: int) -> str:
    """`2**32` for 4294967296 and for one less."""
    for value in (amount, amount + 1):
        if value > 0 and value & (value - 1) == 0:
            return f"2**{value.bit_length() - 1}"
    return str(amount)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        kind = {"kind": type(value).__name__} if isinstance(value, Claim | Unknown) else {}
        return kind | plain
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value
