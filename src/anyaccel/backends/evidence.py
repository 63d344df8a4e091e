"""What a verification saw on a device, as a file that the sheets take in: `anyaccel devices NAME --verify` writes it.

A file says which claims of a sheet held there, which did not and which were not tried. It carries a digest of its own
content, so that one that was changed by hand is refused; and so is one of a virtual device, or that nobody signed off.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from anyaccel.backends.claim import Claim, DtypeLimit, Effect, EvidenceEntry, Limit, Unknown, Yes
from anyaccel.backends.sheet import Sheet
from anyaccel.errors import AnyaccelError

__all__ = [
    "FOLDER",
    "Finding",
    "PipelineFinding",
    "Verdict",
    "Verification",
    "load_verifications",
    "merge_evidence",
    "read_verification",
]

FORMAT = 1
FOLDER = "src/anyaccel/backends/verified"
"""Where the files lie in the repository."""
_PACKAGED = Path(__file__).parent / "verified"
_AGAIN = "anyaccel devices NAME --verify writes a new one"

Verdict: TypeAlias = Literal["agrees", "contradicts", "new", "not tried"]
"""How what was seen stands to the sheet; `new` where the sheet says that it is not known."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One claim of the sheet, held against the device."""

    claim: str
    """Its name on the sheet: `dtypes.float64`."""
    expected: str
    """What the sheet says, for this product and these versions: `yes`, `error`, `narrowed`, `not known`."""
    seen: str
    """What the device did, in the same words; empty where it was not tried."""
    verdict: Verdict
    detail: str = ""
    """The figures, the device's own words, or why it was not tried."""


@dataclass(frozen=True, kw_only=True)
class PipelineFinding:
    """One tiny pipeline, placed on the device and held against the CPU's picture."""

    recipe: str
    pipeline: str
    """The class of diffusers."""
    dtype: str
    runs: bool
    error: str = ""
    max_difference: float | None = None
    tolerance: float
    right: bool | None
    """Whether it is the CPU's picture within the tolerance; None where the CPU itself cannot make it."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Everything that one run of `--verify` saw, and on what."""

    device: str
    """The name of the sheet: `cuda`, `rocm`."""
    virtual: bool
    product: str
    """The product on the sheet; empty where the device is none of them."""
    device_name: str
    """What the device calls itself: `NVIDIA H200`."""
    date: str
    commit: str
    """The commit of anyaccel, with `-dirty` after it if files were changed; empty where it is not known."""
    versions: Mapping[str, str]
    """`python`, `torch`, `diffusers`, `driver` and the like."""
    system: str
    architecture: str
    signed_off_by: str
    """Who answers for it; empty where nobody does."""
    conditions: tuple[str, ...] = ()
    """What was set for a fair comparison."""
    findings: tuple[Finding, ...] = ()
    pipelines: tuple[PipelineFinding, ...] = ()

    @property
    def where(self) -> str:
        """The device and what ran on it, in a few words: `NVIDIA H200, torch 2.11.0, 2026-11-15`."""
        return f"{self.device_name}, torch {self.versions.get('torch', 'not known')}, {self.date}"

    @property
    def digest(self) -> str:
        """The sha256 of the content."""
        content = json.dumps(self._content(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return "sha256:" + hashlib.sha256(content.encode()).hexdigest()

    @property
    def holds(self) -> bool:
        """Whether nothing contradicts the sheet and every pipeline that was tried is right."""
        agrees = all(finding.verdict != "contradicts" for finding in self.findings)
        return agrees and all(pipeline.right is not False for pipeline in self.pipelines)

    def to_json(self) -> str:
        """The file's text, with the digest: a line a field and a line a finding, for people who review it."""
        content = self._content() | {"digest": self.digest}
        return "{\n" + ",\n".join(f" {_dump(name)}: {_lay_out(value)}" for name, value in content.items()) + "\n}\n"

    def _content(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self), "versions": dict(self.versions)}


def _lay_out(value: Any) -> str:
    if isinstance(value, tuple) and value:
        return "[\n" + ",\n".join(f"  {_dump(item)}" for item in value) + "\n ]"
    return _dump(value)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def read_verification(text: str, name: str) -> Verification:
    """A file's text as a verification; refused if its digest is not that of its content."""
    try:
        content = json.loads(text)
        digest, form = content.pop("digest"), content.pop("format")
        verification = _build(content) if form == FORMAT else None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise AnyaccelError(f"{name} is no evidence file: {type(error).__name__}: {error}", hint=_AGAIN) from error
    if verification is None:
        raise AnyaccelError(f"{name} has the format {form}, and this anyaccel reads {FORMAT}", hint=_AGAIN)
    if verification.digest != digest:
        raise AnyaccelError(
            f"{name} was changed after it was written: its content is not that of its digest",
            hint=f"take it back to how it was written; {_AGAIN}",
        )
    return verification


def _build(content: dict[str, Any]) -> Verification:
    verification = Verification(
        **content
        | {
            "conditions": tuple(content["conditions"]),
            "findings": tuple(Finding(**finding) for finding in content["findings"]),
            "pipelines": tuple(PipelineFinding(**pipeline) for pipeline in content["pipelines"]),
        }
    )
    unheard = {finding.verdict for finding in verification.findings} - set(get_args(Verdict))
    if unheard:
        raise ValueError(f"no verdict is called {', '.join(sorted(unheard))}")
    return verification


@functools.cache
def load_verifications(folder: Path = _PACKAGED) -> Mapping[str, Verification]:
    """The verifications that the package has, by their path in the repository; only of hardware, and signed off."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        name = f"{FOLDER}/{path.name}"
        verification = read_verification(path.read_text(encoding="utf-8"), name)
        if verification.virtual or verification.device_name.startswith("virtual"):
            raise AnyaccelError(
                f"{name} is of a virtual device, which says nothing of hardware",
                hint="take it out of the folder; only a run on the device itself is evidence",
            )
        if not verification.signed_off_by:
            raise AnyaccelError(
                f"{name} is signed off by nobody",
                hint="write it again with --signed-off-by and the name of somebody who can be asked",
            )
        found[name] = verification
    return found


def merge_evidence(sheet: Sheet, verifications: Mapping[str, Verification]) -> Sheet:
    """The sheet with what was seen on its device: evidence raised, contradictions named, open questions answered."""
    for file, verification in verifications.items():
        if verification.device != sheet.name or verification.virtual:
            continue
        claims = dict(sheet.claims())
        changes = {
            finding.claim: _take_one(claims[finding.claim], finding, verification, file)
            for finding in verification.findings
            if finding.claim in claims and finding.verdict != "not tried"
        }
        sheet = sheet.with_claims(changes)
    return sheet


def _take_one(claim: Claim | Unknown, finding: Finding, verification: Verification, file: str) -> Claim | Unknown:
    sighting = EvidenceEntry(
        where=verification.where, seen=finding.seen, agrees=finding.verdict != "contradicts", file=file
    )
    if isinstance(claim, Unknown):
        return _answer(claim, finding, sighting)
    claim = replace(claim, seen_on=(*claim.seen_on, sighting))
    if not sighting.agrees:
        return replace(claim, contradicted_by=claim.contradicted_by or file) if isinstance(claim, Limit) else claim
    # A limit of other products or versions was not seen by a device on which it does not hold.
    elsewhere = isinstance(claim, Limit) and claim.conditional and finding.seen != claim.effect
    return claim if elsewhere else replace(claim, evidence="hardware")


def _answer(claim: Unknown, finding: Finding, sighting: EvidenceEntry) -> Claim | Unknown:
    """The answer to an open question, in what was seen."""
    says = f"Not documented; asked of the device itself. {finding.detail}".strip()
    if finding.seen == "yes":
        return Yes(says=says, source=sighting.file, evidence="hardware", seen_on=(sighting,))
    effect: Effect | None = next((known for known in get_args(Effect) if known == finding.seen), None)
    if effect is None:
        return claim
    kind = DtypeLimit if finding.claim.startswith("dtypes.") else Limit
    return kind(
        says=says,
        source=sighting.file,
        evidence="hardware",
        effect=effect,
        hint="keep it off the device",
        seen_on=(sighting,),
    )
