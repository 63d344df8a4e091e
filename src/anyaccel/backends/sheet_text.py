"""Text rendering of a sheet, for the command line and the documentation."""

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
from anyaccel.backends.installation import InstallCommand
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

# Section titles by field of the sheet. A new field with claims needs an entry.
_SECTIONS = {
    "dtypes": "Dtypes",
    "default_dtypes": "Dtypes",
    "random_numbers": "Behavior",
    "data_dependent_shapes": "Behavior",
    "new_shapes": "Behavior",
    "host_round_trip": "Behavior",
    "batches": "Behavior",
    "training": "Behavior",
    "fused_attention": "Behavior",
    "memory": "Memory",
    "quantized_weights": "Memory",
    "speedups": "Speed",
    "largest_tensor": "Size and operation limits",
    "operations": "Size and operation limits",
    "quirks": "Quirks",
    "compiler": "Software",
    "distributed": "Software",
    "modes": "Software",
    "variables": "Software",
    "requirements": "Requirements",
    "installation": "Installation",
    "products": "Products",
}

_OBSERVED = {"yes": "it works", "wrong": "silently wrong", "error": "an error", "narrowed": "silently narrowed"}
# Their entries are identifiers, so underscores are not replaced by spaces.
_IDENTIFIER_FIELDS = ("dtypes", "variables", "operations", "quirks")


@dataclass(frozen=True)
class SheetRow:
    """One claim, formatted as text."""

    subject: str
    verdict: str
    """`yes`, `error`, `narrowed → float32`, `not known`."""
    says: str
    evidence: str
    source: str
    contradicted_by: str = ""
    files: tuple[str, ...] = ()
    """The evidence files with results for it."""


@dataclass(frozen=True)
class SheetSection:
    """A group of sheet rows with a title, such as `Dtypes`."""

    title: str
    rows: tuple[SheetRow, ...]


def describe_sheet(sheet: Sheet) -> list[SheetSection]:
    """Return all claims of a sheet as text, grouped into sections."""
    sections: dict[str, list[SheetRow]] = {}
    for name, claim in sheet.claims():
        field, _, entry = name.partition(".")
        subject = entry if field in _IDENTIFIER_FIELDS else (entry or field).replace("_", " ")
        sections.setdefault(_SECTIONS[field], []).append(_make_row(subject, claim))
    return [SheetSection(title, tuple(rows)) for title, rows in sections.items()]


def sheet_as_json(sheet: Sheet) -> dict[str, Any]:
    """Return a sheet as a JSON-serializable dict; `kind` is the class name of each claim."""
    plain: dict[str, Any] = _plain(sheet)
    return plain


def _make_row(subject: str, claim: Claim | Unknown) -> SheetRow:
    if isinstance(claim, Unknown):
        return SheetRow(subject, "not known", claim.says, "", "")
    # Requirements have no names of their own, only indices.
    if isinstance(claim, Requirement):
        subject = claim.requires
    if isinstance(claim, InstallCommand):
        subject = " or ".join(claim.systems)
    says = f"{claim.says} Instead: {claim.hint}." if isinstance(claim, Limit) and claim.hint else claim.says
    says = " ".join([says, *(_format_evidence(entry) for entry in claim.seen_on)])
    contradicted = claim.contradicted_by if isinstance(claim, Limit) else ""
    files = tuple(entry.file for entry in claim.seen_on)
    return SheetRow(subject, _verdict(claim), says, claim.evidence, claim.source, contradicted, files)


def _format_evidence(entry: EvidenceEntry) -> str:
    if entry.agrees:
        return f"Verified on {entry.where}."
    return f"Contradicted on {entry.where}: {_OBSERVED.get(entry.seen, entry.seen)}."


def _verdict(claim: Claim) -> str:
    if isinstance(claim, Limit):
        return _limit_verdict(claim)
    if isinstance(claim, Product):
        return _product_verdict(claim)
    if isinstance(claim, MemoryTerms):
        return _memory_verdict(claim)
    # getattr, because all texts are built before the class of the claim is checked.
    verdicts: list[tuple[type[Claim], str]] = [
        (Yes, "yes"),
        (Quantization, f"{getattr(claim, 'bits', 0):g} bits per weight"),
        (Mode, "yes"),
        (DtypeOrder, " > ".join(getattr(claim, "order", ()))),
        (Compiler, getattr(claim, "backend", "")),
        (Distributed, getattr(claim, "backend", "")),
        (InstallCommand, getattr(claim, "command", "")),
        (Speedup, f"{getattr(claim, 'gain', 1):g} times as fast"),
        (Variable, f"={getattr(claim, 'value', '')}" if getattr(claim, "value", "") else "set by the user"),
    ]
    return next((text for kind, text in verdicts if isinstance(claim, kind)), "required")


def _limit_verdict(limit: Limit) -> str:
    text: str = limit.effect
    if isinstance(limit, DtypeLimit) and limit.becomes:
        text += f" → {limit.becomes}"
    if isinstance(limit, SizeLimit):
        text += f" above {_format_power(limit.amount)} {limit.unit}"
    if isinstance(limit, RoundTrip) and limit.cost_us is not None:
        text += f", about {limit.cost_us:.0f} µs"
    if isinstance(limit, OperationLimit):
        text += f" in {', '.join(limit.operations)}"
    conditions = [*limit.only_on, *limit.only_if]
    return f"{text} (only {', '.join(conditions)})" if conditions else text


def _memory_verdict(terms: MemoryTerms) -> str:
    limits = [f"{share:.0%}" + (f" up to {most / 2**30:.0f} GiB" if most else "") for most, share in terms.shares]
    reserved = f", minus {terms.kept_bytes / 2**20:.0f} MiB" if terms.kept_bytes else ""
    return f"{', '.join(limits)}{reserved}"


def _product_verdict(product: Product) -> str:
    memory = "memory varies" if product.memory_bytes is None else f"{product.memory_bytes / 2**30:.0f} GiB"
    count = "" if product.per_server is None else f", {product.per_server} per server"
    speed = "" if product.half_precision_flops is None else f", {product.half_precision_flops / 1e12:.0f} TFLOPS"
    speed += "" if product.memory_bytes_per_s is None else f", {product.memory_bytes_per_s / 1e9:.0f} GB/s"
    text = f"{memory}{speed}{count}"
    return text if product.native else f"{text}; not supported: {product.software}"


def _format_power(amount: int) -> str:
    """Format an integer; a power of two, or a power of two minus one, is formatted as `2**32`."""
    # Limits are documented both as 2**32 and as the largest value below it.
    for value in (amount, amount + 1):
        if value > 0 and value & (value - 1) == 0:
            return f"2**{value.bit_length() - 1}"
    return str(amount)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        # The class distinguishes Yes, Limit and Unknown, and JSON would lose it.
        kind = {"kind": type(value).__name__} if isinstance(value, Claim | Unknown) else {}
        return kind | plain
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value
