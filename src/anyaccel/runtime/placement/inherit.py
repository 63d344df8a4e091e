"""Placements of pipelines that share models with a pipeline that was placed before."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from anyaccel.backends.device import OpenDevice
from anyaccel.errors import UsageError
from anyaccel.planning.plan import Plan
from anyaccel.runtime.introspection import find_models, list_denoisers
from anyaccel.runtime.placement.offload import move_to_cpu
from anyaccel.runtime.placement.place import attach_placement, plan_pipeline
from anyaccel.runtime.placement_state import (
    PlacedModel,
    Placement,
    cancel_deferred_placement,
    drop_placement,
    find_placed_model,
    find_placement,
    store_options,
)

__all__ = ["adopt_before_move", "adopt_placement", "follow_models", "place_copy"]


def adopt_placement(pipe: Any) -> None:
    """Attach a placement for the device on which the pipeline's models were placed by another pipeline.

    Models that were never placed are placed on the same device. Do nothing if no model was placed.
    Raise `UsageError` if the models are on different devices.
    """
    models = find_models(pipe)
    records = _find_records(models)
    if not records:
        return
    _check_same_device(records)
    _attach_inherited(pipe, _choose_record(pipe, records), records)
    if len(records) < len(models):
        pipe.place_with_plan(None, {})


def adopt_before_move(pipe: Any) -> None:
    """Attach a deferred placement to a pipeline that is about to be placed; do not move any model yet.

    If the models are on different devices, only move offloaded weights to the CPU.
    """
    if not cancel_deferred_placement(pipe):
        return
    records = _find_records(find_models(pipe))
    if not records:
        return
    if len({_key(record.opened, record.plan)[:2] for record in records.values()}) == 1:
        _attach_inherited(pipe, _choose_record(pipe, records), records)
        return
    store_options(pipe, _choose_record(pipe, records).options)
    if any(record.residence != "resident" for record in records.values()):
        move_to_cpu(pipe)


def follow_models(pipe: Any, placement: Placement) -> Placement:
    """Return the placement for a call: a new one if another pipeline has placed all models again since.

    Raise `UsageError` if another pipeline has moved some of the models to another device.
    """
    # Not `find_models`, which is slow: a model that the user has replaced is placed by the call itself.
    models = {name: reference() for name, reference in placement.placed.items()}
    records = _find_records(models)
    others = [record for record in records.values() if record.placement() is not placement]
    if not others or placement.shared or placement.offloaded_by_user:
        return placement
    own, latest = _key(placement.opened, placement.plan), {_key(record.opened, record.plan) for record in others}
    if latest == {own}:
        if {placement.residence, *(record.residence for record in others)} != {"resident"}:
            placement.residence = (
                None  # the other pipeline has replaced the offloading hooks; the next rule restores them
            )
        return placement
    _check_same_device(records)
    if len(latest) > 1 or len(others) < len(records):
        return placement  # some of the models were cast; the others were not
    drop_placement(pipe)
    adopt_placement(pipe)
    adopted = find_placement(pipe)
    assert adopted is not None
    return adopted


def place_copy(pipe: Any, source: Placement) -> None:
    """Place a deep copy of a pipeline on the device of the original; its models keep their dtypes."""
    record = PlacedModel(source.opened, source.plan, source.options, None, weakref.ref(source))
    _attach_inherited(pipe, record, find_models(pipe))
    pipe.to(source.opened.torch_device)


def _find_records(models: Mapping[str, Any]) -> dict[str, PlacedModel]:
    records = {name: find_placed_model(model) for name, model in models.items()}
    return {name: record for name, record in records.items() if record is not None}


def _key(opened: OpenDevice, plan: Plan) -> tuple[str, int, str]:
    return opened.sheet.name, opened.index, plan.dtype.value


def _check_same_device(records: dict[str, PlacedModel]) -> None:
    devices = {name: f"{record.opened.sheet.name}:{record.opened.index}" for name, record in records.items()}
    if len(set(devices.values())) > 1:
        most_common = Counter(devices.values()).most_common(1)[0][0]
        raise UsageError(
            f"the components are placed on different devices: {', '.join(f'{n} on {d}' for n, d in devices.items())}",
            hint=f'move them to one device, for example with pipe.to("{most_common}")',
        )


def _choose_record(pipe: Any, records: dict[str, PlacedModel]) -> PlacedModel:
    """Return the record of a denoiser, which determines the dtype and the options, or any other record."""
    names = [name for name in list_denoisers(pipe) if name in records]
    return records[names[0]] if names else next(iter(records.values()))


def _attach_inherited(pipe: Any, record: PlacedModel, placed: Collection[str]) -> None:
    """Attach the placement of a record; `placed` are the names of the models that were placed before."""
    before = record.plan
    plan = plan_pipeline(pipe, record.opened, replace(record.options, dtype=before.dtype.value), before.dtype)
    plan = replace(plan, component_dtypes=before.component_dtypes, memory=before.memory)
    placement = Placement(record.opened, record.opened.tensor_device, plan, record.options, weights_rule=before.memory)
    source = record.placement()
    if source is not None:
        names = find_models(pipe)
        placement.loaded = {name: dtype for name, dtype in source.loaded.items() if name in names}
        placement.offloaded_by_user = source.offloaded_by_user
        placement.weights_rule, placement.vae_in_parts = source.weights_rule, source.vae_in_parts
    # The offloading hooks belong to the other pipeline, so the next call moves the weights again.
    resident_or_user = record.residence == "resident" or placement.offloaded_by_user
    placement.residence = record.residence if resident_or_user else None
    attach_placement(pipe, placement, inherited=True)
    placement.placed = {name: model for name, model in placement.placed.items() if name in placed}
    if source is not None:  # the dtypes of models that the user has cast or replaced since
        placement.placed_dtypes |= {name: dtype for name, dtype in source.placed_dtypes.items() if name in placed}
        placement.own_dtypes |= {name: dtype for name, dtype in source.own_dtypes.items() if name in placed}
