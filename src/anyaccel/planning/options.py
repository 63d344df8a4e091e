"""Options for `anyaccel.place`; the planner chooses a value for each option that is not set."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any

from anyaccel.errors import UsageError, nearest

__all__ = [
    "FLOATING_BYTES",
    "RESIDENCES",
    "SPEEDS",
    "WEIGHT_FORMATS",
    "PlacementOptions",
    "check_residence",
    "check_speed",
    "check_weights",
    "read_options",
    "read_parallel",
]

# The dtypes that a pipeline can run in, with their bytes per element.
FLOATING_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
RESIDENCES = ("resident", "component", "layer", "phase")

SPEEDS = ("exact", "fast", "draft")
# The formats of the option `weights=`.
WEIGHT_FORMATS = ("int8", "fp8", "nf4", "gguf:Q8_0", "gguf:Q4_0")
_PARALLEL = re.compile(r"(?P<fixed>auto|cfg)|(?P<strategy>tensor|context)(:(?P<ranks>[0-9]{1,4}))?")


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """The keyword arguments of `anyaccel.place` and `pipe.to`, except the device."""

    dtype: str | None = None
    """The dtype to run in, such as `bfloat16`; None for the best dtype of the device."""
    keep_dtypes: bool = False
    """Whether each model keeps the dtype in which it was loaded, as with `from_pretrained(dtype={…})`, if no dtype is
    requested."""
    smallest_dtype: str | None = None
    """The dtype to fall back to if a call does not fit otherwise, such as `bfloat16`; None for no fallback."""
    attention_slicing: str | int | None = None
    """Attention heads per slice: an integer, `auto` for half of them, `max` for one; None to slice only if required."""
    images_per_call: int | None = None
    """Images per model call; None for as many as the device handles reliably."""
    mode: str | None = None
    """Execution mode on devices that have several: `eager`, `lazy`; None for the default of the device."""
    scheduler: str | None = None
    """Where the scheduler's timesteps and sigmas are: `cpu` or `device`; None to decide by the cost of a lookup."""
    memory: str | None = None
    """Which weights are on the device: `resident` for all, `component`, `layer` or `phase` for those of the running
    model, layer or phase (read from disk); None for the fastest one that fits."""
    vae_tiling: bool | None = None
    """Whether the VAE processes images one by one and large ones in tiles; None to do so only if required."""
    weights: str | None = None
    """The format to which the linear layers of denoisers and large text encoders are quantized, permanently: `int8`,
    `fp8`, `nf4`, `gguf:Q8_0`, `gguf:Q4_0`; None to keep the weights as they are."""
    speed: str = "exact"
    """`exact` keeps the image up to rounding; `fast` changes it slightly, `draft` more."""
    compile: str | bool = "auto"
    """Whether to compile: `auto` once it pays off for the expected images, True at the first call, False never."""
    expected_images: int | None = None
    """The number of images still to come, for `compile="auto"`; None to expect as many as were generated so far."""
    capture: bool | None = None
    """Whether to capture denoisers as device graphs (CUDA graphs); None to capture compiled ones."""
    channels_last: bool | None = None
    """Whether compiled models use the channels-last memory format; None if it pays off on the device."""
    fuse: bool | None = None
    """Whether compiled models use fused operations; None if they pay off on the device."""
    parallel: str | None = None
    """How one model is split over several devices, one process per device: `auto`, `tensor:2`, `context:4`, `cfg`;
    None for one device."""
    check_finite: bool = True
    """Whether NaN and Inf in the image are detected, traced to a model and retried in float32."""
    sdp_on_bf16: bool = True
    """Whether attention may reduce in bfloat16 on devices that would use float32."""
    hpu_migration: bool = True
    """Whether to set PT_HPU_GPU_MIGRATION, which maps CUDA calls to the HPU."""


def read_options(keywords: dict[str, Any], before: PlacementOptions | None = None) -> PlacementOptions:
    """Validate keyword arguments and return them as options, merged into `before` if it is passed.

    Raise UsageError for an unknown keyword or an invalid value.
    """
    names = [field.name for field in fields(PlacementOptions)]
    for name in keywords:
        if name not in names:
            raise UsageError(f"unknown option {name!r}", hint=nearest(name, names))
    # pipe.to(device, option=...) keeps the options of an earlier placement.
    options = replace(before or PlacementOptions(), **keywords)
    _check(options)
    return options


def check_residence(memory: str | None, *, unified_memory: bool) -> None:
    """Raise UsageError for `memory="component"` on a device with unified memory.

    Offloading a model to the CPU saves no memory on such a device.
    """
    if memory == "component" and unified_memory:
        raise UsageError(
            "memory='component' saves no memory on this device, because the device shares memory with the CPU",
            hint="use memory='phase', which reads the models of each phase from disk, or omit memory",
        )


def check_speed(speed: str) -> None:
    """Raise UsageError if `speed` is not `exact`, `fast` or `draft`."""
    if speed not in SPEEDS:
        raise UsageError(
            f"speed must be one of {', '.join(SPEEDS)}, not {speed!r}", hint=nearest(str(speed), list(SPEEDS))
        )


def check_weights(weights: str | None) -> None:
    """Raise UsageError if `weights` is neither None nor one of `WEIGHT_FORMATS`."""
    if weights not in (None, *WEIGHT_FORMATS):
        formats = ", ".join(WEIGHT_FORMATS)
        hint = nearest(str(weights), list(WEIGHT_FORMATS))
        raise UsageError(f"weights must be one of {formats}, not {weights!r}", hint=hint)


def read_parallel(text: str) -> tuple[str, int | None]:
    """Parse the `parallel` option: `context:4` becomes `("context", 4)`.

    Without a number, the second value is None, and all running processes are used. Raise UsageError
    if the text is not valid.
    """
    match = _PARALLEL.fullmatch(text) if isinstance(text, str) else None
    ranks = match["ranks"] if match else None
    # One rank is not a split: parallel=None means one device.
    if match is None or (ranks is not None and int(ranks) < 2):
        raise UsageError(
            f"parallel must be 'auto', 'cfg', 'tensor', 'context', 'tensor:N' or 'context:N' (N >= 2), not {text!r}",
            hint="for example parallel='context:2'",
        )
    return match["fixed"] or match["strategy"], int(ranks) if ranks else None


def _check(options: PlacementOptions) -> None:
    slicing = options.attention_slicing
    # "auto" and "max" are the values of diffusers' enable_attention_slicing.
    if isinstance(slicing, str) and slicing not in ("auto", "max"):
        raise UsageError(
            f"attention_slicing must be a number of attention heads, 'auto' or 'max', not {slicing!r}",
            hint="for example attention_slicing=1, or omit it",
        )
    for name in ("attention_slicing", "images_per_call", "expected_images"):
        value = getattr(options, name)
        if value is None or (name == "attention_slicing" and isinstance(value, str)):
            continue
        # bool is a subclass of int: images_per_call=True must not mean 1.
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} must be a positive integer, not {value!r}", hint=f"for example {name}=1")
    _check_booleans(options)
    _check_dtypes(options)
    if options.memory not in (None, *RESIDENCES):
        hint = "for example memory='phase', or omit it to let anyaccel choose"
        raise UsageError(f"memory must be one of {', '.join(RESIDENCES)}, not {options.memory!r}", hint=hint)
    if not isinstance(options.compile, bool) and options.compile != "auto":
        hint = "for example compile=True, or omit it"
        raise UsageError(f"compile must be 'auto', True or False, not {options.compile!r}", hint=hint)
    check_weights(options.weights)
    check_speed(options.speed)
    if options.parallel is not None and read_parallel(options.parallel)[0] == "tensor" and options.weights is not None:
        raise UsageError(
            f"parallel={options.parallel!r} cannot split quantized weights, and weights={options.weights!r} was passed",
            hint="use parallel='context', or omit weights",
        )
    if options.scheduler not in (None, "cpu", "device"):
        hint = "for example scheduler='cpu', or omit it"
        raise UsageError(f"scheduler must be 'cpu' or 'device', not {options.scheduler!r}", hint=hint)


def _check_booleans(options: PlacementOptions) -> None:
    for field in fields(options):
        value = getattr(options, field.name)
        # Annotations are strings here, because of `from __future__ import annotations`.
        is_default = field.type == "bool | None" and value is None
        if field.type in ("bool", "bool | None") and not isinstance(value, bool) and not is_default:
            raise UsageError(
                f"{field.name} must be True or False, not {value!r}", hint=f"for example {field.name}=True, or omit it"
            )


def _check_dtypes(options: PlacementOptions) -> None:
    for name in ("dtype", "smallest_dtype"):
        value = getattr(options, name)
        if value not in (None, *FLOATING_BYTES):
            dtypes = ", ".join(FLOATING_BYTES)
            hint = f"for example {name}='bfloat16', or omit it"
            raise UsageError(f"{name} must be one of {dtypes}, not {value!r}", hint=hint)
