"""`python -m tests.calibration`: the table, and the two figures."""

from __future__ import annotations

import os

# The cases fork: torch must not have started threads before.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
from pathlib import Path

from tests.calibration.calibrate import Outcome, load_libraries, observe, summarise, write
from tests.calibration.failures import FAILURES
from tests.calibration.known_good import KNOWN_GOOD


def main() -> int:
    """Run the cases; 1 where too few failures are caught, or anything good is accused."""
    parser = argparse.ArgumentParser(prog="python -m tests.calibration", description=__doc__)
    parser.add_argument("names", nargs="*", help="only the cases whose names contain one of these")
    parser.add_argument("--json", type=Path, help="keep the outcomes there")
    arguments = parser.parse_args()
    cases = [case for case in (*FAILURES, *KNOWN_GOOD) if _is_asked_for(case.name, arguments.names)]
    load_libraries()
    outcomes = []
    for case in cases:
        outcomes.append(observe(case))
        print(_describe(outcomes[-1]), flush=True)
    summary = summarise(outcomes)
    print(f"\n{summary}")
    if arguments.json is not None:
        write(outcomes, arguments.json)
    return 0 if summary.holds else 1


def _is_asked_for(name: str, parts: list[str]) -> bool:
    return not parts or any(part in name for part in parts)


def _describe(outcome: Outcome) -> str:
    if outcome.effect is None:
        verdict = "clean" if outcome.good else "FALSE ALARM"
    else:
        verdict = "caught" if outcome.good else "MISSED"
    shown = outcome.rows[:1] if outcome.rows else [outcome.raised] if outcome.raised else []
    return f"{verdict:12}{outcome.effect or '':9}{outcome.name:38}{outcome.seconds:6.1f} s  {' '.join(shown)}"


if __name__ == "__main__":
    sys.exit(main())
