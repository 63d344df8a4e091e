"""Choice of dtypes for a pipeline and its components, and replacements for unsupported dtypes."""

from __future__ import annotations

from anyaccel.backends.claim import DtypeLimit, Limit, OperationLimit
from anyaccel.backends.sheet import Sheet
from anyaccel.planning.decision import Decision, cite
from anyaccel.planning.facts import PipelineFacts
from anyaccel.planning.options import FLOATING_BYTES, PlacementOptions

__all__ = ["HALF_PRECISIONS", "choose_component_dtypes", "choose_dtype", "choose_replacements", "find_smaller_dtype"]

HALF_PRECISIONS = ("float16", "bfloat16")
# Dtypes that pipelines create internally and that some devices lack.
_MAY_BE_MISSING = ("float64", "int64", "complex128", "complex64")


def choose_dtype(sheet: Sheet, facts: PipelineFacts, options: PlacementOptions) -> Decision[str]:
    """Return the dtype for the weights.

    A requested dtype comes first, then the dtype in which the denoiser was loaded if the components have
    different dtypes, then the half-precision dtype or float64 of the weights, then the best dtype
    for the device according to its sheet.
    """
    if options.dtype is not None:
        return _with_replacement(sheet, options.dtype, f"{options.dtype} was requested")
    if _keeps_dtypes(sheet, facts, options):
        return _with_replacement(sheet, facts.main_dtype, f"the weights are loaded in {facts.main_dtype}")
    # The user chose another dtype than float32, which is only the default of from_pretrained.
    loaded_dtypes = facts.denoiser_dtypes & {*HALF_PRECISIONS, "float64"}
    if len(loaded_dtypes) == 1:
        loaded = next(iter(loaded_dtypes))
        return _with_replacement(sheet, loaded, f"the weights are loaded in {loaded}")
    for name in sheet.default_dtypes.order:
        if not _is_rejected(sheet, name):
            return Decision(name, cite(sheet.default_dtypes))
    return Decision("float32", "no smaller dtype is known to work on this device")


def find_smaller_dtype(sheet: Sheet, chosen: str, options: PlacementOptions) -> str | None:
    """Return the dtype to fall back to if the pipeline does not fit in memory, or None.

    The user allows a fallback with the `smallest_dtype` option. It must be smaller than the chosen
    dtype and supported by the device.
    """
    allowed = options.smallest_dtype
    if allowed is None or _is_rejected(sheet, allowed) or FLOATING_BYTES[allowed] >= FLOATING_BYTES.get(chosen, 2):
        return None
    return allowed


def _is_rejected(sheet: Sheet, name: str) -> bool:
    answer = sheet.dtype(name)
    return isinstance(answer, Limit) and not answer.conditional and answer.effect in ("error", "wrong")


def _with_replacement(sheet: Sheet, name: str, reason: str) -> Decision[str]:
    """Return the named dtype, or the sheet's replacement if the device does not support it."""
    answer = sheet.dtype(name)
    replacement = sheet.adjusted_dtype(name)
    if replacement == name or not isinstance(answer, Limit):
        return Decision(name, reason)
    return Decision(replacement, f"{reason}, but the device does not support it: {answer.says.removesuffix('.')}")


def _fails(limit: OperationLimit) -> bool:
    return not limit.conditional and limit.effect in ("error", "wrong")


def _keeps_dtypes(sheet: Sheet, facts: PipelineFacts, options: PlacementOptions) -> bool:
    """Return whether the components keep the dtypes in which they were loaded."""
    return options.dtype is None and (_keeps_all_dtypes(sheet, options) or facts.has_mixed_dtypes)


def _keeps_all_dtypes(sheet: Sheet, options: PlacementOptions) -> bool:
    # Stock diffusers does not cast either, and a pipeline that is placed on the CPU must give the same result.
    return options.keep_dtypes or sheet.is_host


def choose_component_dtypes(
    sheet: Sheet, facts: PipelineFacts, chosen: str, options: PlacementOptions
) -> Decision[tuple[tuple[str, str], ...]]:
    """Return the components that keep a dtype other than the pipeline's, with their dtypes.

    Quantized weights are never cast. Components that the user loaded in different dtypes keep them, unless
    the user requests a dtype or the device does not support them.
    """
    quantized = {component.name: component.dtype for component in facts.components if component.quantized}
    kept = [
        component
        for component in facts.components
        if _keeps_dtypes(sheet, facts, options)
        and component.name not in quantized
        and (_keeps_all_dtypes(sheet, options) or component.dtype == "float32" or not component.has_own_dtype)
    ]
    dtypes = {component.name: sheet.adjusted_dtype(component.dtype) for component in kept}
    others = {name: dtype for name, dtype in dtypes.items() if dtype != chosen}
    reasons = ["quantized weights are moved, not cast"] * bool(quantized)
    reasons += ["the models were loaded in different dtypes"] * bool(others)
    reasons += [
        f"{component.name} was loaded in {component.dtype}, which the device does not support"
        for component in kept
        if dtypes[component.name] != component.dtype
    ]
    return Decision(tuple((others | quantized).items()), "; ".join(reasons) or "all models use the same dtype")


def choose_replacements(sheet: Sheet) -> Decision[tuple[tuple[str, str], ...]]:
    """Return the replacement for each dtype that the device lacks: `(("float64", "float32"), …)`.

    An unsupported complex dtype maps to `pairs`: a complex tensor is stored as two real tensors, one
    for the real part and one for the imaginary part.
    """
    replaced: list[tuple[str, str]] = []
    for name in _MAY_BE_MISSING:
        answer = sheet.dtype(name)
        if not isinstance(answer, DtypeLimit) or answer.conditional or answer.effect == "slow":
            continue
        if answer.becomes:
            replaced.append((name, answer.becomes))
        elif name.startswith("complex") and answer.effect != "narrowed":
            replaced.append((name, "pairs"))
    # Partial support, such as complex64 without indexing, still breaks rotary embeddings.
    partial = [
        limit for limit in sheet.limits(OperationLimit).values() if _fails(limit) and "complex64" in limit.dtypes
    ]
    if partial and ("complex64", "pairs") not in replaced:
        replaced.append(("complex64", "pairs"))
    if any(pair == ("complex64", "pairs") for pair in replaced):
        # complex128 must not become complex64 if that one is replaced too.
        replaced = [pair for pair in replaced if pair[0] != "complex128"] + [("complex128", "pairs")]
    reasons = [sheet.dtype(name).says for name, _ in replaced] + [limit.says for limit in partial]
    return Decision(
        tuple(replaced), " ".join(dict.fromkeys(reasons)) or "the device supports all dtypes that pipelines use"
    )
