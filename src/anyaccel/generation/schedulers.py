"""Schedulers by name: class names of diffusers, and short names such as `euler` or `dpm++2m`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from anyaccel.errors import MissingLibraryError, UsageError, first_line, nearest
from anyaccel.upstream.schedulers import list_compatible_schedulers

__all__ = ["SHORT_NAMES", "check_scheduler", "choose_scheduler", "make_scheduler"]

SHORT_NAMES: Mapping[str, tuple[tuple[str, ...], Mapping[str, Any]]] = {
    "ddim": (("DDIMScheduler",), {}),
    "ddpm": (("DDPMScheduler",), {}),
    "deis": (("DEISMultistepScheduler",), {}),
    "dpm++2m": (("DPMSolverMultistepScheduler",), {}),
    "dpm++2m-karras": (("DPMSolverMultistepScheduler",), {"use_karras_sigmas": True}),
    "dpm++2m-sde": (("DPMSolverMultistepScheduler",), {"algorithm_type": "sde-dpmsolver++"}),
    "dpm++2m-sde-karras": (
        ("DPMSolverMultistepScheduler",), {"algorithm_type": "sde-dpmsolver++", "use_karras_sigmas": True},
    ),
    "dpm++2s": (("DPMSolverSinglestepScheduler",), {}),
    "dpm++sde": (("DPMSolverSDEScheduler",), {}),
    "euler": (("EulerDiscreteScheduler", "FlowMatchEulerDiscreteScheduler"), {}),
    "euler-a": (("EulerAncestralDiscreteScheduler",), {}),
    "euler-karras": (("EulerDiscreteScheduler",), {"use_karras_sigmas": True}),
    "heun": (("HeunDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"), {}),
    "kdpm2": (("KDPM2DiscreteScheduler",), {}),
    "kdpm2-a": (("KDPM2AncestralDiscreteScheduler",), {}),
    "lcm": (("LCMScheduler",), {}),
    "lms": (("LMSDiscreteScheduler",), {}),
    "pndm": (("PNDMScheduler",), {}),
    "tcd": (("TCDScheduler",), {}),
    "unipc": (("UniPCMultistepScheduler",), {}),
}  # fmt: skip
"""Class names of each short name, and the config values that differ from those of the model's scheduler."""


def check_scheduler(name: str) -> str:
    """Return the name of a scheduler, without differences in case; raise UsageError if it is unknown."""
    short = _normalize(name)
    if short in SHORT_NAMES:
        return short
    import diffusers

    found = getattr(diffusers, name, None)
    is_scheduler = isinstance(found, type) and issubclass(found, diffusers.SchedulerMixin)
    if not is_scheduler:
        names = [*SHORT_NAMES, *sorted({kind for kinds, _ in SHORT_NAMES.values() for kind in kinds})]
        raise UsageError(f"unknown scheduler {name!r:.60}", hint=nearest(name, names))
    return name


def _normalize(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-").replace("++-", "++")


def choose_scheduler(name: str, current: str, config: Mapping[str, Any] | None = None) -> str:
    """Return the class name of a requested scheduler for a model with the scheduler class `current`.

    Raise UsageError if diffusers does not list it as compatible.
    """
    compatible = _list_compatible(current, config or {})
    wanted = SHORT_NAMES[name][0] if name in SHORT_NAMES else (name,)
    found = next((kind for kind in wanted if kind in compatible), None)
    if found is None:
        usable = [short for short, (kinds, _) in SHORT_NAMES.items() if set(kinds) & set(compatible)]
        raise UsageError(
            f"the scheduler {name} cannot replace the model's {current}",
            hint=nearest(name, [*usable, *compatible]),
        )
    return found


def _list_compatible(current: str, config: Mapping[str, Any]) -> Sequence[str]:
    """Return the schedulers that diffusers lists as compatible; for a flow model, only those that support flows."""
    import diffusers

    names = list_compatible_schedulers(current)
    if config.get("use_flow_sigmas") or config.get("prediction_type") == "flow_prediction":
        kinds = {name: getattr(diffusers, name) for name in names}
        names = {name for name, kind in kinds.items() if "use_flow_sigmas" in inspect.signature(kind).parameters}
    return sorted(names)


def make_scheduler(name: str, current: Any) -> Any:
    """Return the requested scheduler with the config of the model's scheduler."""
    import diffusers

    kind = choose_scheduler(name, type(current).__name__, current.config)
    changes = SHORT_NAMES[name][1] if name in SHORT_NAMES else {}
    try:
        return getattr(diffusers, kind).from_config(current.config, **changes)
    except ImportError as error:  # DPMSolverSDEScheduler requires torchsde
        raise MissingLibraryError(
            f"{kind} requires a library that is not installed: {first_line(error)}",
            hint="install it with pip, or choose another scheduler",
        ) from error
