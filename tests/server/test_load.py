"""Mixed load for two minutes, the hour of `benchmarks/serve_load.py` scaled down: memory stays flat."""

from pathlib import Path

from benchmarks.serve_load import FLAT, measure

SECONDS = 120


def test_memory_stays_flat_under_mixed_load(tmp_path: Path) -> None:
    result = measure(SECONDS, tmp_path, clients=2, pause_s=1.5)  # beside all other tests
    assert result["worker_survived"]
    assert abs(result["service"]["growth"]) <= FLAT
    assert abs(result["worker"]["growth"]) <= FLAT
    assert result["pictures"] > 10
    allowed = {"200", "400", "left", "completed", "answered"}
    assert {answer.rpartition(" ")[2] for answer in result["answers"]} <= allowed, result["answers"]
