"""The virtual devices agree with observations on real devices."""

from __future__ import annotations

import pytest

from tests.calibration.calibrate import CaseOutcome, load_libraries, observe, strict_error_classes, summarize
from tests.calibration.case import Case
from tests.calibration.failures import FAILURES
from tests.calibration.known_good import KNOWN_GOOD
from tests.conftest import NEEDS_RECIPES, SharedCache

pytestmark = NEEDS_RECIPES

DEVICES = {"mps", "hpu", "neuron", "npu", "xpu", "mlu"}
IN_CHECK = 3
"""`make check` runs every third case; the slow tests and `make calibrate` run all."""
WITH_ERROR = [
    pytest.param(case, id=case.name, marks=pytest.mark.slow if index % IN_CHECK else ())
    for index, case in enumerate(FAILURES)
    if case.strict_error
]


def observe_once(case: Case, shared_cache: SharedCache) -> CaseOutcome:
    """Return the outcome of a case, shared between test workers."""
    outcome: CaseOutcome | None = shared_cache.find(f"calibration-{case.name}")
    if outcome is None:
        load_libraries()
        outcome = observe(case)
        shared_cache.keep(f"calibration-{case.name}", outcome)
    return outcome


@pytest.fixture(scope="module", params=[IN_CHECK, pytest.param(1, marks=pytest.mark.slow)], ids=["third", "all"])
def outcomes(request: pytest.FixtureRequest, shared_cache: SharedCache) -> list[CaseOutcome]:
    """Observe the cases that run in `make check`, or all."""
    return [observe_once(case, shared_cache) for case in (*FAILURES[:: request.param], *KNOWN_GOOD[:: request.param])]


def test_enough_failures_and_good_cases_on_every_device() -> None:
    assert len(FAILURES) >= 40
    assert len(KNOWN_GOOD) >= 20
    assert {case.device for case in FAILURES} == DEVICES
    assert {case.device for case in KNOWN_GOOD} == DEVICES
    assert all(case.effect for case in FAILURES)
    assert not any(case.effect for case in KNOWN_GOOD)


def test_names_are_unique_and_every_case_has_a_source() -> None:
    names = [case.name for case in (*FAILURES, *KNOWN_GOOD)]
    assert len(names) == len(set(names))
    for case in (*FAILURES, *KNOWN_GOOD):
        assert case.name.startswith(f"{case.device}-")
        assert case.thread.startswith("https://")
        assert case.says


@pytest.mark.long
def test_90_percent_of_the_failures_are_caught(outcomes: list[CaseOutcome]) -> None:
    summary = summarize(outcomes)
    missed = [outcome.name for outcome in outcomes if outcome.effect and not outcome.good]
    assert summary.share >= 0.9, f"{summary}\nmissed: {', '.join(missed)}"


def test_correct_code_raises_no_false_alarm(outcomes: list[CaseOutcome]) -> None:
    reported = {outcome.name: outcome.rows or outcome.raised for outcome in outcomes if not outcome.effect}
    good = {outcome.name for outcome in outcomes if outcome.good}
    assert {name: rows for name, rows in reported.items() if name not in good} == {}


@pytest.mark.parametrize("case", WITH_ERROR)
def test_strict_raises_the_documented_error(case: Case, shared_cache: SharedCache) -> None:
    if not observe_once(case, shared_cache).good:
        pytest.skip("not caught, so strict mode has nothing to raise")
    load_libraries()
    assert case.strict_error in strict_error_classes(case)
