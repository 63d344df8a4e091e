"""Tests for the simulation behind docs/scale.md against exact results of queueing theory."""

import pytest

from benchmarks.capacity import find_replicas, simulate


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_one_slot_is_a_queue_with_one_server(load: float) -> None:
    """Poisson arrivals and a constant service time: the Pollaczek-Khinchine formula gives the mean latency."""
    expected = 1 + load / (2 * (1 - load))
    assert simulate({1: 1.0}, load, 1, 100_000)["mean_s"] == pytest.approx(expected, rel=0.05)


def test_requests_do_not_wait_if_batching_costs_nothing() -> None:
    """If eight images take as long as one, no request waits until all slots are in use."""
    free = simulate({1: 1.0, 8: 1.0}, 2.0, 1, 5_000)
    assert free["p50_s"] == pytest.approx(1.0)
    assert free["p95_s"] < 1.1


def test_more_devices_are_faster_and_the_smallest_sufficient_number_is_found() -> None:
    curve = {1: 0.4, 2: 0.6, 4: 1.1, 8: 2.0}
    slower, faster = simulate(curve, 10, 3, 300), simulate(curve, 10, 6, 300)
    assert faster["p95_s"] < slower["p95_s"]
    count = find_replicas(curve, 10, 1.0)
    assert simulate(curve, 10, count, 200)["p95_s"] <= 1.0 < simulate(curve, 10, count - 1, 200)["p95_s"]
    with pytest.raises(SystemExit, match="no number of devices"):
        find_replicas(curve, 10, 0.3)
