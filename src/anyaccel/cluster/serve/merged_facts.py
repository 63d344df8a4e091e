"""Functions that merge the model properties and the heartbeats that replicas report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from anyaccel.server.worker.messages import Heartbeat, ModelFacts

__all__ = ["add_heartbeats", "merge_facts"]


def merge_facts(groups: Sequence[Sequence[ModelFacts]], capacity: int) -> tuple[ModelFacts, ...]:
    """Merge the properties that the device groups report for each model.

    The merged properties allow only requests that every device accepts, because a request may run on
    any of them.
    """
    # All groups serve the same models in the same order.
    return tuple(_merge(list(facts), capacity) for facts in zip(*groups, strict=True))


def _merge(all_facts: Sequence[ModelFacts], capacity: int) -> ModelFacts:
    first = all_facts[0]
    tasks = tuple(task for task in first.tasks if all(task in facts.tasks for facts in all_facts))
    parameters = {
        task: tuple(
            name for name in first.parameters[task] if all(name in facts.parameters[task] for facts in all_facts)
        )
        for task in tasks
    }
    sizes = tuple(size for size in first.sizes if all(size in facts.sizes for facts in all_facts))
    plans = [facts.plan if len(all_facts) == 1 else f"on {facts.device}:\n{facts.plan}" for facts in all_facts]
    models = {name for facts in all_facts for name in facts.batched}
    return replace(
        first,
        device=", ".join(dict.fromkeys(facts.device for facts in all_facts)),
        virtual=all(facts.virtual for facts in all_facts),
        dtype=", ".join(dict.fromkeys(facts.dtype for facts in all_facts)),
        tasks=tasks,
        parameters=parameters,
        multiple=math.lcm(*(facts.multiple for facts in all_facts)),
        sizes=sizes or first.sizes,
        fixed_sizes=any(facts.fixed_sizes for facts in all_facts),
        batched={name: any(facts.batched.get(name, False) for facts in all_facts) for name in models},
        max_concurrent=capacity,
        plan="\n\n".join(plans),
        inputs={task: _keep_common(facts.inputs.get(task, ()) for facts in all_facts) for task in tasks},
        many_images=all(facts.many_images for facts in all_facts),
    )


def _keep_common(names: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return the names that are in all sequences, in the order of the first one."""
    first, *others = names
    return tuple(name for name in first if all(name in other for other in others))


def add_heartbeats(new: Heartbeat, latest: Iterable[Heartbeat]) -> Heartbeat:
    """Return one heartbeat with the total memory use and the loaded models of all replicas.

    The batch counts come only from `new`: each heartbeat counts the batches since the previous one from
    the same replica.
    """
    heartbeats = list(latest)
    # Devices without a memory counter report None.
    device_bytes = [heartbeat.device_bytes for heartbeat in heartbeats if heartbeat.device_bytes is not None]
    return Heartbeat(
        device_bytes=sum(device_bytes) if device_bytes else None,
        host_bytes=sum(heartbeat.host_bytes for heartbeat in heartbeats),
        batches=new.batches,
        loaded=tuple(dict.fromkeys(name for heartbeat in heartbeats for name in heartbeat.loaded)),
    )
