"""Evidence files: writing, reading, rejecting invalid ones, and merging them into sheets."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import anyaccel
from anyaccel.backends.claim import Claim, DtypeLimit, Limit, Unknown, Yes
from anyaccel.backends.devices.neuron import SHEET as NEURON
from anyaccel.backends.evidence_files import (
    FOLDER,
    Finding,
    PipelineFinding,
    Verdict,
    Verification,
    load_verifications,
    merge_evidence,
    read_verification,
)
from anyaccel.backends.sheet import Sheet
from anyaccel.backends.sheet_text import describe_sheet
from anyaccel.errors import AnyaccelError
from tests.conftest import ROOT

FILE = f"{FOLDER}/seen.json"


def make_finding(claim: str, seen: str, verdict: Verdict, expected: str = "yes") -> Finding:
    return Finding(claim=claim, expected=expected, seen=seen, verdict=verdict, detail="from a test")


def make(*findings: Finding, **changes: Any) -> Verification:
    pipeline = PipelineFinding(
        recipe="flux",
        pipeline="FluxPipeline",
        dtype="float32",
        runs=True,
        max_difference=2e-5,
        tolerance=1e-3,
        right=True,
    )
    verification = Verification(
        device="neuron",
        virtual=False,
        product="trn2",
        device_name="Trainium 2",
        date="2026-11-15",
        commit="abc",
        versions={"torch": "2.11.0", "python": "3.12.3"},
        system="Linux",
        architecture="x86_64",
        signed_off_by="A. Name",
        conditions=("no TF32",),
        findings=findings,
        pipelines=(pipeline,),
    )
    return replace(verification, **changes)


def merge(*findings: Finding, **changes: Any) -> Sheet:
    return merge_evidence(NEURON, {FILE: make(*findings, **changes)})


def test_file_round_trips() -> None:
    written = make(make_finding("dtypes.float32", "yes", "agrees"), make_finding("batches", "", "not tried"))
    assert read_verification(written.to_json(), "a file") == written
    assert written.where == "Trainium 2, torch 2.11.0, 2026-11-15"


def test_modified_file_raises() -> None:
    text = make(make_finding("dtypes.float64", "yes", "contradicts", "error")).to_json()
    with pytest.raises(AnyaccelError, match=r"a file was changed after it was written.*\nhint: restore the original"):
        read_verification(text.replace("contradicts", "agrees"), "a file")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{", "", "is not a valid evidence file"),
        ('"format": 1', '"format": 99', "has format version 99, but this version of anyaccel supports only version 1"),
        ('"device": ', '"devise": ', "is not a valid evidence file"),
        ('"agrees"', '"holds"', "unknown verdict 'holds'"),
    ],
)
def test_invalid_file_raises(old: str, new: str, message: str) -> None:
    text = make(make_finding("batches", "yes", "agrees")).to_json()
    with pytest.raises(AnyaccelError, match=message):
        read_verification(text.replace(old, new, 1), "a file")


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"virtual": True}, "comes from a virtual device"), ({"signed_off_by": ""}, "is not signed off")],
)
def test_virtual_and_unsigned_files_raise(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "good.json").write_text(make().to_json())
    (tmp_path / "other.json").write_text(make(**changes).to_json())
    with pytest.raises(AnyaccelError, match=f"verified/other.json {message}"):
        load_verifications(tmp_path)


def test_confirmed_claim_has_hardware_evidence_and_keeps_its_source() -> None:
    claim = merge(make_finding("dtypes.float32", "yes", "agrees")).dtypes.float32
    assert isinstance(claim, Yes)
    assert (NEURON.dtypes.float32.evidence, claim.evidence) == ("documented", "hardware")  # type: ignore[union-attr]
    assert claim.source == NEURON.dtypes.float32.source  # type: ignore[union-attr]
    assert [(entry.where, entry.file) for entry in claim.seen_on] == [("Trainium 2, torch 2.11.0, 2026-11-15", FILE)]


def test_contradicted_limit_stays() -> None:
    sheet = merge(
        make_finding("training", "yes", "contradicts", "error"),
        make_finding("new_shapes", "yes", "contradicts", "slow"),
    )
    contradicted_before, new = sheet.training, sheet.new_shapes
    assert isinstance(contradicted_before, Limit)
    assert isinstance(new, Limit)
    assert contradicted_before.contradicted_by == NEURON.training.contradicted_by  # type: ignore[union-attr]
    assert new.contradicted_by == FILE
    assert (contradicted_before.evidence, new.evidence) == ("documented", "documented")


def test_contradicted_yes_is_shown_as_contradicted() -> None:
    sheet = merge(make_finding("dtypes.float32", "wrong", "contradicts"))
    assert isinstance(sheet.dtypes.float32, Yes)
    assert sheet.dtypes.float32.evidence == "documented"
    rows = {row.subject: row for section in describe_sheet(sheet) for row in section.rows}
    assert rows["float32"].says.endswith(" Contradicted on Trainium 2, torch 2.11.0, 2026-11-15: silently wrong.")
    assert rows["float32"].files == (FILE,)


@pytest.mark.parametrize(("seen", "expected"), [("yes", Yes), ("narrowed", DtypeLimit)])
def test_unknown_is_answered_by_the_device(seen: str, expected: type[Claim]) -> None:
    assert isinstance(NEURON.dtypes.float8_e5m2, Unknown)
    claim = merge(make_finding("dtypes.float8_e5m2", seen, "new", "not known")).dtypes.float8_e5m2
    assert type(claim) is expected
    assert isinstance(claim, Claim)
    assert (claim.evidence, claim.source) == ("hardware", FILE)
    assert getattr(claim, "effect", "yes") == seen


def test_untried_claims_are_unchanged() -> None:
    assert (
        merge(make_finding("dtypes.float8_e5m2", "", "not tried"), make_finding("batches", "", "not tried")) == NEURON
    )


def test_limit_of_other_products_gets_no_hardware_evidence() -> None:
    confirmed, unconfirmed = (
        merge_evidence(
            NEURON, {FILE: make(make_finding("dtypes.float8_e4m3fn", seen, "agrees", seen))}
        ).dtypes.float8_e4m3fn
        for seen in ("error", "yes")
    )
    assert isinstance(confirmed, Limit)
    assert isinstance(unconfirmed, Limit)
    assert (confirmed.evidence, unconfirmed.evidence) == ("hardware", "documented")
    assert unconfirmed.seen_on[0].seen == "yes"


@pytest.mark.parametrize("changes", [{"device": "mps"}, {"virtual": True}])
def test_files_of_other_or_virtual_devices_are_ignored(changes: dict[str, Any]) -> None:
    assert merge(make_finding("dtypes.float32", "yes", "agrees"), **changes) == NEURON


def test_packaged_files_refer_to_claims_of_their_sheet() -> None:
    assert load_verifications(), "the CPU has at least one file"
    for file, verification in load_verifications().items():
        assert (ROOT / file).is_file()
        claims = dict(anyaccel.sheet(verification.device).claims())
        assert {finding.claim for finding in verification.findings} <= set(claims)
        confirmed = [finding.claim for finding in verification.findings if finding.verdict == "agrees"]
        for name in confirmed:
            claim = claims[name]
            assert isinstance(claim, Claim)
            assert file in {entry.file for entry in claim.seen_on}


def test_files_are_part_of_the_wheel() -> None:
    """Hatchling excludes files that git ignores, so .gitignore must not match them."""
    from hatchling.builders.wheel import WheelBuilder

    builder = WheelBuilder(str(ROOT))
    built = {Path(file.path).relative_to(ROOT).as_posix() for file in builder.recurse_included_files()}
    assert set(load_verifications()) <= built
