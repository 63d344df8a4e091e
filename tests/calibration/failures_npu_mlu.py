"""Failures on Ascend NPU and Cambricon MLU."""

from __future__ import annotations

from tests.calibration import snippets
from tests.calibration.case import Case

_DIFFUSERS = "https://github.com/huggingface/diffusers/"
_EMBEDDINGS = "diffusers/models/embeddings.py"
_TORCH_MLU = "https://github.com/Cambricon/torch_mlu/blob/"

CASES = (
    Case(
        name="npu-flux-rotary",
        device="npu",
        effect="error",
        thread=_DIFFUSERS + "issues/10428",
        says="FLUX: aclnnRepeatInterleaveIntWithDim failed, self not implemented for DT_DOUBLE.",
        run=snippets.rotate_in_float64,
        strict_error="RuntimeError",
        site=_EMBEDDINGS,
        limit="float64",
    ),
    Case(
        name="npu-ernie-rotary",
        device="npu",
        effect="error",
        thread=_DIFFUSERS + "pull/13432",
        says="The rotary embedding of ERNIE-Image in float64 breaks MPS and NPU.",
        run=snippets.rotate_in_float64_einsum,
        limit="float64",
    ),
    Case(
        name="npu-z-image",
        device="npu",
        effect="error",
        thread=_DIFFUSERS + "pull/13689",
        says="Z-Image fails: aclnnIndex lacks complex64, and freqs_cis is indexed on the device.",
        run=snippets.run_z_image,
        site="diffusers/models/transformers/transformer_z_image.py",
        limit="complex64",
    ),
    Case(
        name="npu-complex64-index",
        device="npu",
        effect="error",
        thread="https://github.com/vllm-project/vllm-omni/issues/4911",
        says="Indexing a complex64 tensor fails in aclnnIndex on a 910B3.",
        run=snippets.index_complex64_table,
        limit="complex64",
    ),
    Case(
        name="npu-complex128-gather",
        device="npu",
        effect="error",
        thread="https://github.com/vllm-project/vllm-omni/pull/6571",
        says="Boogu-Image: aclnnGather, Tensor self not implemented for DT_COMPLEX128.",
        run=snippets.gather_from_complex128_table,
        limit="complex128",
    ),
    Case(
        name="npu-wan-complex128",
        device="npu",
        effect="slow",
        thread="https://github.com/modelscope/DiffSynth-Studio/pull/1191",
        says="Wan's rotary embedding in complex128 runs slowly on the AI CPU; in complex64 it is fast.",
        run=snippets.rotate_wan_in_complex128,
        limit="complex128",
    ),
    Case(
        name="npu-fp8-weights",
        device="npu",
        effect="error",
        thread="https://github.com/Comfy-Org/ComfyUI/issues/14653",
        says="An fp8 text encoder is not supported by the 910B.",
        run=snippets.load_weights_in_fp8,
        product="910b",
        limit="float8_e4m3fn",
    ),
    Case(
        name="mlu-complex-rotary",
        device="mlu",
        effect="error",
        thread=_DIFFUSERS + "pull/13824",
        says="Z-Image needs real-valued rotary embeddings on Cambricon MLU, which has no complex arithmetic.",
        run=snippets.run_z_image,
        site="diffusers/models/transformers/transformer_z_image.py",
        limit="complex64",
    ),
    Case(
        name="mlu-int64-compare",
        device="mlu",
        effect="narrowed",
        thread=_TORCH_MLU + "0fc9aec1e21145c1fdf2c458e28798ee32a2c3fe/torch_mlu/csrc/aten/utils/types.cpp",
        says="Comparisons of int64 run in int32.",
        run=snippets.compare_int64,
        limit="int64",
    ),
    Case(
        name="mlu-bfloat16-on-mlu370",
        device="mlu",
        effect="error",
        thread=_TORCH_MLU + "0c488210aebc5f37bdaaeb6995dfe27d66ec36d3/torch_mlu/mlu/__init__.py",
        says="bfloat16 requires a generation 5 device.",
        run=snippets.load_weights_in_bfloat16,
        product="mlu370-x8",
        limit="bfloat16",
    ),
)
