"""Report formats for CI, and baselines."""

import json
from pathlib import Path

import pytest

from anyaccel.checking.accepted_findings import drop_known_findings, read_baseline
from anyaccel.checking.ci_formats import as_github, as_sarif
from anyaccel.checking.report import DeviceReport, Report, Violation
from anyaccel.errors import UsageError


def violation(code: str = "x.double()", line: int = 7, **changes: object) -> Violation:
    values = {
        "limit": "dtypes.float64",
        "effect": "error",
        "operation": "aten::_to_copy",
        "file": "pipe.py",
        "count": 2,
    }
    values |= {"step": None, "says": "There is no float64, 100 %.", "source": "https://example.org", "hint": "float32"}
    return Violation(**{**values, "evidence": "documented", "code": code, "line": line, **changes})  # type: ignore[arg-type]


def report(*violations: Violation, finished: bool = True) -> Report:
    device = DeviceReport(
        device="mps", virtual=True, placed=False, finished=finished, violations=violations,
        error="" if finished else "TypeError: no", max_difference=0.0 if finished else None,
        host_round_trips_per_step=0.0,
    )  # fmt: skip
    return Report(target="mine", pipeline="Mine", devices={"mps": device})


def test_github_shows_each_line_once() -> None:
    lines = list(as_github(report(violation(), violation(operation="aten::add"), violation(line=9, effect="slow"))))
    assert len(lines) == 2
    assert lines[0].startswith(
        "::error file=pipe.py,line=7,title=dtypes.float64::mps (virtual): There is no float64, 100 %25."
    )
    assert lines[1].startswith("::notice file=pipe.py,line=9")
    assert list(as_github(report(finished=False))) == ["::error title=mine::mps (virtual): stops: TypeError: no"]


def test_sarif_has_rules_and_locations() -> None:
    run = json.loads(as_sarif(report(violation())))["runs"][0]
    assert run["tool"]["driver"]["rules"][0]["id"] == "dtypes.float64"
    result = run["results"][0]
    assert result["level"] == "error"
    assert result["locations"][0]["physicalLocation"]["region"]["startLine"] == 7
    assert result["properties"] == {"device": "mps", "virtual": True, "effect": "error"}


def test_baseline_findings_are_hidden_even_if_the_line_moved(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(report(violation()).to_json())
    baseline = read_baseline(str(path))
    moved = report(violation(line=70), violation(code="y.double()", line=71))
    remaining = drop_known_findings(moved, baseline)
    assert [violation.line for violation in remaining.devices["mps"].violations] == [71]
    assert "findings hidden by the baseline: 1" in remaining.notes
    assert not remaining.passes
    assert drop_known_findings(report(violation(line=70)), baseline).passes
    twice = report(violation(line=70), violation(line=80))
    assert len(drop_known_findings(twice, baseline).devices["mps"].violations) == 1


@pytest.mark.parametrize("content", ["", "[]", '{"devices": 3}'])
def test_an_invalid_baseline_raises(tmp_path: Path, content: str) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(content)
    with pytest.raises(UsageError):
        read_baseline(str(path))


def test_the_text_has_the_line_and_the_hint() -> None:
    text = str(report(violation(), violation(limit="host_round_trip", effect="slow", hint="")))
    assert "mps (virtual, plain diffusers): would fail: 1 error" in text
    assert "pipe.py:7\n          x.double()" in text
    assert "hint: float32" in text


def test_a_wrong_image_is_an_error_in_every_format() -> None:
    report = Report(
        target="mine",
        pipeline="Mine",
        devices={"mps": DeviceReport(device="mps", virtual=True, placed=True, finished=True, max_difference=0.5)},
    )
    assert list(as_github(report)) == [
        "::error title=mine::mps (virtual): wrong image: it differs from the CPU's by 5.0e-01"
    ]
    results = json.loads(as_sarif(report))["runs"][0]["results"]
    assert [(result["level"], result["ruleId"]) for result in results] == [("error", "picture")]
