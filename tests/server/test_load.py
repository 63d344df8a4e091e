"""Mixed load for two minutes, the hour of `benchmarks/serve_load.py` scaled down: memory stays flat."""

from pathlib import Path

import pytest

from benchmarks.serve_load import FLAT, measure

SECONDS = 120
NOISE_MIB = 8
"""Of a small process five percent are less than what threads and caches come to in two minutes."""


@pytest.mark.slow
def test_memory_stays_flat_under_mixed_load(tmp_path: Path) -> None:
    result = measure(SECONDS, tmp_path, clients=2, pause_s=3)
    assert result["worker_survived"]
    for part in ("service", "worker"):
        before, after = (result[part][f"{quarter}_quarter_mib"] for quarter in ("second", "last"))
        assert after - before <= max(NOISE_MIB, FLAT * before)
    assert result["pictures"] > 10
    allowed = {"200", "400", "left", "completed", "answered"}
    assert {answer.rpartition(" ")[2] for answer in result["answers"]} <= allowed, result["answers"]
