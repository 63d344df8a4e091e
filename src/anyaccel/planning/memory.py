"""Memory planning: whether a pipeline call fits on the device, and with which memory settings.

The fastest settings that fit are chosen. See docs/decisions/0006-memory.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from anyaccel.planning.decision import Decision
from anyaccel.planning.footprint import PHASES, Footprint, Measure, MemorySavings
from anyaccel.planning.limit_hits import LimitHit
from anyaccel.planning.loading_memory import LoadingForecast
from anyaccel.planning.options import PlacementOptions
from anyaccel.planning.time_estimate import TimeEstimate
from anyaccel.units import readable

__all__ = [
    "PLAIN",
    "Forecast",
    "MemoryRule",
    "OutputKind",
    "QuantizationOption",
    "Residence",
    "choose_memory",
    "choose_residence",
    "describe_weights_need",
    "find_fastest_option",
    "find_largest_batch",
    "list_residences",
    "list_rules",
    "make_forecast",
    "predict",
    "predict_weights",
]

# Which weights are on the device: all of them, or those of the running phase (read from disk), model or layer.
Residence: TypeAlias = Literal["resident", "phase", "component", "layer"]
OutputKind: TypeAlias = Literal["image", "video", "audio"]

_RESIDENCE_TEXT = {
    "resident": "everything resident",
    "phase": "one phase at a time, read from disk",
    "component": "one model at a time",
    "layer": "one layer at a time",
}
PLAIN = MemorySavings()
# Larger batches are extrapolated from a batch of this size.
_SAMPLE = 4
_MOST_IMAGES = 4096
# If the first rule needs this many times the capacity, the smallest rule is tried next. If it fails too, the others are
# skipped.
_FAR_TOO_LARGE = 8


@dataclass(frozen=True)
class MemoryRule:
    """Memory settings for a pipeline call: memory mode, activation savings and images at a time."""

    residence: Residence = "resident"
    savings: MemorySavings = PLAIN
    images_per_call: int | None = None
    """The number of images that the models run at a time; None for the whole batch."""

    def __str__(self) -> str:
        items = [_RESIDENCE_TEXT[self.residence]]
        items += ["VAE tiled"] if self.savings.vae_in_parts else []
        items += ["attention one head at a time"] if self.savings.sliced_attention else []
        if self.images_per_call is not None:
            items.append(f"{self.images_per_call} image{'s' if self.images_per_call > 1 else ''} at a time")
        return ", ".join(items)


@dataclass(frozen=True, kw_only=True)
class QuantizationOption:
    """A format of the option `weights=`, with the memory that a call would need; it is suggested but not applied."""

    name: str
    """`int8`."""
    weights_bytes: int
    """The size of all weights, including those that are not quantized."""
    peak_bytes: int
    memory: str
    """The memory settings: `everything resident`. `does not fit` if there are none."""
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The predicted memory use of one pipeline call, and whether the call fits on the device."""

    fits: bool
    capacity_bytes: int
    peak_bytes: int
    recorded_peak_bytes: int
    """The peak with captured device graphs. Graphs are captured only if this fits too."""
    phases: tuple[tuple[str, int], ...]
    """The peak of each phase: `load`, `encode`, `denoise`, `decode`."""
    components: tuple[tuple[str, int], ...]
    """The bytes of each model's weights."""
    images: int
    """The number of images, videos or audio clips."""
    size: tuple[int, int] | None
    kind: OutputKind = "image"
    frames: int | None = None
    """The number of frames of each video; None for images and audio."""
    fps: float | None = None
    """The frame rate of each video; None for images and audio, and if it is unknown."""
    seconds: float | None = None
    """The duration of each video or audio clip; None for images, and if it is unknown."""
    not_included: tuple[str, ...] = ()
    """The models whose config files are missing. The forecast does not count their memory."""
    largest_batch: int | None = None
    """The largest batch that fits with this rule; 0 if no image fits; None if it was not computed."""
    largest_size: tuple[int, int] | None = None
    """The largest single image of the same aspect ratio that fits with any rule; None if it was not computed."""
    largest_tried_side: int | None = None
    """The longest side at which the search for `largest_size` ends."""
    time: TimeEstimate | None = None
    """The estimated time of a call; None if the device's throughput is unknown, or if weights move during the call."""
    limits: tuple[LimitHit, ...] = ()
    """The limits of the device that the model runs into at this size."""
    offers: tuple[QuantizationOption, ...] = ()
    """The formats of quantized weights, if not all weights stay on the device without quantization."""
    notes: tuple[str, ...] = ()
    loading: LoadingForecast | None = None
    """The host memory for loading; None if the weight files are not on this machine."""
    prompt_only: bool = False
    """Whether a prompt is the only input of the call."""

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as a JSON-compatible dict."""
        return {
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "recorded_peak_bytes": self.recorded_peak_bytes,
            "capacity_bytes": self.capacity_bytes,
            "phases": dict(self.phases),
            "components": dict(self.components),
            "images": self.images,
            "kind": self.kind,
            "size": list(self.size) if self.size else None,
            "frames": self.frames,
            "fps": self.fps,
            "seconds": self.seconds,
            "not_included": list(self.not_included),
            "largest_batch": self.largest_batch,
            "largest_size": list(self.largest_size) if self.largest_size else None,
            "time_estimate": self.time.to_dict() if self.time else None,
            "limits": [asdict(limit) for limit in self.limits],
            "offers": [asdict(offer) for offer in self.offers],
            "notes": list(self.notes),
            "loading": asdict(self.loading) if self.loading else None,
        }


def find_fastest_option(offers: Iterable[QuantizationOption], residence: Residence | None) -> str | None:
    """Return the first format of quantized weights with the fastest memory mode.

    Return None if no format fits with a faster mode than `residence`, which is None if nothing fits without.
    """
    order = list(_RESIDENCE_TEXT)
    ranks = {
        option.name: next(
            position for position, name in enumerate(order) if option.memory.startswith(_RESIDENCE_TEXT[name])
        )
        for option in offers
        if option.fits
    }
    best = min(ranks, key=lambda name: ranks[name], default=None)
    return None if best is None or (residence is not None and ranks[best] >= order.index(residence)) else best


def list_residences(*, unified_memory: bool, can_offload: bool = True) -> tuple[Residence, ...]:
    """Return the memory modes that a device supports, fastest first.

    With unified memory, offloading to the CPU saves nothing, so the models of each phase are read from
    disk instead. `can_offload` allows offloading one model at a time.
    """
    # With unified memory, offloading a model to the CPU frees nothing: it has to go to disk.
    if unified_memory:
        return ("resident", "phase", "layer")
    return ("resident", "component", "layer") if can_offload else ("resident", "layer")


def list_rules(
    images: int,
    placement_options: PlacementOptions,
    residences: tuple[Residence, ...],
    *,
    supports_tiling: bool = True,
) -> Iterator[MemoryRule]:
    """Yield the memory settings to try, fastest first, without overriding options that the user set.

    Splitting the batch is tried before streaming the weights layer by layer, which is far slower.
    """
    options = _list_savings(placement_options, supports_tiling)
    if placement_options.memory is not None:
        residences = (_as_residence(placement_options.memory),)
    # Streaming layers comes last, after smaller batches. If it is the only residence, it is used from the start.
    whole: list[Residence] = [residence for residence in residences if residence != "layer"] or ["layer"]
    for residence in whole:
        for savings in options:
            yield MemoryRule(residence, savings, placement_options.images_per_call)
    if placement_options.images_per_call is None:
        for fewer in _halve(images):
            for savings in options:
                yield MemoryRule(whole[-1], savings, fewer)
    if whole[-1] != "layer" and "layer" in residences:
        single = 1 if images > 1 else None
        for savings in options:
            yield MemoryRule("layer", savings, placement_options.images_per_call or single)


def _as_residence(name: str) -> Residence:
    return next(residence for residence in get_args(Residence) if residence == name)


def _list_savings(placement_options: PlacementOptions, supports_tiling: bool = True) -> list[MemorySavings]:
    vae = [False, True] if placement_options.vae_tiling is None else [placement_options.vae_tiling]
    vae = vae if supports_tiling else [False]
    if placement_options.attention_slicing is not None:  # every rule slices as requested
        return [MemorySavings(tiled) for tiled in vae]
    return [*(MemorySavings(tiled) for tiled in vae), MemorySavings(vae[-1], sliced_attention=True)]


def _halve(images: int) -> Iterator[int]:
    while images > 1:
        images = (images + 1) // 2
        yield images


def predict(footprint: Footprint, residence: Residence, *, recorded: bool = False) -> dict[str, int]:
    """Return the peak device memory in bytes for each phase: `load`, `encode`, `denoise`, `decode`.

    With `recorded`, assume that denoising steps are captured as device graphs, and count the memory
    for their activations in every phase.
    """
    pinned = footprint.never_offloaded + (footprint.never_streamed if residence == "layer" else ())
    loaded = footprint.weights_bytes if residence == "resident" else _sum_weights(footprint, pinned)
    # "load" is the state before the first call: weights only.
    peaks = {"load": loaded}
    on_device: set[str] = set(footprint.never_offloaded)
    for call in footprint.model_calls:
        if residence == "component":
            on_device = _offload_previous(footprint, on_device, call.component)
            weights = _sum_weights(footprint, tuple(on_device))
        elif residence == "layer":
            weights = loaded + (0 if call.component in pinned else footprint.model(call.component).layer_bytes)
        elif residence == "phase":
            same_phase = {other.component for other in footprint.model_calls if other.phase == call.phase}
            weights = _sum_weights(footprint, tuple(same_phase))
        else:
            weights = loaded
        need = weights + call.held_bytes + footprint.fixed_bytes
        peaks[call.phase] = max(peaks.get(call.phase, 0), need)
    # A captured graph keeps its activations in a private pool between replays.
    if recorded:
        held = max((call.held_bytes for call in footprint.model_calls if call.phase == "denoise"), default=0)
        peaks = {name: peak if name == "denoise" else peak + held for name, peak in peaks.items()}
    return {name: peaks[name] for name in ("load", *PHASES) if name in peaks}


def predict_weights(footprint: Footprint, residence: Residence) -> int:
    """Return the peak device memory in bytes without activations, which is the same for every size."""
    calls = tuple(replace(call, held_bytes=0) for call in footprint.model_calls)
    return max(predict(replace(footprint, model_calls=calls), residence).values())


def _offload_previous(footprint: Footprint, on_device: set[str], component: str) -> set[str]:
    """Return the models that are on the device while `component` runs under model CPU offload.

    accelerate's hook for a model offloads only the previous model in the sequence; all others stay on the
    device.
    """
    if component in footprint.never_offloaded:
        return on_device
    names = {model.name for model in footprint.models}
    order = [name for name in footprint.offload_order if name in names]
    position = order.index(component) if component in order else 0
    previous = {order[position - 1]} if position else set()
    return (on_device - previous) | {component}


def _sum_weights(footprint: Footprint, names: tuple[str, ...]) -> int:
    return sum(model.weights_bytes for model in footprint.models if model.name in names)


def choose_memory(
    measure: Measure, images: int, capacity_bytes: int, rules: Iterable[MemoryRule]
) -> tuple[Decision[MemoryRule | None], dict[str, int]]:
    """Return the first memory settings that fit, and the peak memory of each phase in bytes.

    If no settings fit, return None and the peaks for the settings that need the least memory.
    """
    candidates = list(rules)
    tried: list[tuple[int, MemoryRule, dict[str, int]]] = []
    footprint: Footprint | None = None
    for rule in candidates:
        # Every rule costs a trace, and a far too large image would fail all of them.
        if tried and tried[0][0] > _FAR_TOO_LARGE * capacity_bytes and len(tried) == 1:
            too_large = _reject_early(measure, images, capacity_bytes, candidates[-1])
            if too_large is not None:
                return too_large
        if footprint and rule is not candidates[-1] and predict_weights(footprint, rule.residence) > capacity_bytes:
            continue
        footprint = measure(rule.savings, images, rule.images_per_call)
        peaks = predict(footprint, rule.residence)
        need = max(peaks.values())
        if need <= capacity_bytes:
            rejected = f"{tried[0][1]} would need {readable(tried[0][0])}; " if tried else ""
            fits = f"this memory mode needs {readable(need)} of the {readable(capacity_bytes)} available"
            return Decision(rule, rejected + fits), peaks
        tried.append((need, rule, peaks))
    need, rule, peaks = min(tried, key=lambda attempt: attempt[0])
    return Decision(
        None, f"at least {readable(need)} is needed ({rule}), but only {readable(capacity_bytes)} is available"
    ), peaks


def _reject_early(
    measure: Measure, images: int, capacity_bytes: int, smallest: MemoryRule
) -> tuple[Decision[MemoryRule | None], dict[str, int]] | None:
    """Check whether denoising fits with the memory settings that need the least memory.

    Return None if it fits. Otherwise return a decision with the value None, and the peak memory of
    each phase in bytes.
    """
    # Without tiling: a far too large image has thousands of VAE tiles, and tracing them would be slow.
    savings = replace(smallest.savings, vae_in_parts=False)
    peaks = predict(measure(savings, images, smallest.images_per_call), smallest.residence)
    need = peaks.get("denoise", 0)
    if need <= capacity_bytes:
        return None
    reason = f"denoising needs at least {readable(need)} ({smallest}), but only {readable(capacity_bytes)} is available"
    return Decision(None, reason), {name: peak for name, peak in peaks.items() if name != "decode"}


def describe_weights_need(weights_bytes: int, capacity_bytes: int) -> str:
    """Return a clause that compares the size of the weights with the memory of the device."""
    if weights_bytes > capacity_bytes:
        return f"the weights need {readable(weights_bytes)}, but only {readable(capacity_bytes)} is available"
    return f"the weights need {readable(weights_bytes)} of the {readable(capacity_bytes)} available"


def choose_residence(
    weights: Mapping[str, int], capacity_bytes: int, residences: tuple[Residence, ...]
) -> Decision[MemoryRule]:
    """Return the fastest memory mode in which the weights use at most 4/5 of the device memory.

    This is used before the image size is known. If no mode qualifies, the last one is returned.
    """
    budget = capacity_bytes * 4 // 5  # the rest is for activations
    need: dict[Residence, int] = {"resident": sum(weights.values()), "component": max(weights.values(), default=0)}
    weights_need = describe_weights_need(need["resident"], capacity_bytes)
    reason = f"{weights_need}; each image size is checked the first time it is used"
    for residence in residences[:-1]:
        if need.get(residence, 0) <= budget:
            return Decision(MemoryRule(residence), reason)
    return Decision(MemoryRule(residences[-1]), reason)


def find_largest_batch(measure: Measure, rule: MemoryRule, capacity_bytes: int) -> int:
    """Return the largest batch size that fits with these memory settings, or 0 if no image fits.

    Batches of more than 4 images are extrapolated.
    """

    def fit(images: int) -> bool:
        return max(predict(measure(rule.savings, images), rule.residence).values()) <= capacity_bytes

    # Each measurement traces the pipeline. Larger batches are extrapolated linearly, which errs on the safe side.
    looks_full = _extrapolate(measure(rule.savings, 1), rule, _SAMPLE) > capacity_bytes
    if (looks_full or not fit(_SAMPLE)) and not all(fit(images) for images in range(1, _SAMPLE)):
        return next(images for images in range(_SAMPLE) if not fit(images + 1))
    sample = measure(rule.savings, _SAMPLE)
    fits = [images for images in _powers() if _extrapolate(sample, rule, images) <= capacity_bytes]
    if not fits:
        return _SAMPLE - 1
    # Binary search between the largest power of two that fits and the next one.
    low, high = fits[-1], min(fits[-1] * 2, _MOST_IMAGES)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _extrapolate(sample, rule, middle) <= capacity_bytes else (low, middle)
    return low


def _powers() -> Iterator[int]:
    images = _SAMPLE
    while images <= _MOST_IMAGES:
        yield images
        images *= 2


def _extrapolate(sample: Footprint, rule: MemoryRule, images: int) -> int:
    """Estimate the peak memory of a batch in bytes by scaling the activations of a measured batch."""
    calls = [replace(call, held_bytes=call.held_bytes * images // sample.images) for call in sample.model_calls]
    return max(predict(replace(sample, model_calls=tuple(calls)), rule.residence).values())


def make_forecast(
    measure: Measure, images: int, capacity_bytes: int, rules: Iterable[MemoryRule]
) -> tuple[Decision[MemoryRule | None], Forecast]:
    """Return the memory settings for one pipeline call, and the forecast of its memory use.

    The decision's value is None if no settings fit.
    """
    candidates = list(rules)
    decision, peaks = choose_memory(measure, images, capacity_bytes, candidates)
    rule = decision.value
    footprint = measure((rule or candidates[0]).savings, images, (rule or candidates[0]).images_per_call)
    residence = (rule or candidates[0]).residence
    recorded = predict(footprint, residence, recorded=True)
    forecast = Forecast(
        fits=rule is not None,
        capacity_bytes=capacity_bytes,
        peak_bytes=max(peaks.values()),
        recorded_peak_bytes=max(recorded.values()),
        phases=tuple(peaks.items()),
        components=tuple((model.name, model.weights_bytes) for model in footprint.models),
        images=images,
        size=footprint.size,
    )
    return decision, forecast
