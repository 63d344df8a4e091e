"""Findings of an interrupted verification, which the next run with the same versions uses again."""

from pathlib import Path

from anyaccel.backends.evidence_files import Finding, PipelineFinding
from anyaccel.verification.partial_findings import PartialFindings

KEY = {"device": "NVIDIA H200", "commit": "1234567", "versions": {"torch": "2.11.0"}}
CLAIM = Finding(claim="dtypes.float64", expected="yes", seen="yes", verdict="agrees")


def make_finding(mode: str, recipe: str = "flux") -> PipelineFinding:
    return PipelineFinding(
        recipe=recipe, pipeline="FluxPipeline", dtype="float32", runs=True, tolerance=1e-3, right=True, mode=mode
    )


def test_a_later_run_continues(tmp_path: Path) -> None:
    path, messages = tmp_path / "partial", list[str]()
    first = PartialFindings(path, KEY, messages.append)
    findings = [make_finding("eager"), make_finding("compiled")]
    first.add_claims((CLAIM,))
    first.add(findings)
    second = PartialFindings(path, KEY, messages.append)
    assert second.claims == (CLAIM,)
    assert second.find("flux", ["eager", "compiled"]) == findings
    assert second.find("flux", ["eager"]) == findings[:1]
    assert second.find("flux", ["eager", "fast"]) == []
    assert second.find("wan", ["eager"]) == []
    assert messages == [f"continuing with 1 pipelines from {path}"]


def test_a_line_that_was_not_completely_written_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "partial"
    first = PartialFindings(path, KEY, print)
    first.add([make_finding("eager")])
    first.add([make_finding("eager", "wan")])
    path.write_text(path.read_text()[:-10])
    second = PartialFindings(path, KEY, print)
    assert second.find("flux", ["eager"])
    assert second.find("wan", ["eager"]) == []


def test_findings_of_another_commit_are_replaced(tmp_path: Path) -> None:
    path, messages = tmp_path / "partial", list[str]()
    PartialFindings(path, KEY, print).add([make_finding("eager")])
    other = PartialFindings(path, KEY | {"commit": "7654321"}, messages.append)
    assert other.find("flux", ["eager"]) == []
    assert messages == [f"replacing {path}, which has findings of another device, commit or version"]
    assert PartialFindings(path, KEY, print).find("flux", ["eager"]) == []


def test_without_a_file_nothing_is_stored() -> None:
    findings = PartialFindings(None, KEY, print)
    findings.add([make_finding("eager")])
    assert findings.find("flux", ["eager"]) == []
