"""Choice of the device that holds timesteps and sigmas."""

from __future__ import annotations

from anyaccel.planning import PlacementOptions
from anyaccel.planning.scheduler_location import choose_scheduler_location
from tests.planning.sheets import NAMES, limit, real_sheet, round_trip, without_limits


def test_cpu_if_a_round_trip_is_slow_or_shapes_are_static() -> None:
    assert choose_scheduler_location(without_limits(), PlacementOptions()).value == "device"
    slow = choose_scheduler_location(without_limits(host_round_trip=round_trip(says="It waits.")), PlacementOptions())
    assert (slow.value, slow.reason) == ("cpu", "It waits.")
    static = choose_scheduler_location(
        without_limits(data_dependent_shapes=limit("error", says="Static.")), PlacementOptions()
    )
    assert (static.value, static.reason) == ("cpu", "Static.")


def test_requested_location_is_used() -> None:
    sheet = without_limits(host_round_trip=round_trip())
    assert choose_scheduler_location(sheet, PlacementOptions(scheduler="device")).value == "device"
    assert choose_scheduler_location(without_limits(), PlacementOptions(scheduler="cpu")).value == "cpu"


def test_built_in_sheets_use_the_cpu_except_on_the_cpu_itself() -> None:
    chosen = {name: choose_scheduler_location(real_sheet(name), PlacementOptions()).value for name in NAMES}
    assert {name for name, location in chosen.items() if location == "device"} == {"cpu"}
