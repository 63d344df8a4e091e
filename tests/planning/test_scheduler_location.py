"""Where the scheduler's timesteps and sigmas live."""

from __future__ import annotations

from anyaccel.planning import Wishes
from anyaccel.planning.scheduler_location import choose_schedule
from tests.planning.sheets import NAMES, limit, real_sheet, round_trip, without_limits


def test_on_the_host_where_reading_back_costs_or_shapes_are_static() -> None:
    assert choose_schedule(without_limits(), Wishes()).value == "device"
    slow = choose_schedule(without_limits(host_round_trip=round_trip(says="It waits.")), Wishes())
    assert (slow.value, slow.reason) == ("host", "It waits.")
    static = choose_schedule(without_limits(data_dependent_shapes=limit("error", says="Static.")), Wishes())
    assert (static.value, static.reason) == ("host", "Static.")


def test_what_is_asked_for_is_done() -> None:
    sheet = without_limits(host_round_trip=round_trip())
    assert choose_schedule(sheet, Wishes(schedule="device")).value == "device"
    assert choose_schedule(without_limits(), Wishes(schedule="host")).value == "host"


def test_the_sheets_keep_it_on_the_host_everywhere_but_there() -> None:
    chosen = {name: choose_schedule(real_sheet(name), Wishes()).value for name in NAMES}
    assert {name for name, place in chosen.items() if place == "device"} == {"cpu"}
