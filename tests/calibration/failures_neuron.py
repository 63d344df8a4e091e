"""What failed on AWS Neuron, in models and their memory."""

from __future__ import annotations

from tests.calibration import snippets
from tests.calibration.case import Case

_DIFFUSERS = "https://github.com/huggingface/diffusers/"
_NEURON = _DIFFUSERS + "pull/13289"
_NEURON_ERRORS = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/compiler/error-codes/"
_EMBEDDINGS = "diffusers/models/embeddings.py"

CASES = (
    Case(
        name="neuron-rotary",
        device="neuron",
        effect="error",
        thread=_NEURON,
        says="Rotary embeddings in float64 had to be cast for Neuron.",
        run=snippets.turn_by_float64,
        site=_EMBEDDINGS,
        limit="float64",
    ),
    Case(
        name="neuron-float-timestep",
        device="neuron",
        effect="error",
        thread=_NEURON,
        says="The UNet made a float64 tensor of a float timestep before the change.",
        run=snippets.hand_float_timestep_to_unet,
        limit="float64",
    ),
    Case(
        name="neuron-int64-timestep",
        device="neuron",
        effect="narrowed",
        thread=_NEURON,
        says="int64 is asked for as int32 there, since the device does not compute in it.",
        run=snippets.hand_int64_timestep_to_unet,
        limit="int64",
    ),
    Case(
        name="neuron-draw-on-device",
        device="neuron",
        effect="error",
        thread=_NEURON,
        says="Neuron does not support creating random tensors directly on the device.",
        run=snippets.draw_latents_there,
        limit="random_numbers",
    ),
    Case(
        name="neuron-generator",
        device="neuron",
        effect="error",
        thread=_NEURON,
        says="There is no generator for the device; the host's is used.",
        run=snippets.seed_a_generator_there,
        limit="random_numbers",
    ),
    Case(
        name="neuron-mask",
        device="neuron",
        effect="error",
        thread=_NEURON_ERRORS + "EMOD025.html",
        says="Dynamic shape is not supported (NCC_EMOD025).",
        run=snippets.pick_by_a_mask,
        limit="data_dependent_shapes",
    ),
    Case(
        name="neuron-complex-rotary",
        device="neuron",
        effect="error",
        thread=_NEURON_ERRORS + "index.html",
        says="Complex data types are not supported (NCC_EVRF004).",
        run=snippets.turn_in_complex64,
        limit="complex64",
    ),
    Case(
        name="neuron-repeat-by-tensor",
        device="neuron",
        effect="error",
        thread=_DIFFUSERS + "blob/v0.42.1/src/diffusers/models/transformers/transformer_qwenimage21.py",
        says="Neuron cannot lower a tensor-repeats repeat_interleave.",
        run=snippets.repeat_by_a_tensor,
        limit="repeat_interleave",
    ),
    Case(
        name="neuron-fp8-weights",
        device="neuron",
        effect="error",
        thread=_NEURON_ERRORS + "index.html",
        says="Data type F8E4M3FN is not supported on Trn1 and Trn2 (NCC_EVRF051).",
        run=snippets.load_weights_in_fp8,
        product="trn2",
        limit="float8_e4m3fn",
    ),
    Case(
        name="neuron-sdxl-out-of-memory",
        device="neuron",
        effect="error",
        thread="https://github.com/huggingface/optimum-neuron/pull/668",
        says="SDXL does not fit: Failed to alloc DEVICE memory.",
        run=snippets.load_sdxl,
        product="64KiB",
        strict_error="OutOfMemoryError",
    ),
    Case(
        name="neuron-second-size",
        device="neuron",
        effect="slow",
        thread="https://github.com/huggingface/optimum-neuron/issues/653",
        says="Another width and height is another compilation.",
        run=snippets.decode_two_sizes,
        limit="new_shapes",
    ),
)
