"""Memory stays flat under two minutes of mixed load; `benchmarks/serve_load.py` runs for an hour."""

from pathlib import Path

import pytest

from benchmarks.serve_load import FLAT, measure

SECONDS = 120
NOISE_MIB = 8
"""Allowed growth. Five percent would be too strict: threads and caches of a small process grow by more."""


@pytest.mark.slow
def test_memory_stays_flat_under_mixed_load(tmp_path: Path) -> None:
    result = measure(SECONDS, tmp_path, clients=2, pause_s=3)
    assert result["worker_survived"]
    for process in ("service", "worker"):
        before, after = (result[process][f"{quarter}_quarter_mib"] for quarter in ("second", "last"))
        assert after - before <= max(NOISE_MIB, FLAT * before)
    assert result["images"] > 10
    expected = {"200", "400", "disconnected", "completed", "answered"}
    assert {answer.rpartition(" ")[2] for answer in result["answers"]} <= expected, result["answers"]
