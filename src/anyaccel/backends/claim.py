"""Classes for the claims in a capability sheet and for the evidence that supports them.

All classes are frozen and use only standard Python types, so sheets can be read without importing
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from packaging.requirements import Requirement as VersionCondition
from packaging.version import InvalidVersion, Version

from anyaccel.backends.quirks import KNOWN_QUIRKS
from anyaccel.errors import UsageError, nearest

__all__ = [
    "Answer",
    "Claim",
    "DtypeLimit",
    "Effect",
    "Evidence",
    "EvidenceEntry",
    "Limit",
    "OperationLimit",
    "Quirk",
    "RoundTrip",
    "SizeLimit",
    "Unknown",
    "Yes",
    "read_version",
]

# What a limit does: raise, return wrong results silently, narrow the dtype silently, cost time.
Effect: TypeAlias = Literal["error", "wrong", "narrowed", "slow"]

# The basis of a claim: observed on the device, documented, or inferred from other facts.
Evidence: TypeAlias = Literal["hardware", "documented", "inferred"]


@dataclass(frozen=True, kw_only=True)
class EvidenceEntry:
    """The result of verifying a claim on a real device."""

    where: str
    """The device, the torch version and the date: `NVIDIA H200, torch 2.11.0, 2026-11-15`."""
    seen: str
    """What the device did: `yes`, `error`, `narrowed`."""
    agrees: bool
    file: str
    """The path of the evidence file in the repository."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One statement about a device, with its source."""

    says: str
    """The statement in one sentence."""
    source: str
    """The URL of the documentation page, issue or file."""
    evidence: Evidence
    seen_on: tuple[EvidenceEntry, ...] = ()
    """Results of verifications; added from the evidence files when the sheet is loaded."""


@dataclass(frozen=True, kw_only=True)
class Yes(Claim):
    """A claim that the device supports a feature."""


@dataclass(frozen=True, kw_only=True)
class Limit(Claim):
    """A claim that a feature fails, gives wrong results, loses precision or is slow on the device."""

    effect: Effect
    hint: str = ""
    """What to do instead."""
    only_on: tuple[str, ...] = ()
    """The products it applies to, by name: `("gaudi1",)`; empty for all."""
    only_if: tuple[str, ...] = ()
    """Version conditions that must all be met: `("macos<14", "torch<2.8")`; empty for any version."""
    not_in: tuple[tuple[str, str], ...] = ()
    """Pairs of product and mode it does not apply to: `(("gaudi2", "eager"),)`."""
    contradicted_by: str = ""
    """The URL of a source that disagrees; the device is probed if possible."""
    raises: Literal["RuntimeError", "TypeError"] = "RuntimeError"
    """The exception class, if the effect is `error`."""

    @property
    def conditional(self) -> bool:
        """Whether the limit applies only to certain products or versions."""
        return bool(self.only_on or self.only_if)

    def applies(self, product: str | None, versions: Mapping[str, str]) -> bool | None:
        """Return whether the limit applies, or None if that depends on an unknown product or version.

        >>> Limit(says="", source="", evidence="inferred", effect="slow", only_if=("macos<14",)).applies(
        ...     None, {"macos": "15.1"}
        ... )
        False
        """
        # Three-valued: True, False, or None if the product or a version is not known.
        verdicts: list[bool | None] = []
        if self.only_on:
            verdicts.append(None if product is None else product in self.only_on)
        for text in self.only_if:
            condition = VersionCondition(text)
            version = read_version(versions.get(condition.name))
            verdicts.append(None if version is None else condition.specifier.contains(version, prereleases=True))
        # One failed condition decides, even if others are unknown.
        if False in verdicts:
            return False
        return None if None in verdicts else True


def read_version(text: str | None) -> Version | None:
    """Parse a version string, or return None if it is missing or invalid.

    Pre-release and local suffixes are dropped, so `2.8.0.dev1` compares equal to `2.8.0`.
    """
    try:
        # 2.8.0.dev1 sorts before 2.8.0, but a nightly has the behavior of the release that it leads to.
        return Version(Version(str(text)).base_version)
    except InvalidVersion:
        return None


@dataclass(frozen=True, kw_only=True)
class DtypeLimit(Limit):
    """A limit on a dtype that is not supported, is converted to a narrower dtype, or is slow."""

    becomes: str = ""
    """The dtype to use instead; empty if no other dtype helps."""


@dataclass(frozen=True, kw_only=True)
class SizeLimit(Limit):
    """A maximum tensor or attention size, above which the device fails or returns wrong results."""

    amount: int
    unit: Literal["elements", "bytes"]
    of: Literal["tensor", "attention_scores"]
    """What is limited: any tensor, or batch × heads × queries × keys of one attention call."""


@dataclass(frozen=True, kw_only=True)
class RoundTrip(Limit):
    """The cost of a device-to-CPU copy, such as `tensor.item()`, during a run."""

    cost_us: float | None
    """Measured microseconds of one round trip; None if no figure was found."""


@dataclass(frozen=True, kw_only=True)
class OperationLimit(Limit):
    """Operations that are missing on the device or return wrong results.

    Each operation is a `torch.ops.aten` name, with or without an overload.
    """

    name: str
    operations: tuple[str, ...]
    dtypes: tuple[str, ...] = ()
    """The dtypes it applies to; empty for any."""
    past_elements: int | None = None
    """The number of elements of an input or output above which it applies; None for any."""
    reads_ignored_input: bool = False
    """Whether the operation reads an input that `beta=0` tells it to ignore."""


@dataclass(frozen=True, kw_only=True)
class Quirk(Limit):
    """A device behavior that no other class of claim covers.

    `quirks.py` lists the names of the quirks that anyaccel handles in code.
    """

    name: str
    information_only: bool = False
    """Whether it is only shown to users, without code that reacts to it."""

    def __post_init__(self) -> None:
        # Catches misspelled names when the sheet is defined: code that reacts to a quirk compares names.
        if self.name in KNOWN_QUIRKS and self.information_only:
            raise UsageError(
                f"the quirk {self.name!r} cannot have information_only=True: anyaccel has code that handles it",
                hint="remove information_only=True",
            )
        if self.name not in KNOWN_QUIRKS and not self.information_only:
            hint = f"{nearest(self.name, sorted(KNOWN_QUIRKS))}; or set information_only=True to only show it to users"
            raise UsageError(f"unknown quirk {self.name!r}: anyaccel has no code that handles it", hint=hint)


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """A placeholder for a claim for which no source was found."""

    says: str


# The answer to "does the device support it?".
Answer: TypeAlias = Yes | Limit | Unknown
