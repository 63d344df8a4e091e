"""`anyaccel.explain`: plan and memory forecast for a model on a device, from its config files only."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from anyaccel.backends.device_functions import dtype_name
from anyaccel.call_limits import check_batch, check_side, check_steps
from anyaccel.embedded.motion import VIDEO_NAME, choose_name, fit_video_call
from anyaccel.errors import ModelError, UsageError
from anyaccel.explanation.call_arguments import CallSize, RequestedSize
from anyaccel.explanation.device_argument import DeviceTarget, find_device_target
from anyaccel.explanation.memory_estimate import MemoryEstimate
from anyaccel.explanation.model_configs import find_model
from anyaccel.explanation.quantization_options import is_quantization_useful, list_quantization_options
from anyaccel.library_logging import quiet_libraries
from anyaccel.planning.decision import Decision
from anyaccel.planning.dtype import find_smaller_dtype
from anyaccel.planning.facts import ComponentFacts, PipelineFacts
from anyaccel.planning.footprint import Footprint
from anyaccel.planning.memory import PLAIN, Forecast, MemoryRule
from anyaccel.planning.options import PlacementOptions, check_residence, read_options
from anyaccel.planning.plan import Plan, make_plan
from anyaccel.progress import ProgressListener
from anyaccel.runtime.durations import check_duration
from anyaccel.tracing.meta_autocast import accept_meta_autocast
from anyaccel.tracing.model_folder import ModelFolder, find_recipe
from anyaccel.upstream.torch_internals import assume_all_nonzero

__all__ = ["explain", "trace_call"]


def explain(
    model: str | os.PathLike[str],
    device: str = "auto",
    *,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    fps: float | None = None,
    seconds: float | None = None,
    steps: int | None = None,
    batch: int = 1,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    listener: ProgressListener | None = None,
    **options: Any,
) -> Plan:
    """Return the plan for a model on a device, with the memory use in `plan.forecast`.

    Neither the weights nor the device has to be on this machine. The size and the number of frames default to those of
    the pipeline, and so does the number of `steps`, which changes only the estimated time. `seconds` is the duration of
    audio, or that of a video instead of `frames`; `fps` is its frame rate. `device` is a name, a product, or a name
    with a memory size: `hpu`, `rtx4090`, `mps:16GiB`. Additional keyword arguments are those of `anyaccel.place`.
    The listener is notified of each phase.
    """
    _check_is_name(model)
    batch = check_batch(batch)
    width, height = (
        side if side is None else check_side(name, side) for name, side in (("width", width), ("height", height))
    )
    durations = {"frames": frames, "fps": fps, "seconds": seconds}
    model = choose_name(model, durations) or model
    if model == VIDEO_NAME:
        fit_video_call(durations)
    checked = {name: value if value is None else check_duration(name, value) for name, value in durations.items()}
    call_size = RequestedSize(width, height, **checked, steps=steps if steps is None else check_steps(steps))
    dtypes = {"dtype": dtype, "smallest_dtype": options.pop("smallest_dtype", None)}
    dtype_options = {name: dtype_name(value) for name, value in dtypes.items() if value is not None}
    requested = read_options({**options, **dtype_options})
    target = find_device_target(device)
    check_residence(requested.memory, unified_memory=target.sheet.unified_memory)
    folder = find_model(model, revision)
    _check_has_recipe(folder)
    # Libraries log training advice when models are built from configs and run once.
    with quiet_libraries(everything=True), accept_meta_autocast(), assume_all_nonzero():
        return _explain(folder, target, requested, call_size, batch, listener or ProgressListener())


def trace_call(model: str, device: str, size: CallSize) -> Footprint:
    """Return the footprint of one call of a model, traced with its weights on the device."""
    target, options = find_device_target(device), PlacementOptions(memory="resident")
    folder = find_model(model)
    with quiet_libraries(everything=True), accept_meta_autocast(), assume_all_nonzero():
        plan = _plan_without_size(folder, target, options)
        estimate = MemoryEstimate(folder, target, plan, options, RequestedSize(), size)
        return estimate.measure(size)(PLAIN, 1)


def _check_is_name(model: Any) -> None:
    if not isinstance(model, str | os.PathLike):
        raise UsageError(
            f"explain requires a folder or a Hub ID, not an object of the class {type(model).__name__}",
            hint="pass the folder or the Hub ID of the pipeline; for a loaded pipeline, print "
            "anyaccel.place(pipe, device).plan",
        )


def _check_has_recipe(folder: ModelFolder) -> None:
    if find_recipe(folder.pipeline) is not None:
        return
    import diffusers

    name = folder.pipeline
    reason = "has no recipe for it" if hasattr(diffusers, name) else "supports only pipeline classes of diffusers"
    raise ModelError(
        f"cannot explain {folder.path} without loading it: its pipeline class is {name}, and explain {reason}",
        hint="load the pipeline with its class, then print "
        f"anyaccel.place({name.rpartition('.')[2]}.from_pretrained(…), device).plan, which contains the memory mode",
    )


def _explain(
    folder: ModelFolder,
    target: DeviceTarget,
    requested: PlacementOptions,
    call_size: RequestedSize,
    batch: int,
    listener: ProgressListener,
) -> Plan:
    listener.on_phase(f"Building {folder.pipeline} without weights")
    estimate = _make_estimate(folder, target, requested, call_size)
    listener.on_phase(f"Tracing {folder.pipeline}")
    plan = estimate.make_plan(batch)
    # A smaller dtype is used only if the default one does not fit and the caller allows it.
    smaller = find_smaller_dtype(target.sheet, plan.dtype.value, requested)
    if smaller is not None and plan.forecast is not None and not plan.forecast.fits:
        reason = f"allowed by smallest_dtype={smaller!r}; {plan.dtype.value} does not fit: {plan.memory.reason}"
        requested = replace(requested, dtype=smaller)
        estimate = _make_estimate(folder, target, requested, call_size)
        plan = replace(estimate.make_plan(batch), dtype=Decision(smaller, reason))
    if plan.forecast is None or not is_quantization_useful(plan, requested):
        return plan

    def forecast(weights: str) -> tuple[Decision[MemoryRule | None], Forecast]:
        listener.on_phase(f"Tracing {folder.pipeline} with {weights} weights")
        return estimate.with_weights(weights).forecast(batch)

    offers, notes = list_quantization_options(forecast)
    return replace(plan, forecast=replace(plan.forecast, offers=offers, notes=(*plan.forecast.notes, *notes)))


def _make_estimate(
    folder: ModelFolder, target: DeviceTarget, options: PlacementOptions, call_size: RequestedSize
) -> MemoryEstimate:
    return MemoryEstimate(folder, target, _plan_without_size(folder, target, options), options, call_size)


def _plan_without_size(folder: ModelFolder, target: DeviceTarget, options: PlacementOptions) -> Plan:
    """Return a plan with the decisions that do not depend on the image size."""
    components = tuple(
        ComponentFacts(name=component.name, kind=component.kind, dtype="float32", parameters=0, denoises=False)
        for component in folder.components
        if component.config is not None
    )
    return make_plan(
        target.sheet,
        PipelineFacts(pipeline=folder.pipeline, components=components),
        replace(options, parallel=None),  # decided once the models are built, because it depends on them
        device=target.name,
        virtual=target.virtual,
        environment=os.environ,
    )
