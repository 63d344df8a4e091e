"""Where the scheduler's timesteps and sigmas live."""

from __future__ import annotations

from anyaccel.planning import PlacementOptions
from anyaccel.planning.scheduler_location import choose_scheduler_location
from tests.planning.sheets import NAMES, limit, real_sheet, round_trip, without_limits


def test_on_the_host_where_reading_back_costs_or_shapes_are_static() -> None:
    assert choose_scheduler_location(without_limits(), PlacementOptions()).value == "device"
    slow = choose_scheduler_location(without_limits(host_round_trip=round_trip(says="It waits.")), PlacementOptions())
    assert (slow.value, slow.reason) == ("cpu", "It waits.")
    static = choose_scheduler_location(
        without_limits(data_dependent_shapes=limit("error", says="Static.")), PlacementOptions()
    )
    assert (static.value, static.reason) == ("cpu", "Static.")


def test_what_is_asked_for_is_done() -> None:
    sheet = without_limits(host_round_trip=round_trip())
    assert choose_scheduler_location(sheet, PlacementOptions(scheduler="device")).value == "device"
    assert choose_scheduler_location(without_limits(), PlacementOptions(scheduler="cpu")).value == "cpu"


def test_the_sheets_keep_it_on_the_host_everywhere_but_there() -> None:
    chosen = {name: choose_scheduler_location(real_sheet(name), PlacementOptions()).value for name in NAMES}
    assert {name for name, place in chosen.items() if place == "device"} == {"cpu"}
