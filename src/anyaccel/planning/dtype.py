"""Which number type a pipeline runs in, and what stands in for the types that a device lacks."""

from __future__ import annotations

from collections.abc import Mapping

from anyaccel.backends.claim import DtypeLimit, Limit, OperationLimit
from anyaccel.backends.sheet import Sheet
from anyaccel.planning.decision import Decision
from anyaccel.planning.facts import PipelineFacts
from anyaccel.planning.options import FLOATING_BYTES, PlacementOptions

__all__ = ["HALF_PRECISIONS", "choose_component_dtypes", "choose_dtype", "choose_replacements", "find_smaller_dtype"]

HALF_PRECISIONS = ("float16", "bfloat16")
WORTH_HALF = 0.8
"""Half precision is taken where it needs at most this share of float32's time."""
_MAY_BE_LACKING = ("float64", "int64", "complex128", "complex64")


def choose_dtype(
    sheet: Sheet,
    facts: PipelineFacts,
    options: PlacementOptions,
    half_precision_cost: Mapping[str, float] | None = None,
) -> Decision[str]:
    """The type of the weights: what the user asked for, what they have if it is a half precision, or the device's best.

    `half_precision_cost` is the time of a half precision as a share of float32's, where it was measured.
    """
    if options.dtype is not None:
        return _as_far_as_it_goes(sheet, options.dtype, f"{options.dtype} was asked for")
    chosen_before = facts.denoiser_dtypes & set(HALF_PRECISIONS)
    if len(chosen_before) == 1 and not half_precision_cost:
        loaded = next(iter(chosen_before))
        return _as_far_as_it_goes(sheet, loaded, f"the weights are loaded in {loaded}")
    if half_precision_cost:
        return _by_measure(half_precision_cost)
    for name in sheet.default_dtypes.order:
        if not _refuses(sheet, name):
            return Decision(name, f"{sheet.default_dtypes.says} ({sheet.default_dtypes.source})")
    return Decision("float32", "nothing smaller is known to work here")


def find_smaller_dtype(sheet: Sheet, chosen: str, options: PlacementOptions) -> str | None:
    """The type that the user allows where a pipeline does not fit in the chosen one; None where there is none."""
    allowed = options.smallest_dtype
    if allowed is None or _refuses(sheet, allowed) or FLOATING_BYTES[allowed] >= FLOATING_BYTES.get(chosen, 2):
        return None
    return allowed


def _by_measure(cost: Mapping[str, float]) -> Decision[str]:
    best = min(cost, key=lambda name: cost[name])
    figures = ", ".join(f"{name} takes {share:.2g} times float32's time" for name, share in sorted(cost.items()))
    if cost[best] <= WORTH_HALF:
        return Decision(best, f"measured on this host: {figures}")
    return Decision("float32", f"measured on this host: {figures}, so that it saves nothing")


def _refuses(sheet: Sheet, name: str) -> bool:
    answer = sheet.dtype(name)
    return isinstance(answer, Limit) and not answer.conditional and answer.effect in ("error", "wrong")


def _as_far_as_it_goes(sheet: Sheet, name: str, reason: str) -> Decision[str]:
    """The type itself, or what the sheet puts in its place."""
    answer = sheet.dtype(name)
    instead = sheet.adjusted_dtype(name)
    if instead == name or not isinstance(answer, Limit):
        return Decision(name, reason)
    return Decision(instead, f"{reason}, and the device lacks it: {answer.says}")


def _fails(limit: OperationLimit) -> bool:
    return not limit.conditional and limit.effect in ("error", "wrong")


def choose_component_dtypes(
    facts: PipelineFacts, chosen: str, asked: str | None
) -> Decision[tuple[tuple[str, str], ...]]:
    """The type of each model where it differs from the pipeline's: as it was loaded, where that was on purpose.

    Quantized weights are never cast; and a model that was loaded in float32 beside a denoiser in half precision stays.
    """
    quantized = {component.name: component.dtype for component in facts.components if component.quantized}
    wide = {
        component.name: component.dtype
        for component in facts.components
        if component.dtype == "float32" and asked is None and facts.denoiser_dtypes == {chosen} != {"float32"}
    }
    reasons = ["quantized weights are moved and not cast"] * bool(quantized)
    reasons += [f"loaded in float32 beside a denoiser in {chosen}"] * bool(wide)
    return Decision(tuple((wide | quantized).items()), "; ".join(reasons) or "all models run in one type")


def choose_replacements(sheet: Sheet) -> Decision[tuple[tuple[str, str], ...]]:
    """What stands in for the number types that the device lacks, wherever they arise: `(("float64", "float32"), …)`.

    A type with nothing to stand in for it, such as complex numbers, maps to `pairs` where it is refused: two real
    tensors, one for each part.
    """
    replaced: list[tuple[str, str]] = []
    for name in _MAY_BE_LACKING:
        answer = sheet.dtype(name)
        if not isinstance(answer, DtypeLimit) or answer.conditional or answer.effect == "slow":
            continue
        if answer.becomes:
            replaced.append((name, answer.becomes))
        elif name.startswith("complex") and answer.effect != "narrowed":
            replaced.append((name, "pairs"))
    patchy = [limit for limit in sheet.limits(OperationLimit).values() if _fails(limit) and "complex64" in limit.dtypes]
    if patchy and ("complex64", "pairs") not in replaced:
        replaced.append(("complex64", "pairs"))
    if any(pair == ("complex64", "pairs") for pair in replaced):
        replaced = [pair for pair in replaced if pair[0] != "complex128"] + [("complex128", "pairs")]
    reasons = [sheet.dtype(name).says for name, _ in replaced] + [limit.says for limit in patchy]
    return Decision(tuple(replaced), " ".join(dict.fromkeys(reasons)) or "the device takes them all")
