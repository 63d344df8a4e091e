"""Evidence files: written and read back, refused where they prove nothing, and taken into the sheets."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import anyaccel
from anyaccel.backends.claim import Claim, DtypeLimit, Limit, Unknown, Yes
from anyaccel.backends.devices.neuron import SHEET as NEURON
from anyaccel.backends.evidence import (
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


def find(claim: str, seen: str, verdict: Verdict, expected: str = "yes") -> Finding:
    return Finding(claim=claim, expected=expected, seen=seen, verdict=verdict, detail="as a test says")


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
    made = Verification(
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
    return replace(made, **changes)


def taken(*findings: Finding, **changes: Any) -> Sheet:
    return merge_evidence(NEURON, {FILE: make(*findings, **changes)})


def test_a_file_is_read_as_it_was_written() -> None:
    written = make(find("dtypes.float32", "yes", "agrees"), find("batches", "", "not tried"))
    assert read_verification(written.to_json(), "a file") == written
    assert written.where == "Trainium 2, torch 2.11.0, 2026-11-15"


def test_a_file_that_was_changed_by_hand_is_refused() -> None:
    text = make(find("dtypes.float64", "yes", "contradicts", "error")).to_json()
    with pytest.raises(AnyaccelError, match=r"a file was changed after it was written.*\nhint: take it back"):
        read_verification(text.replace("contradicts", "agrees"), "a file")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("{", "", "is no evidence file"),
        ('"format": 1', '"format": 99', "has the format 99, and this anyaccel reads 1"),
        ('"device": ', '"devise": ', "is no evidence file"),
        ('"agrees"', '"holds"', "no verdict is called holds"),
    ],
)
def test_what_is_no_evidence_file_is_refused(old: str, new: str, words: str) -> None:
    text = make(find("batches", "yes", "agrees")).to_json()
    with pytest.raises(AnyaccelError, match=words):
        read_verification(text.replace(old, new, 1), "a file")


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"virtual": True}, "is of a virtual device"), ({"signed_off_by": ""}, "is signed off by nobody")],
)
def test_the_package_takes_hardware_alone_and_signed_off(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    (tmp_path / "good.json").write_text(make().to_json())
    (tmp_path / "other.json").write_text(make(**changes).to_json())
    with pytest.raises(AnyaccelError, match=f"verified/other.json {words}"):
        load_verifications(tmp_path)


def test_a_claim_that_held_is_known_from_hardware_and_keeps_its_source() -> None:
    claim = taken(find("dtypes.float32", "yes", "agrees")).dtypes.float32
    assert isinstance(claim, Yes)
    assert (NEURON.dtypes.float32.evidence, claim.evidence) == ("documented", "hardware")  # type: ignore[union-attr]
    assert claim.source == NEURON.dtypes.float32.source  # type: ignore[union-attr]
    assert [(one.where, one.file) for one in claim.seen_on] == [("Trainium 2, torch 2.11.0, 2026-11-15", FILE)]


def test_a_limit_that_did_not_hold_is_contradicted_and_stays() -> None:
    claim = taken(find("training", "yes", "contradicts", "error"), find("new_shapes", "yes", "contradicts", "slow"))
    known, unheard = claim.training, claim.new_shapes
    assert isinstance(known, Limit)
    assert isinstance(unheard, Limit)
    assert known.contradicted_by == NEURON.training.contradicted_by  # type: ignore[union-attr]
    assert unheard.contradicted_by == FILE
    assert (known.evidence, unheard.evidence) == ("documented", "documented")


def test_a_yes_that_did_not_hold_says_so() -> None:
    sheet = taken(find("dtypes.float32", "wrong", "contradicts"))
    assert isinstance(sheet.dtypes.float32, Yes)
    assert sheet.dtypes.float32.evidence == "documented"
    rows = {row.matter: row for section in describe_sheet(sheet) for row in section.rows}
    assert rows["float32"].says.endswith(" Not so on Trainium 2, torch 2.11.0, 2026-11-15: silently wrong.")
    assert rows["float32"].files == (FILE,)


@pytest.mark.parametrize(("seen", "kind"), [("yes", Yes), ("narrowed", DtypeLimit)])
def test_an_open_question_is_answered_by_the_device(seen: str, kind: type[Claim]) -> None:
    assert isinstance(NEURON.dtypes.float8_e5m2, Unknown)
    claim = taken(find("dtypes.float8_e5m2", seen, "new", "not known")).dtypes.float8_e5m2
    assert type(claim) is kind
    assert isinstance(claim, Claim)
    assert (claim.evidence, claim.source) == ("hardware", FILE)
    assert getattr(claim, "effect", "yes") == seen


def test_what_was_not_tried_changes_nothing() -> None:
    assert taken(find("dtypes.float8_e5m2", "", "not tried"), find("batches", "", "not tried")) == NEURON


def test_a_limit_of_other_products_is_not_seen_where_it_does_not_hold() -> None:
    here, there = (
        merge_evidence(NEURON, {FILE: make(find("dtypes.float8_e4m3fn", seen, "agrees", seen))}).dtypes.float8_e4m3fn
        for seen in ("error", "yes")
    )
    assert isinstance(here, Limit)
    assert isinstance(there, Limit)
    assert (here.evidence, there.evidence) == ("hardware", "documented")
    assert there.seen_on[0].seen == "yes"


@pytest.mark.parametrize("changes", [{"device": "mps"}, {"virtual": True}])
def test_other_devices_and_virtual_ones_change_nothing(changes: dict[str, Any]) -> None:
    assert taken(find("dtypes.float32", "yes", "agrees"), **changes) == NEURON


def test_every_file_of_the_package_speaks_of_claims_that_are_on_its_sheet() -> None:
    assert load_verifications(), "the CPU's is there"
    for file, verification in load_verifications().items():
        assert (ROOT / file).is_file()
        claims = dict(anyaccel.sheet(verification.device).claims())
        assert {finding.claim for finding in verification.findings} <= set(claims)
        seen = [finding.claim for finding in verification.findings if finding.verdict == "agrees"]
        for name in seen:
            claim = claims[name]
            assert isinstance(claim, Claim)
            assert file in {sighting.file for sighting in claim.seen_on}


def test_the_files_are_part_of_the_wheel() -> None:
    """They lie in the package, whose whole folder is built into it; no pattern of git's hides them."""
    from hatchling.builders.wheel import WheelBuilder

    builder = WheelBuilder(str(ROOT))
    built = {Path(file.path).relative_to(ROOT).as_posix() for file in builder.recurse_included_files()}
    assert set(load_verifications()) <= built
