"""`python -m tests.calibration`: run the cases, print the table and the rates of caught failures and false alarms."""

from __future__ import annotations

import os

# Each case runs in a forked process, so torch must not start threads first.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
from pathlib import Path

from tests.calibration.calibrate import CaseOutcome, load_libraries, observe, summarize, write
from tests.calibration.failures import FAILURES
from tests.calibration.known_good import KNOWN_GOOD


def main() -> int:
    """Run the cases; return 1 if too few failures are caught or there is a false alarm."""
    parser = argparse.ArgumentParser(prog="python -m tests.calibration", description=__doc__)
    parser.add_argument("names", nargs="*", help="run only cases with one of these strings in their name")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    arguments = parser.parse_args()
    cases = [case for case in (*FAILURES, *KNOWN_GOOD) if _is_selected(case.name, arguments.names)]
    load_libraries()
    outcomes = []
    for case in cases:
        outcomes.append(observe(case))
        print(_format_outcome(outcomes[-1]), flush=True)
    summary = summarize(outcomes)
    print(f"\n{summary}")
    if arguments.json is not None:
        write(outcomes, arguments.json)
    return 0 if summary.holds else 1


def _is_selected(name: str, patterns: list[str]) -> bool:
    return not patterns or any(pattern in name for pattern in patterns)


def _format_outcome(outcome: CaseOutcome) -> str:
    if outcome.effect is None:
        verdict = "clean" if outcome.good else "FALSE ALARM"
    else:
        verdict = "caught" if outcome.good else "MISSED"
    shown = outcome.rows[:1] if outcome.rows else [outcome.raised] if outcome.raised else []
    return f"{verdict:12}{outcome.effect or '':9}{outcome.name:38}{outcome.seconds:6.1f} s  {' '.join(shown)}"


if __name__ == "__main__":
    sys.exit(main())
