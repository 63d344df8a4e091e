"""The placement of a pipeline: its open device, its plan, and the state kept between calls."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from anyaccel.backends.device import OpenDevice
from anyaccel.planning.decision import Decision
from anyaccel.planning.memory import MemoryRule, Residence
from anyaccel.planning.options import PlacementOptions
from anyaccel.planning.plan import NO_MEMORY, Plan
from anyaccel.planning.run_report import RunReport

if TYPE_CHECKING:
    from anyaccel.runtime.placement.memory_plan import CallPlan
    from anyaccel.runtime.speed.apply_speedups import SpeedState

__all__ = [
    "PlacedModel",
    "Placement",
    "being_offloaded",
    "cancel_deferred_placement",
    "defer_placement",
    "drop_placement",
    "find_options",
    "find_placed_model",
    "find_placement",
    "forget_placement",
    "is_being_offloaded",
    "record_placed_models",
    "set_placement",
    "store_options",
]

# Keys in the pipeline's `__dict__`, set through `vars`: `DiffusionPipeline.__setattr__` may also write to the config.
_KEY = "_anyaccel_placement"
_OPTIONS = "_anyaccel_options"
_OFFLOADING = "_anyaccel_offloading"
_DEFERRED = "_anyaccel_deferred"
# All placements by their id, for forked processes.
_PLACEMENTS: weakref.WeakValueDictionary[int, Placement] = weakref.WeakValueDictionary()


@dataclass
class Placement:
    """A pipeline's device and plan, and the state that its calls share."""

    opened: OpenDevice
    device: torch.device
    plan: Plan
    """The decisions; never replaced. Later events are in its report."""
    options: PlacementOptions
    call_plan: Plan = None  # type: ignore[assignment]
    """The plan that calls use: with sliced attention if memory requires it, otherwise `plan`."""
    running: bool = False
    """Whether a call is running. Nested calls then run without setup of their own."""
    # Reentrant, because a callback may call the pipeline again in the same thread.
    lock: threading.RLock = field(default_factory=threading.RLock)
    loaded: dict[str, str] = field(default_factory=dict)
    """Dtype of each model when it was loaded, before any plan cast it."""
    cache_dir: str | None = None
    """Cache directory of compiled graphs, if the user configured one."""
    residence: Residence | None = "resident"
    """Where the weights are; None after an interrupted move."""
    offloaded_by_user: bool = False
    """Whether the user enabled offloading with a diffusers method such as `enable_model_cpu_offload`."""
    has_manager: bool = False
    """Whether a components manager of diffusers offloads the models of a modular pipeline."""
    denoisers: tuple[str, ...] = ()
    """Names of the models that run at every step."""
    placed: dict[str, weakref.ref[torch.nn.Module]] = field(default_factory=dict)
    """The placed models by name. A model that the user replaces is placed before the next call."""
    placed_dtypes: dict[str, str] = field(default_factory=dict)
    """The dtypes of the placed models by name, to find those that the user has cast since."""
    own_dtypes: dict[str, str] = field(default_factory=dict)
    """Dtypes of the models that the user has replaced since the pipeline was placed."""
    vae_in_parts: bool = False
    """Whether slicing and tiling of the VAE are enabled."""
    tiling_was_reported: bool = False
    """Whether a call has warned that VAE tiling changes its images."""
    weights_rule: Decision[MemoryRule] = NO_MEMORY
    """The memory rule before the first call, when no image size is known."""
    shared: bool = False
    """Whether other pipelines run the same models concurrently; the models are not changed then."""
    speed: SpeedState | None = None
    """State of the speed-ups, with the measured times."""
    call_plans: dict[str, CallPlan] = field(default_factory=dict)
    """Memory plan of each call shape, by the text of `shape_of`."""
    unsplit: set[str] = field(default_factory=set)
    """Reasons why models run whole batches that should be split; each is reported once."""
    seeds_run_singly: bool = False
    """Whether images with seeds run one per call, because the pipeline draws noise that belongs to no single image."""

    def __post_init__(self) -> None:
        self.call_plan = self.call_plan or self.plan
        _PLACEMENTS[id(self)] = self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "plan" and "plan" in vars(self):
            raise AttributeError("plan is read-only; record runtime events in its report")
        super().__setattr__(name, value)

    @property
    def report(self) -> RunReport:
        """A report of runtime events since placement, such as compiled models and reduced memory settings."""
        return self.plan.report

    @property
    def memory_rule(self) -> Decision[MemoryRule]:
        """The memory settings that are in use, with the reason for them."""
        return self.plan.memory_in_use

    @property
    def component_dtypes(self) -> dict[str, str]:
        """The dtypes, by model name, of models that do not use the plan's dtype.

        These are planned exceptions, models that the user has replaced, and models that run in float32 because they
        returned NaN or Inf.
        """
        recovered = self.report.float32_models.value if self.report.float32_models else ()
        planned = dict(self.plan.component_dtypes.value)
        return {**planned, **self.own_dtypes, **dict.fromkeys(recovered, "float32")}


def _release_locks() -> None:
    """In a forked child, end the calls that ran in other threads: these threads do not exist there."""
    for placement in _PLACEMENTS.values():
        if placement.lock.acquire(blocking=False):  # free, or a call in this thread: a callback may fork
            placement.lock.release()
        else:
            placement.lock, placement.running = threading.RLock(), False


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_release_locks)


@dataclass(frozen=True)
class PlacedModel:
    """How a model was placed last. It outlives the pipeline that placed the model."""

    opened: OpenDevice
    plan: Plan
    options: PlacementOptions
    residence: Residence | None
    placement: weakref.ref[Placement]


# Not an attribute of the model: a deep copy of a placed model is not placed.
_PLACED: weakref.WeakKeyDictionary[torch.nn.Module, PlacedModel] = weakref.WeakKeyDictionary()


def record_placed_models(models: Iterable[torch.nn.Module], placement: Placement) -> None:
    """Record that a placement has moved these models, so other pipelines with the same models can follow."""
    record = PlacedModel(
        placement.opened, placement.plan, placement.options, placement.residence, weakref.ref(placement)
    )
    for model in models:
        _PLACED[model] = record


def find_placed_model(model: Any) -> PlacedModel | None:
    """Return how a model was placed last, or None if it was never placed."""
    return _PLACED.get(model) if isinstance(model, torch.nn.Module) else None


def defer_placement(pipe: Any, attach: Callable[[Any], None]) -> None:
    """Call `attach(pipe)` when the pipeline's placement is first needed."""
    vars(pipe)[_DEFERRED] = attach


def cancel_deferred_placement(pipe: Any) -> bool:
    """Cancel the call that `defer_placement` requested; return whether there was one."""
    return vars(pipe).pop(_DEFERRED, None) is not None


def find_placement(pipe: Any) -> Placement | None:
    """Return the placement attached to a pipeline, or None if it has none."""
    state = vars(pipe)
    placement = state.get(_KEY)
    if placement is None and _DEFERRED in state:
        attach = state.pop(_DEFERRED)  # before the call, which looks for the placement itself
        try:
            attach(pipe)
        except BaseException:
            state[_DEFERRED] = attach
            raise
        placement = state.get(_KEY)
    return placement if isinstance(placement, Placement) else None


def set_placement(pipe: Any, placement: Placement) -> None:
    """Attach a placement to a pipeline, replacing any earlier one."""
    vars(pipe).pop(_DEFERRED, None)
    vars(pipe)[_KEY] = placement


def drop_placement(pipe: Any) -> None:
    """Remove a pipeline's placement after an interrupted move, but keep its options."""
    placement = vars(pipe).pop(_KEY, None)
    if isinstance(placement, Placement):
        store_options(pipe, placement.options)


def store_options(pipe: Any, options: PlacementOptions) -> None:
    """Store the default options for later placements of a pipeline."""
    vars(pipe)[_OPTIONS] = options


def find_options(pipe: Any) -> PlacementOptions:
    """Return a pipeline's placement options, or the defaults if none were set."""
    placement = find_placement(pipe)
    if placement is not None:
        return placement.options
    options = vars(pipe).get(_OPTIONS)
    return options if isinstance(options, PlacementOptions) else PlacementOptions()


@contextmanager
def being_offloaded(pipe: Any) -> Iterator[None]:
    """Make `pipe.to` and the offload methods call diffusers directly inside the `with` block."""
    # diffusers' offload methods call `pipe.to("cpu")`, which would otherwise place the pipeline again.
    before = _OFFLOADING in vars(pipe)  # blocks can be nested; only the outermost one removes the mark
    vars(pipe)[_OFFLOADING] = True
    try:
        yield
    finally:
        if not before:
            vars(pipe).pop(_OFFLOADING, None)


def is_being_offloaded(pipe: Any) -> bool:
    """Return whether the pipeline is being offloaded, so diffusers itself moves it."""
    return _OFFLOADING in vars(pipe)


def forget_placement(state: dict[str, Any]) -> dict[str, Any]:
    """Return a pipeline's `__dict__` for copying or pickling, with its options but no placement."""
    # The placement has locks, weak references and an open device, which belong to this process.
    remaining = {name: value for name, value in state.items() if name not in (_KEY, _DEFERRED)}
    placement = state.get(_KEY)
    if not isinstance(placement, Placement):
        return remaining
    options = placement.options
    if options.dtype is not None:  # the models have it already; a later `to` must not undo the casts of the user
        options = replace(options, dtype=None, keep_dtypes=True)
    return {**remaining, _OPTIONS: options}
