"""What is said about a device, and how it is known: a claim is a fact, a limit or an open question.

Sheets are made of these. All are frozen and hold standard types only, so that a sheet is read without torch.
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

Effect: TypeAlias = Literal["error", "wrong", "narrowed", "slow"]
"""What a limit does: raises; gives silently wrong numbers; silently narrows the dtype; costs time."""

Evidence: TypeAlias = Literal["hardware", "documented", "inferred"]
"""How a claim is known: somebody saw it on the device; a document says so; it follows from something else."""


@dataclass(frozen=True, kw_only=True)
class EvidenceEntry:
    """What a verification on a real device saw of a claim."""

    where: str
    """The device and what ran on it: `NVIDIA H200, torch 2.11.0, 2026-11-15`."""
    seen: str
    """What it did: `yes`, `error`, `narrowed`."""
    agrees: bool
    file: str
    """The evidence file, by its path in the repository."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One statement about a device, with where it is known from."""

    says: str
    """The statement in one sentence."""
    source: str
    """The address of the document or thread."""
    evidence: Evidence
    seen_on: tuple[EvidenceEntry, ...] = ()
    """What verifications saw of it; a sheet as it is written has none, and takes them in when it is loaded."""


@dataclass(frozen=True, kw_only=True)
class Yes(Claim):
    """The device does it."""


@dataclass(frozen=True, kw_only=True)
class Limit(Claim):
    """The device does not do it, or not right."""

    effect: Effect
    hint: str = ""
    """What to do instead."""
    only_on: tuple[str, ...] = ()
    """The products it holds on, by name: `("gaudi1",)`; empty means all."""
    only_if: tuple[str, ...] = ()
    """The versions it holds for, all of them: `("macos<14", "torch<2.8")`; empty means any."""
    not_in: tuple[tuple[str, str], ...] = ()
    """The products and modes that it does not hold in: `(("gaudi2", "eager"),)`."""
    contradicted_by: str = ""
    """The address of a source that says otherwise; the device is asked where it can be."""
    raises: Literal["RuntimeError", "TypeError"] = "RuntimeError"
    """The kind of error that the device raises, where the effect is one."""

    @property
    def conditional(self) -> bool:
        """Whether the limit depends on a product or a version that is not settled yet."""
        return bool(self.only_on or self.only_if)

    def applies(self, product: str | None, versions: Mapping[str, str]) -> bool | None:
        """Whether the limit holds there; None where a condition cannot be decided from what is given.

        >>> Limit(says="", source="", evidence="inferred", effect="slow", only_if=("macos<14",)).applies(
        ...     None, {"macos": "15.1"}
        ... )
        False
        """
        verdicts: list[bool | None] = []
        if self.only_on:
            verdicts.append(None if product is None else product in self.only_on)
        for text in self.only_if:
            condition = VersionCondition(text)
            version = read_version(versions.get(condition.name))
            verdicts.append(None if version is None else condition.specifier.contains(version, prereleases=True))
        if False in verdicts:
            return False
        return None if None in verdicts else True


def read_version(text: str | None) -> Version | None:
    """A version as it is compared: a build before a release counts as that release; None if it cannot be read."""
    try:
        return Version(Version(str(text)).base_version)
    except InvalidVersion:
        return None


@dataclass(frozen=True, kw_only=True)
class DtypeLimit(Limit):
    """A number type that the device lacks, narrows or is slow at."""

    becomes: str = ""
    """The type to ask for instead; empty where asking for another one gains nothing."""


@dataclass(frozen=True, kw_only=True)
class SizeLimit(Limit):
    """A size past which the device fails or is silently wrong."""

    amount: int
    unit: Literal["elements", "bytes"]
    of: Literal["tensor", "attention_scores"]
    """What is measured: any tensor, or batch × heads × queries × keys of one attention call."""


@dataclass(frozen=True, kw_only=True)
class RoundTrip(Limit):
    """Reading a value back to the host in the middle of a run."""

    cost_us: float | None
    """Microseconds for one, as somebody measured it; None where no figure was found."""


@dataclass(frozen=True, kw_only=True)
class OperationLimit(Limit):
    """Operations that the device lacks or gets wrong, by name in `torch.ops.aten`, with an overload if need be."""

    name: str
    operations: tuple[str, ...]
    dtypes: tuple[str, ...] = ()
    """The number types it holds for; empty means any."""
    past_elements: int | None = None
    """The size of an argument or result past which it holds; None means any."""
    reads_ignored_input: bool = False
    """Whether the fault is that a first argument which a factor of 0 should silence is read all the same."""


@dataclass(frozen=True, kw_only=True)
class Quirk(Limit):
    """A behaviour that fits no other kind; code reacts to those that `quirks.py` names."""

    name: str
    information_only: bool = False
    """Whether no code reacts to it: it is shown to users, and nothing else."""

    def __post_init__(self) -> None:
        if self.name in KNOWN_QUIRKS and self.information_only:
            raise UsageError(f"code reacts to the quirk {self.name!r}", hint="drop information_only=True")
        if self.name not in KNOWN_QUIRKS and not self.information_only:
            hint = f"{nearest(self.name, sorted(KNOWN_QUIRKS))}; or set information_only=True"
            raise UsageError(f"no code reacts to the quirk {self.name!r}", hint=hint)


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """Looked for, and not found: said openly, so that nobody mistakes silence for support."""

    says: str


Answer: TypeAlias = Yes | Limit | Unknown
"""The answer to "does the device do it?"."""
