"""Loading onto a device: each component is moved there before the next one is loaded."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from anyaccel.backends.device import OpenDevice, find_device
from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.errors import NotMeasurableError
from anyaccel.planning.decision import Decision
from anyaccel.planning.dtype import HALF_PRECISIONS, choose_dtype
from anyaccel.planning.facts import PipelineFacts
from anyaccel.planning.memory import choose_residence, list_residences
from anyaccel.planning.options import PlacementOptions, read_options
from anyaccel.planning.plan import Plan, make_plan
from anyaccel.quantized_weights.quantize import quantize_model
from anyaccel.runtime.introspection import is_denoiser, is_quantized, read_dtype
from anyaccel.runtime.placement.oom_retry import clear_traceback_frames
from anyaccel.runtime.placement.weight_moves import make_move_mode, release_freed_memory, stage_weights
from anyaccel.runtime.weight_files.sizes import read_weight_bytes
from anyaccel.upstream.diffusers_loading import calling_after_each_component

__all__ = [
    "ComponentMover",
    "LoadTarget",
    "choose_loading_dtype",
    "make_mover",
    "moving_components",
    "take_placement_options",
]


@dataclass(frozen=True)
class LoadTarget:
    """The device that a pipeline is loaded onto, and the options of its placement."""

    opened: OpenDevice
    options: PlacementOptions


def take_placement_options(options: dict[str, Any]) -> PlacementOptions:
    """Remove the placement options from options of `from_pretrained`, and return them.

    Without `device=`, only `weights=` is one of them. `scheduler=` is always a component, and the dtype is an option of
    `from_pretrained`.
    """
    names = {field.name for field in fields(PlacementOptions)} - {"dtype", "keep_dtypes", "scheduler"}
    names = names if options.get("device") is not None else {"weights"}
    return read_options({name: options.pop(name) for name in names & set(options)})


def choose_loading_dtype(
    opened: OpenDevice, options: dict[str, Any], requested: PlacementOptions, dtype: Decision[str] | None
) -> tuple[dict[str, Any], PlacementOptions, Decision[str] | None]:
    """Return options of `from_pretrained` with the dtype for a device, and the dtype decision for the placement.

    Weights that are loaded in the final dtype need no copy in float32.
    """
    if options.get("dtype") is not None or options.get("torch_dtype") is not None:
        return options, replace(requested, keep_dtypes=True), dtype
    chosen = dtype or choose_dtype(opened.sheet, PipelineFacts(pipeline=""), requested)
    is_half = chosen.value in HALF_PRECISIONS
    if requested.dtype is not None or is_half:
        options = {**options, "dtype": chosen.value}
    return options, requested, chosen if dtype or is_half else None


@contextmanager
def moving_components(target: LoadTarget | None, dtype: Any, kept: Collection[str] = ()) -> Iterator[None]:
    """Move each component that diffusers loads in this block to the device, if all weights fit there.

    Without this, all weights that are cast would be in host memory before the first one is moved. The others are
    memory-mapped from their files. Components in `kept` stay on the host.
    """
    mover = make_mover(target, dtype, kept)
    if mover is None:
        yield
        return

    def move(name: str, component: Any, folder: str, variant: str | None) -> None:
        folders = {entry.name: entry for entry in Path(folder).iterdir() if entry.is_dir()}
        mover.move(name, component, folders, variant)

    with calling_after_each_component(move):
        yield


def make_mover(target: LoadTarget | None, dtype: Any, kept: Collection[str] = ()) -> ComponentMover | None:
    """Return a mover to the device of a target; None if the placement has to start with the weights on the host."""
    return None if target is None or not _can_move(target) else ComponentMover(target, dtype, kept)


def _can_move(target: LoadTarget) -> bool:
    """Return whether the placement leaves whole components on the device."""
    options = target.options
    is_split = options.parallel is not None or options.memory not in (None, "resident")
    return not (target.opened.sheet.is_host or is_split)


class ComponentMover:
    """Moves the components of one pipeline, as long as the device has enough memory.

    With `weights=`, only denoisers are moved, and quantized before. Whether another component is quantized depends on
    its share of all weights, so the placement decides.
    """

    def __init__(self, target: LoadTarget, dtype: Any, kept: Collection[str]) -> None:
        self.target, self.dtype, self.kept = target, dtype, kept
        self.fits: bool | None = None

    def move(self, name: str, component: Any, folders: Mapping[str, Path], variant: str | None) -> None:
        """Move a component, unless the placement has to change its weights first.

        `folders` are those of all components of the pipeline.
        """
        sheet = self.target.opened.sheet
        if not isinstance(component, torch.nn.Module) or name in self.kept or is_quantized(component):
            return
        weights = self.target.options.weights
        if weights is not None:
            if not is_denoiser(name, component):
                return
            quantize_model(component, weights)
        dtype = read_dtype(component)
        if sheet.adjusted_dtype(dtype) != dtype:
            return
        if self.fits is None:
            self.fits = self._check_size(folders, variant)
        if not self.fits:
            return
        device = self.target.opened.tensor_device
        try:
            with torch.no_grad(), make_move_mode(self._make_plan(), device, [component]):
                stage_weights([component], self.target.opened)
                component.to(device)
            release_freed_memory()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # The placement chooses another memory mode after loading.
            self.fits = False
            clear_traceback_frames(error)
            component.to("cpu")
            self.target.opened.driver.empty_cache()

    def _make_plan(self) -> Plan:
        """Return a plan with the workarounds for moving tensors, which do not depend on the pipeline."""
        sheet, index = self.target.opened.sheet, self.target.opened.index
        return make_plan(
            sheet,
            PipelineFacts(pipeline=""),
            self.target.options,
            device=f"{sheet.name}:{index}",
            virtual=find_device(sheet.name).virtual,
            environment=os.environ,
        )

    def _check_size(self, folders: Mapping[str, Path], variant: str | None) -> bool:
        """Return whether all weights in the folders fit on the device together."""
        if self.target.options.memory == "resident":
            return True
        opened = self.target.opened
        try:
            opened.driver.empty_cache()
            capacity = opened.driver.memory(opened.index).free_bytes
        except NotMeasurableError:
            return True
        sizes = read_weight_bytes(folders, torch.float32 if self.dtype is None else self.dtype, variant)
        residences = list_residences(unified_memory=opened.sheet.unified_memory)
        return choose_residence(sizes, capacity, residences).value.residence == "resident"
