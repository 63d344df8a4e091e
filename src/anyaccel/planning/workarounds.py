"""Choice of the workarounds that torch function modes apply inside a pipeline's models."""

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
    """Return the names of the workarounds that are required inside the models.

    Pipeline code outside the models always runs with all workarounds. Inside the models, each one
    costs time, so only the returned ones are applied:

    - `dtypes`: replace dtypes that the device does not support.
    - `complex_pairs`: store each complex tensor as two real tensors.
    - `noise`: draw random numbers on the CPU.
    - `dynamic_shapes`: evaluate boolean masks and functions such as `nonzero` on the CPU.
    - `attention`: slice attention calls, or make their inputs contiguous.
    - `clone_scalars`: clone CPU scalars that are views of a larger tensor.
    - `zero_empty`: initialize the result of `torch.empty` to zero.
    - `ignore_beta_zero`: ignore the input of `baddbmm` and similar operations if `beta` is 0.
    """
    needs = {
        "dtypes": any(replacement != "pairs" for _, replacement in replacements),
        "complex_pairs": any(replacement == "pairs" for _, replacement in replacements),
        "noise": not sheet.rng_on_device,
        "dynamic_shapes": sheet.static_shapes,
        "attention": attention != AttentionRule(),
        # https://github.com/pytorch/pytorch/issues/187117 (torch 2.12 and 2.13 on mps)
        "clone_scalars": sheet.has_quirk(HOST_NUMBER_OFFSET_IGNORED),
        # https://github.com/huggingface/diffusers/issues/14438 (mps), also for ignore_beta_zero
        "zero_empty": sheet.has_quirk(UNINITIALISED_MEMORY_IS_NAN),
        "ignore_beta_zero": any(limit.reads_ignored_input for limit in sheet.limits(OperationLimit).values()),
    }
    chosen = tuple(name for name, needed in needs.items() if needed)
    if not chosen:
        return Decision((), "no device limit requires a workaround inside the models")
    reason = "changes inside the models that work around device limits; see the other decisions for details"
    return Decision(chosen, reason)
