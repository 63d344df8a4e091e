"""Whether a pipeline fits into a device's memory, and the cheapest way in which it does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from anyaccel.planning.decision import Decision
from anyaccel.planning.footprint import PHASES, Footprint, Measure, MemorySavings
from anyaccel.planning.limit_hits import LimitHit
from anyaccel.planning.options import PlacementOptions
from anyaccel.units import readable

__all__ = [
    "PLAIN",
    "Forecast",
    "MemoryRule",
    "QuantizationOption",
    "Residence",
    "choose_memory",
    "choose_residence",
    "find_largest_batch",
    "list_residences",
    "list_rules",
    "make_forecast",
    "predict",
]

Residence: TypeAlias = Literal["resident", "phase", "component", "layer"]
"""Which weights are on the device: all; those of the phase that runs, read from disk when its turn comes; the model's
that runs; the layer's that runs."""

_IN_WORDS = {
    "resident": "everything resident",
    "phase": "one phase at a time, read from disk",
    "component": "one model at a time",
    "layer": "one layer at a time",
}
PLAIN = MemorySavings()
_SAMPLE = 4
"""Beyond this many images a batch is taken to grow in proportion."""
_MOST_IMAGES = 4096
_FAR = 8
"""A call that would need so many times the memory is looked at in a shorter way first."""


@dataclass(frozen=True)
class MemoryRule:
    """One way to run a call in the memory that there is."""

    residence: Residence = "resident"
    savings: MemorySavings = PLAIN
    images_per_call: int | None = None
    """How many images of a batch run at once; None for all."""

    def __str__(self) -> str:
        parts = [_IN_WORDS[self.residence]]
        parts += ["VAE in parts"] if self.savings.vae_in_parts else []
        parts += ["attention one head at a time"] if self.savings.sliced_attention else []
        if self.images_per_call is not None:
            parts.append(f"{self.images_per_call} image{'s' if self.images_per_call > 1 else ''} a call")
        return ", ".join(parts)


@dataclass(frozen=True)
class QuantizationOption:
    """Something that would save memory and changes the picture, and so is left to the user."""

    name: str
    component: str
    saves_bytes: int
    says: str


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What one call will hold on a device."""

    fits: bool
    capacity_bytes: int
    peak_bytes: int
    recorded_peak_bytes: int
    """The peak once what denoising asks of the device was recorded, which is done only where this fits too."""
    phases: tuple[tuple[str, int], ...]
    """The peak of each phase: `load`, `encode`, `denoise`, `decode`."""
    components: tuple[tuple[str, int], ...]
    """The bytes of each model's weights."""
    images: int
    size: tuple[int, int] | None
    largest_batch: int | None = None
    """The most images that one call can make in this way; 0 where not even one fits; None where nobody asked."""
    largest_size: tuple[int, int] | None = None
    """The largest single picture of the same shape that fits in any way, where somebody asked."""

    limits: tuple[LimitHit, ...] = ()
    """The limits of the device that the model meets at this size."""
    offers: tuple[QuantizationOption, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The forecast as JSON would have it."""
        return {
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "recorded_peak_bytes": self.recorded_peak_bytes,
            "capacity_bytes": self.capacity_bytes,
            "phases": dict(self.phases),
            "components": dict(self.components),
            "images": self.images,
            "size": list(self.size) if self.size else None,
            "largest_batch": self.largest_batch,
            "largest_size": list(self.largest_size) if self.largest_size else None,
            "limits": [asdict(limit) for limit in self.limits],
            "offers": [asdict(offer) for offer in self.offers],
            "notes": list(self.notes),
        }


def list_residences(*, unified_memory: bool, can_offload: bool = True) -> tuple[Residence, ...]:
    """Where weights can be, the fastest first; moving to the host frees nothing where it shares the memory."""
    if unified_memory:
        return ("resident", "phase", "layer")
    return ("resident", "component", "layer") if can_offload else ("resident", "layer")


def list_rules(
    images: int,
    placement_options: PlacementOptions,
    residences: tuple[Residence, ...],
    *,
    has_parts: bool = True,
) -> Iterator[MemoryRule]:
    """Every way to run a call, the cheapest in time first; what the user pinned is in all of them.

    A batch is split before layers are moved one by one: that costs a little of a batch's speed, and layers that come
    and go at every step cost most of it.
    """
    options = _list_savings(placement_options, has_parts)
    if placement_options.memory is not None:
        residences = (_as_residence(placement_options.memory),)
    whole: list[Residence] = [residence for residence in residences if residence != "layer"] or ["layer"]
    for residence in whole:
        for savings in options:
            yield MemoryRule(residence, savings, placement_options.images_per_call)
    if placement_options.images_per_call is None:
        for fewer in _halve(images):
            for savings in options:
                yield MemoryRule(whole[-1], savings, fewer)
    if whole[-1] != "layer" and "layer" in residences:
        once = 1 if images > 1 else None
        for savings in options:
            yield MemoryRule("layer", savings, placement_options.images_per_call or once)


def _as_residence(name: str) -> Residence:
    return next(residence for residence in get_args(Residence) if residence == name)


def _list_savings(placement_options: PlacementOptions, has_parts: bool = True) -> list[MemorySavings]:
    vae = [False, True] if placement_options.vae_tiling is None else [placement_options.vae_tiling]
    vae = vae if has_parts else [False]
    if placement_options.attention_slicing is not None:  # it is sliced as was asked for, whatever the way
        return [MemorySavings(parts) for parts in vae]
    return [*(MemorySavings(parts) for parts in vae), MemorySavings(vae[-1], sliced_attention=True)]


def _halve(images: int) -> Iterator[int]:
    while images > 1:
        images = (images + 1) // 2
        yield images


def predict(footprint: Footprint, residence: Residence, *, recorded: bool = False) -> dict[str, int]:
    """The bytes at the peak of each phase: `load`, and those in which models run.

    Once denoising is `recorded`, what it holds at its peak is held in all phases, for the next image.
    """
    kept = footprint.always_there + (footprint.never_streamed if residence == "layer" else ())
    loaded = footprint.weights_bytes if residence == "resident" else _weights(footprint, kept)
    peaks = {"load": loaded}
    there: set[str] = set(footprint.always_there)
    for passing in footprint.passings:
        if residence == "component":
            there = _make_room(footprint, there, passing.component)
            weights = _weights(footprint, tuple(there))
        elif residence == "layer":
            weights = loaded + (0 if passing.component in kept else footprint.model(passing.component).layer_bytes)
        elif residence == "phase":
            together = {other.component for other in footprint.passings if other.phase == passing.phase}
            weights = _weights(footprint, tuple(together))
        else:
            weights = loaded
        need = weights + passing.held_bytes + footprint.fixed_bytes
        peaks[passing.phase] = max(peaks.get(passing.phase, 0), need)
    if recorded:
        held = max((one.held_bytes for one in footprint.passings if one.phase == "denoise"), default=0)
        peaks = {name: peak if name == "denoise" else peak + held for name, peak in peaks.items()}
    return {name: peaks[name] for name in ("load", *PHASES) if name in peaks}


def _make_room(footprint: Footprint, there: set[str], component: str) -> set[str]:
    """What lies on the device when a model runs: the one before it in the order has left, any other has not."""
    if component in footprint.always_there:
        return there
    names = {model.name for model in footprint.models}
    order = [name for name in footprint.offload_order if name in names]
    place = order.index(component) if component in order else 0
    before = {order[place - 1]} if place else set()
    return (there - before) | {component}


def _weights(footprint: Footprint, names: tuple[str, ...]) -> int:
    return sum(model.weights_bytes for model in footprint.models if model.name in names)


def choose_memory(
    measure: Measure, images: int, capacity_bytes: int, rules: Iterable[MemoryRule]
) -> tuple[Decision[MemoryRule | None], dict[str, int]]:
    """The first rule that fits, or None where none does; and the peaks of that rule, or of the smallest."""
    listed = list(rules)
    tried: list[tuple[int, MemoryRule, dict[str, int]]] = []
    for rule in listed:
        if tried and tried[0][0] > _FAR * capacity_bytes and len(tried) == 1:
            hopeless = _find_hopeless(measure, images, capacity_bytes, listed[-1])
            if hopeless is not None:
                return hopeless
        peaks = predict(measure(rule.savings, min(rule.images_per_call or images, images)), rule.residence)
        need = max(peaks.values())
        if need <= capacity_bytes:
            first = f"{tried[0][1]} would need {readable(tried[0][0])}; " if tried else ""
            return Decision(rule, f"{first}this needs {readable(need)} of {readable(capacity_bytes)}"), peaks
        tried.append((need, rule, peaks))
    need, rule, peaks = min(tried, key=lambda one: one[0])
    return Decision(None, f"the least is {readable(need)} ({rule}), and there are {readable(capacity_bytes)}"), peaks


def _find_hopeless(
    measure: Measure, images: int, capacity_bytes: int, least: MemoryRule
) -> tuple[Decision[MemoryRule | None], dict[str, int]] | None:
    """The answer where denoising does not fit even by the least rule: the autoencoder's tiles are no matter then.

    A picture that is far too large has thousands of them, and none need be looked at.
    """
    savings = replace(least.savings, vae_in_parts=False)
    peaks = predict(measure(savings, min(least.images_per_call or images, images)), least.residence)
    need = peaks.get("denoise", 0)
    if need <= capacity_bytes:
        return None
    reason = f"the least for denoising is {readable(need)} ({least}), and there are {readable(capacity_bytes)}"
    return Decision(None, reason), {name: peak for name, peak in peaks.items() if name != "decode"}


def choose_residence(
    weights: Mapping[str, int], capacity_bytes: int, residences: tuple[Residence, ...]
) -> Decision[MemoryRule]:
    """Where the weights go before a size is known: all on the device if they leave a fifth of it free."""
    room = capacity_bytes * 4 // 5
    need: dict[Residence, int] = {"resident": sum(weights.values()), "component": max(weights.values(), default=0)}
    said = f"weights {readable(need['resident'])} of {readable(capacity_bytes)}"
    for residence in residences[:-1]:
        if need.get(residence, 0) <= room:
            return Decision(MemoryRule(residence), f"{said}; each size is looked at when it is run")
    return Decision(MemoryRule(residences[-1]), f"{said}; each size is looked at when it is run")


def find_largest_batch(measure: Measure, rule: MemoryRule, capacity_bytes: int) -> int:
    """The most images that one call can make; beyond four a batch is taken to grow in proportion, which is safe."""

    def fit(images: int) -> bool:
        return max(predict(measure(rule.savings, images), rule.residence).values()) <= capacity_bytes

    few = _need_of_many(measure(rule.savings, 1), rule, _SAMPLE) > capacity_bytes  # or so it seems
    if (few or not fit(_SAMPLE)) and not all(fit(images) for images in range(1, _SAMPLE)):
        return next(images for images in range(_SAMPLE) if not fit(images + 1))
    sample = measure(rule.savings, _SAMPLE)
    fits = [images for images in _powers() if _need_of_many(sample, rule, images) <= capacity_bytes]
    if not fits:
        return _SAMPLE - 1
    low, high = fits[-1], min(fits[-1] * 2, _MOST_IMAGES)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _need_of_many(sample, rule, middle) <= capacity_bytes else (low, middle)
    return low


def _powers() -> Iterator[int]:
    images = _SAMPLE
    while images <= _MOST_IMAGES:
        yield images
        images *= 2


def _need_of_many(sample: Footprint, rule: MemoryRule, images: int) -> int:
    more = [replace(one, held_bytes=one.held_bytes * images // sample.images) for one in sample.passings]
    return max(predict(replace(sample, passings=tuple(more)), rule.residence).values())


def make_forecast(
    measure: Measure, images: int, capacity_bytes: int, rules: Iterable[MemoryRule]
) -> tuple[Decision[MemoryRule | None], Forecast]:
    """The decision about memory for one call, and all that is said of it."""
    listed = list(rules)
    decision, peaks = choose_memory(measure, images, capacity_bytes, listed)
    rule = decision.value
    footprint = measure((rule or listed[0]).savings, min(images, (rule or listed[0]).images_per_call or images))
    residence = (rule or listed[0]).residence
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
