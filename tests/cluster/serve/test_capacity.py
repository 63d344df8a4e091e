"""The simulation behind docs/scale.md, against what queueing theory knows for certain."""

import pytest

from benchmarks.capacity import find_replicas, simulate


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_one_place_is_a_queue_with_one_server(load: float) -> None:
    """Poisson's arrivals, a fixed time of service: Pollaczek and Khinchine say how long requests take in the mean."""
    expected = 1 + load / (2 * (1 - load))
    assert simulate({1: 1.0}, load, 1, 100_000)["mean_s"] == pytest.approx(expected, rel=0.05)


def test_a_device_that_is_shared_for_nothing_serves_all_at_once() -> None:
    """Where eight take no longer than one, nobody waits until all places are taken."""
    free = simulate({1: 1.0, 8: 1.0}, 2.0, 1, 5_000)
    assert free["p50_s"] == pytest.approx(1.0)
    assert free["p95_s"] < 1.1


def test_more_devices_are_never_slower_and_the_fewest_are_found() -> None:
    curve = {1: 0.4, 2: 0.6, 4: 1.1, 8: 2.0}
    slower, faster = simulate(curve, 10, 3, 300), simulate(curve, 10, 6, 300)
    assert faster["p95_s"] < slower["p95_s"]
    count = find_replicas(curve, 10, 1.0)
    assert simulate(curve, 10, count, 200)["p95_s"] <= 1.0 < simulate(curve, 10, count - 1, 200)["p95_s"]
    with pytest.raises(SystemExit, match="no number of devices"):
        find_replicas(curve, 10, 0.3)
