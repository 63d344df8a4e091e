"""Known differences from stock diffusers that are not fixed yet. Remove an entry with its fix."""

from __future__ import annotations

__all__ = ["OPEN"]

_TRAINING = dict.fromkeys(
    (
        "training_step_between_calls", "training_step_before_the_first_call", "training_after_inference_mode",
        "lora_trained", "callback_computes_a_gradient",
    ),
    "gradients through a whole model are wrong or fail on a virtual device",
)  # fmt: skip

OPEN: dict[str, dict[str, str]] = {
    "mps": _TRAINING,
    "neuron": _TRAINING,
}
"""For each variant, usages with the reason of the difference."""
