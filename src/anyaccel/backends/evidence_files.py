"""Evidence files, which record the results of verifying a sheet on a real device.

`anyaccel devices NAME --verify` writes these files. A file lists which claims were confirmed,
contradicted or not tested. Its digest detects manual edits. Files from virtual devices and files
without a sign-off are rejected.
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
# The directory of the files in the repository.
FOLDER = "src/anyaccel/backends/verified"
_PACKAGED = Path(__file__).parent / "verified"
_WRITE_AGAIN = "create a new one with `anyaccel devices NAME --verify`"

# The result compared with the sheet; `new` if the sheet has no answer.
Verdict: TypeAlias = Literal["agrees", "contradicts", "new", "not tried"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of testing one claim from a sheet on the device."""

    claim: str
    """Its name on the sheet: `dtypes.float64`."""
    expected: str
    """The sheet's answer for this product and these versions: `yes`, `error`, `narrowed`, `not known`."""
    seen: str
    """The behavior of the device, in the same terms; empty if it was not tried."""
    verdict: Verdict
    detail: str = ""
    """Figures, the error message of the device, or why it was not tried."""


@dataclass(frozen=True, kw_only=True)
class PipelineFinding:
    """The result of running one tiny pipeline on the device, compared with the CPU result."""

    recipe: str
    pipeline: str
    """The diffusers class."""
    dtype: str
    runs: bool
    error: str = ""
    max_difference: float | None = None
    tolerance: float
    right: bool | None
    """Whether the image matches the CPU within the tolerance; None if the CPU cannot run the pipeline."""
    mode: str = "eager"
    """`eager`, `compiled`, `captured` or `fast`."""
    fallback: str = ""
    """Why a model was not compiled or not captured, or which part of `fast` had no effect."""
    seconds: float | None = None
    """The duration of the first call in this mode, including compilation."""
    psnr_db: float | None = None
    """For `fast`: the PSNR relative to the exact image; None if they are equal."""

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as a dict, without the fields that were added later and have their default values."""
        # Files from before these fields existed must keep their digest.
        added = {"mode": "eager", "fallback": "", "seconds": None, "psnr_db": None}
        return {name: value for name, value in asdict(self).items() if name not in added or value != added[name]}


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The results of one `--verify` run, with the device and the software versions."""

    device: str
    """The name of the sheet: `cuda`, `rocm`."""
    virtual: bool
    product: str
    """The product on the sheet; empty if the device is not listed."""
    device_name: str
    """The name that the device reports: `NVIDIA H200`."""
    date: str
    commit: str
    """The commit of anyaccel, with the suffix `-dirty` if files were changed; empty if unknown."""
    versions: Mapping[str, str]
    """`python`, `torch`, `diffusers`, `driver` and the like."""
    system: str
    architecture: str
    signed_off_by: str
    """The person responsible for the run; empty if nobody signed off."""
    conditions: tuple[str, ...] = ()
    """Settings of the comparison."""
    findings: tuple[Finding, ...] = ()
    pipelines: tuple[PipelineFinding, ...] = ()

    @property
    def where(self) -> str:
        """The device, the torch version and the date: `NVIDIA H200, torch 2.11.0, 2026-11-15`."""
        return f"{self.device_name}, torch {self.versions.get('torch', 'not known')}, {self.date}"

    @property
    def digest(self) -> str:
        """The SHA-256 digest of the file's content, in the form `sha256:…`."""
        # Canonical JSON, independent of the layout of the file.
        content = json.dumps(self._content(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return "sha256:" + hashlib.sha256(content.encode()).hexdigest()

    @property
    def holds(self) -> bool:
        """Whether no finding contradicts the sheet and every tested pipeline matches the CPU result."""
        agrees = all(finding.verdict != "contradicts" for finding in self.findings)
        return agrees and all(pipeline.right is not False for pipeline in self.pipelines)

    def to_json(self) -> str:
        """Return the verification and its digest as JSON, with one line per field or finding."""
        content = self._content() | {"digest": self.digest}
        return (
            "{\n" + ",\n".join(f" {_dump(name)}: {_format_value(value)}" for name, value in content.items()) + "\n}\n"
        )

    def _content(self) -> dict[str, Any]:
        pipelines = tuple(finding.as_dict() for finding in self.pipelines)
        return {"format": FORMAT, **asdict(self), "versions": dict(self.versions), "pipelines": pipelines}


def _format_value(value: Any) -> str:
    if isinstance(value, tuple) and value:
        return "[\n" + ",\n".join(f"  {_dump(item)}" for item in value) + "\n ]"
    return _dump(value)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def read_verification(text: str, name: str) -> Verification:
    """Parse the text of an evidence file; raise if it is invalid or its digest does not match."""
    try:
        content = json.loads(text)
        digest, version = content.pop("digest"), content.pop("format")
        verification = _build(content) if version == FORMAT else None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise AnyaccelError(
            f"{name} is not a valid evidence file: {type(error).__name__}: {error}", hint=_WRITE_AGAIN
        ) from error
    if verification is None:
        raise AnyaccelError(
            f"{name} has format version {version}, but this version of anyaccel supports only version {FORMAT}",
            hint=_WRITE_AGAIN,
        )
    # Protects against accidental edits. It is not a signature.
    if verification.digest != digest:
        raise AnyaccelError(
            f"{name} was changed after it was written: its digest does not match its content",
            hint=f"restore the original file, or {_WRITE_AGAIN}",
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
    unknown = {finding.verdict for finding in verification.findings} - set(get_args(Verdict))
    if unknown:
        raise ValueError(f"unknown verdict {', '.join(map(repr, sorted(unknown)))}")
    return verification


@functools.cache
def load_verifications(folder: Path = _PACKAGED) -> Mapping[str, Verification]:
    """Load the evidence files that ship with anyaccel, keyed by their path in the repository.

    Raise if a file comes from a virtual device or has no sign-off.
    """
    verifications = {}
    for path in sorted(folder.glob("*.json")):
        name = f"{FOLDER}/{path.name}"
        verification = read_verification(path.read_text(encoding="utf-8"), name)
        if verification.virtual or verification.device_name.startswith("virtual"):
            raise AnyaccelError(
                f"{name} comes from a virtual device and is not evidence about the hardware",
                hint="delete the file, and run `anyaccel devices NAME --verify` on the real device",
            )
        if not verification.signed_off_by:
            raise AnyaccelError(
                f"{name} is not signed off: its field signed_off_by is empty",
                hint="create it again with `anyaccel devices NAME --verify --signed-off-by 'FULL NAME'`",
            )
        verifications[name] = verification
    return verifications


def merge_evidence(sheet: Sheet, verifications: Mapping[str, Verification]) -> Sheet:
    """Return the sheet with verification results merged into its claims.

    A result confirms a claim, contradicts it, or replaces an `Unknown`.
    """
    for file, verification in verifications.items():
        # Virtual devices enforce the sheet itself, so they cannot confirm it.
        if verification.device != sheet.name or verification.virtual:
            continue
        claims = dict(sheet.claims())
        changes = {
            finding.claim: _merge_finding(claims[finding.claim], finding, verification, file)
            for finding in verification.findings
            # A claim may have been removed or renamed since the file was written.
            if finding.claim in claims and finding.verdict != "not tried"
        }
        sheet = sheet.with_claims(changes)
    return sheet


def _merge_finding(claim: Claim | Unknown, finding: Finding, verification: Verification, file: str) -> Claim | Unknown:
    entry = EvidenceEntry(
        where=verification.where, seen=finding.seen, agrees=finding.verdict != "contradicts", file=file
    )
    if isinstance(claim, Unknown):
        return _answer(claim, finding, entry)
    claim = replace(claim, seen_on=(*claim.seen_on, entry))
    # A contradicted limit stays active: one device does not prove it wrong for all products and versions.
    if not entry.agrees:
        return replace(claim, contradicted_by=claim.contradicted_by or file) if isinstance(claim, Limit) else claim
    # A device to which a conditional limit does not apply confirms the condition, not the limit.
    elsewhere = isinstance(claim, Limit) and claim.conditional and finding.seen != claim.effect
    return claim if elsewhere else replace(claim, evidence="hardware")


def _answer(claim: Unknown, finding: Finding, entry: EvidenceEntry) -> Claim | Unknown:
    """Return the claim that replaces an `Unknown`, based on the verification result."""
    says = f"Not documented; tested on the device. {finding.detail}".strip()
    if finding.seen == "yes":
        return Yes(says=says, source=entry.file, evidence="hardware", seen_on=(entry,))
    effect: Effect | None = next((name for name in get_args(Effect) if name == finding.seen), None)
    if effect is None:
        return claim
    limit_class = DtypeLimit if finding.claim.startswith("dtypes.") else Limit
    return limit_class(
        says=says,
        source=entry.file,
        evidence="hardware",
        effect=effect,
        hint="do not use it on the device",
        seen_on=(entry,),
    )
