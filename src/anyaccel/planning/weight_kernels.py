"""Whether a device has kernels for the quantized weights of a model, or dequantizes them for each call."""

from __future__ import annotations

from anyaccel.backends.claim import Yes
from anyaccel.backends.sheet import Sheet
from anyaccel.planning.decision import Decision
from anyaccel.planning.facts import PipelineFacts

__all__ = ["choose_dequantized", "has_kernels"]

# The package of each library, and the start of its names on sheets (`Sheet.quantized_weights`).
_NAMES = {"bitsandbytes": "bitsandbytes", "torchao": "torchao", "optimum": "quanto", "diffusers": "gguf"}
# The dtypes of formats that a device with this dtype reads without a table.
_FLOAT8 = {"fp8-e4m3": "float8_e4m3fn", "fp8-e5m2": "float8_e5m2"}


def has_kernels(sheet: Sheet, library: str, *, virtual: bool) -> bool:
    """Return whether the quantized layers of a library, or float8 weights, run on the device as they are.

    The other formats of layers that were replaced already do not.
    """
    if library in _FLOAT8:
        return sheet.is_host or isinstance(sheet.dtype(_FLOAT8[library]), Yes)
    if library not in _NAMES:
        return isinstance(sheet.dtype(library), Yes)
    # Virtual devices run plain operations of torch only.
    is_listed = any(entry.name.startswith(_NAMES[library]) for entry in sheet.quantized_weights)
    return sheet.is_host or (is_listed and not virtual)


def choose_dequantized(sheet: Sheet, facts: PipelineFacts, *, virtual: bool) -> Decision[tuple[tuple[str, str], ...]]:
    """Return the components, each with the format of quantized weights that are dequantized for each call."""
    used = [(component.name, library) for component in facts.components for library in component.weight_libraries]
    if not used:
        return Decision((), "no model has quantized weights")
    chosen = tuple((name, library) for name, library in used if not has_kernels(sheet, library, virtual=virtual))
    if not chosen:
        return Decision((), "the device has kernels for the quantized weights")
    reason = "virtual devices have" if virtual else f"{sheet.title} has"
    return Decision(
        chosen,
        f"{reason} no kernels for these weights: they stay quantized on the device, and each layer dequantizes its "
        "weight in every call, which takes time and memory for one weight",
    )
