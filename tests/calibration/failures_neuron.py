"""Failures on AWS Neuron, in models and memory."""

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
        run=snippets.rotate_in_float64,
        site=_EMBEDDINGS,
        limit="float64",
    ),
    Case(
        name="neuron-float-timestep",
        device="neuron",
        effect="error",
        thread=_NEURON,
        says="Before the change, the UNet created a float64 tensor from a float timestep.",
        run=snippets.pass_float_timestep_to_unet,
        limit="float64",
    ),
    Case(
        name="neuron-int64-timestep",
        device="neuron",
        effect="narrowed",
        thread=_NEURON,
        says="int64 is replaced by int32, because the device does not compute in int64.",
        run=snippets.pass_int64_timestep_to_unet,
        limit="int64",
    ),
    Case(
        name="neuron-draw-on-device",
        device="neuron",
        effect="error",
        thread=_NEURON,
        says="Neuron does not support creating random tensors directly on the device.",
        run=snippets.draw_on_device,
        limit="random_numbers",
    ),
    Case(
        name="neuron-generator",
        device="neuron",
        effect="error",
        thread=_NEURON,
        says="The device has no generator; the CPU's is used.",
        run=snippets.create_generator_on_device,
        limit="random_numbers",
    ),
    Case(
        name="neuron-mask",
        device="neuron",
        effect="error",
        thread=_NEURON_ERRORS + "EMOD025.html",
        says="Dynamic shape is not supported (NCC_EMOD025).",
        run=snippets.index_by_mask,
        limit="data_dependent_shapes",
    ),
    Case(
        name="neuron-complex-rotary",
        device="neuron",
        effect="error",
        thread=_NEURON_ERRORS + "index.html",
        says="Complex data types are not supported (NCC_EVRF004).",
        run=snippets.rotate_in_complex64,
        limit="complex64",
    ),
    Case(
        name="neuron-repeat-by-tensor",
        device="neuron",
        effect="error",
        thread=_DIFFUSERS + "blob/v0.42.1/src/diffusers/models/transformers/transformer_qwenimage21.py",
        says="Neuron cannot lower a tensor-repeats repeat_interleave.",
        run=snippets.repeat_by_tensor,
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
        says="Every new width and height requires a compilation.",
        run=snippets.decode_two_sizes,
        limit="new_shapes",
    ),
)
