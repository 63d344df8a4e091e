"""Where a pipeline is placed: the device that was opened, the plan, and what is kept between calls."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from anyaccel.backends.device import OpenDevice
from anyaccel.planning.decision import Decision
from anyaccel.planning.memory import MemoryRule, Residence
from anyaccel.planning.options import PlacementOptions
from anyaccel.planning.plan import NO_MEMORY, Plan
from anyaccel.planning.run_report import RunReport
from anyaccel.runtime.batch_split import SharedProgress

if TYPE_CHECKING:
    from anyaccel.runtime.placement.memory_plan import CallPlan
    from anyaccel.runtime.speed.session import SpeedState

__all__ = [
    "Placement",
    "being_offloaded",
    "drop_placement",
    "find_options",
    "find_placement",
    "forget_placement",
    "is_being_offloaded",
    "keep_placement",
    "store_options",
]

_KEY = "_anyaccel_placement"
_OPTIONS = "_anyaccel_options"
_OFFLOADING = "_anyaccel_offloading"


@dataclass
class Placement:
    """A pipeline on a device."""

    opened: OpenDevice
    device: torch.device
    plan: Plan
    """What was decided; never replaced."""
    options: PlacementOptions
    call_plan: Plan = None  # type: ignore[assignment]
    """The plan as it is applied to calls now: with sliced attention where memory requires that."""
    progress: SharedProgress | None = None
    """The bar that several calls share while they run."""
    running: bool = False
    """Whether a call runs now: a pipeline inside this one leaves the seams alone."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    loaded: dict[str, str] = field(default_factory=dict)
    """The type that each model was loaded in, before any plan cast it."""
    cache_dir: str | None = None
    """Where this pipeline's compiled graphs are kept, if it was told."""
    residence: Residence | None = "resident"
    """Where the weights are; None where a move was cut short."""
    offloaded_by_user: bool = False
    """Whether the user chose that, by diffusers' own methods."""
    denoisers: tuple[str, ...] = ()
    """The models that run at every step."""
    placed: dict[str, weakref.ref[torch.nn.Module]] = field(default_factory=dict)
    """The models that were placed, by name: another one in the place of one is to be placed too."""
    vae_in_parts: bool = False
    """Whether the autoencoder was told to take its pictures in parts."""
    weights_rule: Decision[MemoryRule] = NO_MEMORY
    """Where the weights go as long as no size is known."""
    shared: bool = False
    """Whether the models are shared with other pipelines that run at the same time, and so are left as they are."""
    speed: SpeedState | None = None
    """What was done for speed, and how long pictures took."""
    call_plans: dict[str, CallPlan] = field(default_factory=dict)
    """How calls of each shape are run, by the shape in words."""

    def __post_init__(self) -> None:
        self.call_plan = self.call_plan or self.plan

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "plan" and "plan" in vars(self):
            raise AttributeError("a plan is never replaced: what happens later goes into the report")
        super().__setattr__(name, value)

    @property
    def report(self) -> RunReport:
        """What happened since the pipeline was placed."""
        return self.plan.report

    @property
    def memory_rule(self) -> Decision[MemoryRule]:
        """The rule that the pipeline was last brought into."""
        return self.plan.memory_in_use

    @property
    def component_dtypes(self) -> dict[str, str]:
        """The dtypes of models that differ from the pipeline's, planned or after NaN."""
        fixed = self.report.float32_models.value if self.report.float32_models else ()
        return {**dict(self.plan.component_dtypes.value), **dict.fromkeys(fixed, "float32")}


def find_placement(pipe: Any) -> Placement | None:
    """Where a pipeline is placed; None if it is not."""
    found = vars(pipe).get(_KEY)
    return found if isinstance(found, Placement) else None


def keep_placement(pipe: Any, placement: Placement) -> None:
    """Remember where a pipeline is; not through its own attributes, which it registers and saves."""
    vars(pipe)[_KEY] = placement


def drop_placement(pipe: Any) -> None:
    """Forget where a pipeline is, and keep what was wished for: its weights may lie anywhere after a move cut short."""
    placement = vars(pipe).pop(_KEY, None)
    if isinstance(placement, Placement):
        store_options(pipe, placement.options)


def store_options(pipe: Any, options: PlacementOptions) -> None:
    """Remember what a pipeline was loaded with, for when it is placed."""
    vars(pipe)[_OPTIONS] = options


def find_options(pipe: Any) -> PlacementOptions:
    """What was wished for a pipeline so far."""
    placement = find_placement(pipe)
    if placement is not None:
        return placement.options
    found = vars(pipe).get(_OPTIONS)
    return found if isinstance(found, PlacementOptions) else PlacementOptions()


@contextmanager
def being_offloaded(pipe: Any) -> Iterator[None]:
    """While the block runs, a pipeline's own moves are diffusers', and are left alone."""
    before = _OFFLOADING in vars(pipe)
    vars(pipe)[_OFFLOADING] = True
    try:
        yield
    finally:
        if not before:
            vars(pipe).pop(_OFFLOADING, None)


def is_being_offloaded(pipe: Any) -> bool:
    """Whether diffusers is moving the pipeline's models itself now."""
    placement = find_placement(pipe)
    return _OFFLOADING in vars(pipe) or (placement is not None and placement.running)


def forget_placement(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a pipeline without what belongs to this process; what was wished for goes with it."""
    kept = {name: value for name, value in state.items() if name != _KEY}
    placement = state.get(_KEY)
    return {**kept, _OPTIONS: placement.options} if isinstance(placement, Placement) else kept
