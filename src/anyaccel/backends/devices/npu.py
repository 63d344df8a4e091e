"""Huawei Ascend through `torch_npu`."""

from __future__ import annotations

from anyaccel.backends.citations import ACCELERATE_SOURCE, DIFFUSERS, DIFFUSERS_TORCH_UTILS, GB
from anyaccel.backends.claim import DtypeLimit, Limit, OperationLimit, Quirk, RoundTrip, Unknown, Yes
from anyaccel.backends.registry import Backend
from anyaccel.backends.requirement import ModuleFound, SystemIs
from anyaccel.backends.sheet import Compiler, Distributed, DtypeOrder, Dtypes, MemoryTerms, Product, Sheet, Variable

_ASCEND = "https://www.hiascend.com/document/detail/zh/"
_DIFFUSERS_FLOAT64 = DIFFUSERS + "10428"
_KERNEL_TYPES = "https://github.com/flagos-ai/FlagGems/issues/3267"
_JIT = _ASCEND + "Pytorch/700/apiref/apilist/ptaoplist_000610.html"
_FIRST_RUN = "https://github.com/Comfy-Org/ComfyUI/pull/10050"
_SGLANG = "https://docs.sglang.io/docs/hardware-platforms/ascend-npus/ascend_npu_reference"
_TORCH_NPU = "https://gitcode.com/Ascend/pytorch"
_A5_FP8 = "https://github.com/tile-ai/tilelang-ascend/pull/1177"


def _ascend(
    name: str, title: str, memory_bytes: int | None, per_server: int | None, source: str, reported_as: str = ""
) -> Product:
    return Product(
        name=name,
        title=title,
        memory_bytes=memory_bytes,
        per_server=per_server,
        software="torch with torch_npu and CANN",
        reported_as=reported_as,
        says="Counted as torch counts devices: the 910C has two dies a card.",
        source=source,
        evidence="documented",
    )


SHEET = Sheet(
    name="npu",
    title="Ascend NPU",
    vendor="Huawei",
    documentation=_TORCH_NPU,
    preference=83,
    dtypes=Dtypes(
        float64=DtypeLimit(
            says="Refused by kernels: 'not implemented for DT_DOUBLE, should be in dtype support list'.",
            source=_DIFFUSERS_FLOAT64,
            evidence="hardware",
            effect="error",
            hint="use float32: anyaccel.adjust_dtype tells",
            becomes="float32",
        ),
        int64=DtypeLimit(
            says="diffusers asks for int32 there.",
            source=DIFFUSERS_TORCH_UTILS,
            evidence="documented",
            effect="narrowed",
            hint="use int32 for ids and timesteps",
            becomes="int32",
            contradicted_by=_DIFFUSERS_FLOAT64,  # the list of types in its error has DT_INT64
        ),
        float32=Yes(says="In the kernels' lists of types.", source=_KERNEL_TYPES, evidence="hardware"),
        float16=DtypeLimit(
            says="On series before A2 an overflow saturates: inf becomes 65504 and NaN 0, and it cannot be turned off.",
            source="https://hiascend.com/document/detail/zh/Pytorch/600/apiref/Envvariables/Envir_004.html",
            evidence="documented",
            effect="wrong",
            hint="use bfloat16 where the product has it",
            only_on=("310p",),
        ),
        bfloat16=DtypeLimit(
            says="The 310P has float16 alone.",
            source="https://docs.vllm.ai/projects/ascend/en/v0.11.0/tutorials/single_node_300i.html",
            evidence="documented",
            effect="error",
            hint="use float16",
            becomes="float16",
            only_on=("310p",),
        ),
        complex64=Yes(
            says="Rotary embeddings in complex64 run; for indexing see the operations.",
            source="https://github.com/modelscope/DiffSynth-Studio/pull/1191",
            evidence="hardware",
        ),
        complex128=DtypeLimit(
            says="Runs on the slow AI CPU; gathering refuses it, see the operations.",
            source="https://github.com/modelscope/DiffSynth-Studio/pull/1191",
            evidence="hardware",
            effect="slow",
            hint="use complex64, or rotary embeddings in real numbers",
            becomes="complex64",
        ),
        float8_e4m3fn=DtypeLimit(
            says="Float8_e4m3fn has not been supported (ERR01007); A2 and A3 have no fp8 products, A5 has.",
            source="https://github.com/xLLM-AI/xllm/issues/1427",
            evidence="hardware",
            effect="error",
            hint="run in bfloat16",
        ),
        float8_e5m2=DtypeLimit(
            says="A2 and A3 have no fp8 products, A5 has.",
            source=_A5_FP8,
            evidence="documented",
            effect="error",
            hint="run in bfloat16",
        ),
    ),
    default_dtypes=DtypeOrder(
        says="bfloat16 is in the kernels' lists of types; HunyuanDiT came out black in float16.",
        source="https://github.com/Tencent-Hunyuan/HunyuanDiT/issues/226",
        evidence="hardware",
        order=("bfloat16", "float16", "float32"),
    ),
    random_numbers=Yes(
        says="Normal numbers are drawn by a kernel of the device's.", source=_KERNEL_TYPES, evidence="hardware"
    ),
    data_dependent_shapes=Limit(
        says="With jit_compile on, the default before A2, every new shape compiles operators.",
        source=_JIT,
        evidence="documented",
        effect="slow",
        hint="torch_npu.npu.set_compile_mode(jit_compile=False)",
        only_on=("310p",),
    ),
    new_shapes=Limit(
        says="The first Stable Diffusion picture took 600 s with jit_compile on and 40 s with it off.",
        source=_FIRST_RUN,
        evidence="hardware",
        effect="slow",
        hint="torch_npu.npu.set_compile_mode(jit_compile=False)",
        only_on=("310p",),
    ),
    host_round_trip=RoundTrip(
        says="The queue drains; copies with a change of type waited even when told not to. No figure was found.",
        source="https://gitcode.com/Ascend/pytorch/pull/39577",
        evidence="documented",
        effect="slow",
        hint="keep the scheduler's timesteps on the host and call set_begin_index",
        cost_us=None,
    ),
    batches=Unknown(says="Nothing was found for or against batches on NPU."),
    training=Yes(says="diffusers trains on it.", source=DIFFUSERS_TORCH_UTILS, evidence="documented"),
    fused_attention=Yes(
        says="Fused from the 910B on, without a mask or with a boolean one; otherwise all scores are held.",
        source="https://gitcode.com/Ascend/op-plugin/blob/master/op_plugin/ops/opapi/"
        "ScaledDotProductAttentionKernelNpuOpApi.cpp",
        evidence="documented",
    ),
    memory=MemoryTerms(
        says="60.97 GiB can be had on a 910B, which is a little more than the 64 GB on the label.",
        source="https://github.com/vllm-project/vllm-ascend/issues/1127",
        evidence="hardware",
    ),
    largest_tensor=(Unknown(says="No limit on the size of a tensor was found."),),
    operations=(
        OperationLimit(
            name="index_complex64",
            says="Indexing refuses complex64 (aclnnIndex, 910B3, torch_npu 2.10).",
            source="https://github.com/vllm-project/vllm-omni/issues/4911",
            evidence="hardware",
            effect="error",
            hint="index the real and the imaginary part",
            operations=("index",),
            dtypes=("complex64", "complex128"),
        ),
        OperationLimit(
            name="gather_complex128",
            says="Gathering refuses complex128 (aclnnGather).",
            source="https://github.com/vllm-project/vllm-omni/pull/6571",
            evidence="hardware",
            effect="error",
            hint="use complex64, or rotary embeddings in real numbers",
            operations=("gather", "index_select"),
            dtypes=("complex128",),
        ),
    ),
    quirks=(
        Quirk(
            name="float32_convolutions_in_hf32",
            information_only=True,
            says="Convolutions run in HF32, a shorter float32, unless allow_hf32 is off.",
            source=_ASCEND + "Pytorch/700/apiref/apilist/ptaoplist_000238.html",
            evidence="documented",
            effect="narrowed",
            hint="set torch_npu.npu.conv.allow_hf32 = False where the last digits matter",
        ),
        Quirk(
            name="visible_devices_with_spaces",
            information_only=True,
            says="A space in ASCEND_RT_VISIBLE_DEVICES ('1, 2,3') silently drops what follows.",
            source=_ASCEND + "canncommercial/900/maintenref/envvar/envref_07_0028.html",
            evidence="documented",
            effect="wrong",
            hint="write no spaces: 1,2,3",
        ),
    ),
    compiler=Compiler(
        says="TorchAir's backend object, or Inductor from torch_npu 2.7.1-26.0.0 on.",
        source=_TORCH_NPU + "/blob/v2.7.1-26.0.0/docs/zh/environment_variable_reference/TORCHINDUCTOR_NPU_BACKEND.md",
        evidence="documented",
        backend="inductor",
        dynamic=False,
        fullgraph=False,
        cache_variable="ACL_OP_COMPILER_CACHE_DIR",
        cache_default="$HOME/atc_data",
    ),
    distributed=Distributed(
        says="hccl is accelerate's choice for it.",
        source=ACCELERATE_SOURCE + "state.py",
        evidence="documented",
        backend="hccl",
    ),
    modules=("torch_npu",),
    variables=(
        Variable(
            name="ACL_OP_COMPILER_CACHE_DIR",
            value="",
            when="by_user",
            says="Where compiled operators are kept in eager mode.",
            source="https://hiascend.com/document/detail/zh/Pytorch/600/apiref/Envvariables/Envir_026.html",
            evidence="documented",
        ),
    ),
    visible_devices="ASCEND_RT_VISIBLE_DEVICES",
    ray_resource="NPU",
    requirements=(
        SystemIs(
            systems=("Linux",),
            hint="use a Linux server with Ascend cards",
            says="Wheels exist for Linux on x86_64 and aarch64.",
            source=_TORCH_NPU,
            evidence="documented",
        ),
        ModuleFound(
            module="torch_npu",
            hint="install CANN, source its set_env.sh, then pip install torch-npu of torch's own version",
            says="torch learns of the NPU from torch_npu.",
            source=_TORCH_NPU,
            evidence="documented",
        ),
    ),
    device_files=("/dev/davinci[0-9]*",),
    aliases=("ascend",),
    product_pattern=r"(ascend-?)?\d{3}[a-z]?",
    products=(
        _ascend("910c", "Ascend 910C (a die, Atlas 800I A3)", 64 * GB, 16, _SGLANG),
        _ascend("910b", "Ascend 910B (Atlas 800I A2)", 64 * GB, 8, _SGLANG),
        _ascend("910b-32gb", "Ascend 910B 32 GB", 32 * GB, None, "https://github.com/linkedin/Liger-Kernel/pull/1035"),
        _ascend(
            "310p",
            "Ascend 310P (Atlas 300I Duo)",
            None,
            8,
            "https://www.hiascend.com/document/detail/en/mindcluster/730/clustersched/schedulingug/dl_affinity_0009.html",
            "310P",
        ),
    ),
)

BACKEND = Backend(sheet=SHEET)
