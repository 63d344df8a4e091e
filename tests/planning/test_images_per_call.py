"""Choice of the number of images that the models run at a time."""

from __future__ import annotations

from anyaccel.backends.claim import Unknown
from anyaccel.planning import PlacementOptions
from anyaccel.planning.images_per_call import choose_images_per_call
from tests.planning.sheets import NAMES, limit, real_sheet, without_limits


def test_one_image_per_call_if_batches_are_unreliable() -> None:
    chosen = choose_images_per_call(
        without_limits(batches=limit("wrong", says="Batches gave noise.")), PlacementOptions()
    )
    assert chosen.value == 1
    assert "Batches gave noise" in chosen.reason
    assert "https://example.org" in chosen.reason


def test_whole_batch_if_no_problem_is_known() -> None:
    for batches in (limit("slow"), limit("wrong", only_if=("torch<2",)), Unknown(says="Not found.")):
        assert choose_images_per_call(without_limits(batches=batches), PlacementOptions()).value is None
    chosen = choose_images_per_call(without_limits(), PlacementOptions())
    assert chosen.value is None
    assert str(chosen) == "-"


def test_requested_count_overrides_the_sheet() -> None:
    chosen = choose_images_per_call(without_limits(batches=limit("wrong")), PlacementOptions(images_per_call=4))
    assert (chosen.value, chosen.reason) == (4, "images_per_call=4 was requested")


def test_built_in_sheets() -> None:
    assert {name for name in NAMES if choose_images_per_call(real_sheet(name), PlacementOptions()).value == 1} == {
        "mps"
    }
