"""What is put right at torch's own function seam, and whether that reaches into the models."""

from __future__ import annotations

from anyaccel.backends.claim import OperationLimit
from anyaccel.backends.quirks import HOST_NUMBER_OFFSET_IGNORED, UNINITIALISED_MEMORY_IS_NAN
from anyaccel.backends.sheet import Sheet
from anyaccel.planning.attention import AttentionRule
from anyaccel.planning.decision import Decision

__all__ = ["choose_workarounds"]


def choose_workarounds(
    sheet: Sheet, replacements: tuple[tuple[str, str], ...], attention: AttentionRule
) -> Decision[tuple[str, ...]]:
    """The repairs that the models themselves need, by name; the glue around them is always looked after.

    `dtypes` a type that the device lacks, `pairs` complex numbers as two real ones, `noise` random numbers of the
    host, `shapes` masks read on the host, `attention` slices, `numbers` a host's number laid out apart, `zeros`
    memory that is written before it is read, `addends` an argument that a factor of 0 silences.
    """
    needs = {
        "dtypes": any(instead != "pairs" for _, instead in replacements),
        "complex_pairs": any(instead == "pairs" for _, instead in replacements),
        "noise": not sheet.rng_on_device,
        "dynamic_shapes": sheet.static_shapes,
        "attention": attention != AttentionRule(),
        "clone_scalars": sheet.has_quirk(HOST_NUMBER_OFFSET_IGNORED),
        "zero_empty": sheet.has_quirk(UNINITIALISED_MEMORY_IS_NAN),
        "ignore_beta_zero": any(limit.reads_ignored_input for limit in sheet.limits(OperationLimit).values()),
    }
    chosen = tuple(name for name, needed in needs.items() if needed)
    if not chosen:
        return Decision((), "the device has no limit that reaches into the models")
    return Decision(chosen, "limits of the device that are met inside the models; see the other decisions")
