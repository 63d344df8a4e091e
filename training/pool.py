"""Judging in several processes."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

__all__ = ["map_in_processes"]

Result = TypeVar("Result")


def map_in_processes(
    function: Callable[..., Result], calls: Iterable[tuple[Any, ...]], workers: int
) -> Iterator[Result]:
    """Yield the result of every call, in order; the calls run in `workers` processes while the next are prepared."""
    if workers < 2:
        for arguments in calls:
            yield function(*arguments)
        return
    with multiprocessing.get_context("spawn").Pool(workers, torch.set_num_threads, (1,)) as pool:
        pending = deque(pool.apply_async(function, arguments) for arguments in calls)
        while pending:
            yield pending.popleft().get()
