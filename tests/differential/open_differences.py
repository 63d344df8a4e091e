"""Known differences from stock diffusers that are not fixed yet. Remove an entry with its fix."""

from __future__ import annotations

__all__ = ["OPEN"]

_SPLIT = dict.fromkeys(
    (
        "two_images_amused", "two_images_flux_image_to_image", "two_images_stable_diffusion_image_to_image",
        "two_images_stable_diffusion_inpaint", "two_images_stable_diffusion_xl_image_to_image",
    ),
    "a batch that is split into calls with one image each gets other noise",
) | {"latents_of_wrong_shape": "latents of the wrong shape are repeated when a batch is split"}  # fmt: skip

_TRAINING = dict.fromkeys(
    (
        "training_step_between_calls", "training_step_before_the_first_call", "training_after_inference_mode",
        "lora_trained", "callback_computes_a_gradient",
    ),
    "gradients through a whole model are wrong or fail on a virtual device",
)  # fmt: skip

OPEN: dict[str, dict[str, str]] = {
    "split": _SPLIT,
    "mps": {
        **_SPLIT,
        **_TRAINING,
        "compiled_by_the_user": "Dynamo compiles the function mode of the workarounds and confuses its functions",
    },
    "neuron": _TRAINING,
}
"""For each variant, usages with the reason of the difference."""
