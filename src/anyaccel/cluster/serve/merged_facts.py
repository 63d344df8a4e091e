"""What a pool of unlike devices says of itself: what all of them take, and what all of them hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from anyaccel.server.worker.messages import Heartbeat, ModelFacts

__all__ = ["add_heartbeats", "merge_facts"]


def merge_facts(kinds: Sequence[Sequence[ModelFacts]], room: int) -> tuple[ModelFacts, ...]:
    """One model a name: a request is checked against what every device takes, since any of them may answer."""
    return tuple(_join(list(same), room) for same in zip(*kinds, strict=True))


def _join(same: Sequence[ModelFacts], room: int) -> ModelFacts:
    first = same[0]
    tasks = tuple(task for task in first.tasks if all(task in one.tasks for one in same))
    takes = {
        task: tuple(name for name in first.takes[task] if all(name in one.takes[task] for one in same))
        for task in tasks
    }
    sizes = tuple(size for size in first.sizes if all(size in one.sizes for one in same))
    plans = [one.plan if len(same) == 1 else f"on {one.device}:\n{one.plan}" for one in same]
    return replace(
        first,
        device=", ".join(dict.fromkeys(one.device for one in same)),
        virtual=all(one.virtual for one in same),
        dtype=", ".join(dict.fromkeys(one.dtype for one in same)),
        tasks=tasks,
        takes=takes,
        multiple=math.lcm(*(one.multiple for one in same)),
        sizes=sizes or first.sizes,
        fixed_sizes=any(one.fixed_sizes for one in same),
        joins={
            name: any(one.joins.get(name, False) for one in same) for name in {key for one in same for key in one.joins}
        },
        at_once=room,
        plan="\n\n".join(plans),
    )


def add_heartbeats(new: Heartbeat, last: Iterable[Heartbeat]) -> Heartbeat:
    """What all replicas hold together, as each told last; the rounds are those of the one that tells now."""
    all_of_them = list(last)
    held = [one.device_bytes for one in all_of_them if one.device_bytes is not None]
    return Heartbeat(
        device_bytes=sum(held) if held else None,
        host_bytes=sum(one.host_bytes for one in all_of_them),
        rounds=new.rounds,
        loaded=tuple(dict.fromkeys(name for one in all_of_them for name in one.loaded)),
    )
