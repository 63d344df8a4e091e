"""The headline: tiny pipelines placed on the virtual devices, strict, against the CPU's picture.

Here every recipe runs on one device; `make test-slow` and `make portable` run all of them on all six.
"""

import pytest

from anyaccel.recipes import recipes
from benchmarks.portable import Outcome, describe, sweep
from benchmarks.sweep import virtual_devices
from tests.conftest import NEEDS_RECIPES

pytestmark = NEEDS_RECIPES
DEVICES = virtual_devices()


def show_failures(outcomes: list[Outcome]) -> list[str]:
    return [describe(outcome) for outcome in outcomes if not outcome.passes]


@pytest.mark.parametrize(("turn", "device"), list(enumerate(DEVICES)))
def test_every_pipeline_works_placed_on_a_device(turn: int, device: str) -> None:
    names = list(recipes())[(turn + 3) % len(DEVICES) :: len(DEVICES)]
    assert show_failures(sweep(device, names, plain=False)) == []


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_every_pipeline_works_placed_on_every_device(device: str) -> None:
    assert show_failures(sweep(device, list(recipes()), plain=False)) == []
