"""Selection of a part of the hardware tests, for runs in parallel processes on one device."""

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep every n-th test of this folder, starting with test i, if the variable `TEST_SHARD` is set to `i/n`."""
    shard, _, count = os.environ.get("TEST_SHARD", "").partition("/")
    if not shard:
        return
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    dropped = set(here) - set(here[int(shard) :: int(count)])
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]
