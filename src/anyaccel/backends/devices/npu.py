"""Backend for Huawei Ascend (`npu`), based on `torch_npu`."""

from __future__ import annotations

from anyaccel.backends.citations import ACCELERATE_SOURCE, DIFFUSERS, DIFFUSERS_TORCH_UTILS, GB
from anyaccel.backends.claim import DtypeLimit, Limit, OperationLimit, Quirk, RoundTrip, Unknown, Yes
from anyaccel.backends.installation import InstallCommand
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
    name: str,
    title: str,
    memory_bytes: int | None,
    per_server: int | None,
    source: str,
    reported_as: str = "",
    says: str = "Memory per torch device.",
) -> Product:
    return Product(
        name=name,
        title=title,
        memory_bytes=memory_bytes,
        per_server=per_server,
        software="torch with torch_npu and CANN",
        reported_as=reported_as,
        says=says,
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
            says="Kernels reject it: 'not implemented for DT_DOUBLE, should be in dtype support list'.",
            source=_DIFFUSERS_FLOAT64,
            evidence="hardware",
            effect="error",
            hint="use float32; anyaccel.adjust_dtype returns the dtype to use",
            becomes="float32",
        ),
        int64=DtypeLimit(
            says="diffusers uses int32 on NPU.",
            source=DIFFUSERS_TORCH_UTILS,
            evidence="documented",
            effect="narrowed",
            hint="use int32 for ids and timesteps",
            becomes="int32",
            contradicted_by=_DIFFUSERS_FLOAT64,  # the dtype list in its error message has DT_INT64
        ),
        float32=Yes(says="Listed as a supported dtype by the kernels.", source=_KERNEL_TYPES, evidence="hardware"),
        float16=DtypeLimit(
            says="On series before A2, overflow saturates: Inf becomes 65504 and NaN becomes 0, and this cannot be "
            "turned off.",
            source="https://hiascend.com/document/detail/zh/Pytorch/600/apiref/Envvariables/Envir_004.html",
            evidence="documented",
            effect="wrong",
            hint="use bfloat16 if the product supports it",
            only_on=("310p",),
        ),
        bfloat16=DtypeLimit(
            says="The 310P supports only float16.",
            source="https://docs.vllm.ai/projects/ascend/en/v0.11.0/tutorials/single_node_300i.html",
            evidence="documented",
            effect="error",
            hint="use float16",
            becomes="float16",
            only_on=("310p",),
        ),
        complex64=Yes(
            says="Rotary embeddings work in complex64; for indexing, see the operations.",
            source="https://github.com/modelscope/DiffSynth-Studio/pull/1191",
            evidence="hardware",
        ),
        complex128=DtypeLimit(
            says="Runs on the slow AI CPU; gather rejects it (see the operations).",
            source="https://github.com/modelscope/DiffSynth-Studio/pull/1191",
            evidence="hardware",
            effect="slow",
            hint="use complex64, or real-valued rotary embeddings",
            becomes="complex64",
        ),
        float8_e4m3fn=DtypeLimit(
            says="Fails with 'Float8_e4m3fn has not been supported' (ERR01007). A2 and A3 do not support fp8 matrix "
            "products; A5 does.",
            source="https://github.com/xLLM-AI/xllm/issues/1427",
            evidence="hardware",
            effect="error",
            hint="run in bfloat16",
        ),
        float8_e5m2=DtypeLimit(
            says="A2 and A3 do not support fp8 matrix products; A5 does.",
            source=_A5_FP8,
            evidence="documented",
            effect="error",
            hint="run in bfloat16",
        ),
    ),
    default_dtypes=DtypeOrder(
        says="The kernels list bfloat16 as a supported dtype; HunyuanDiT produced black images in float16.",
        source="https://github.com/Tencent-Hunyuan/HunyuanDiT/issues/226",
        evidence="hardware",
        order=("bfloat16", "float16", "float32"),
    ),
    random_numbers=Yes(
        says="The device has a kernel for normally distributed random numbers.",
        source=_KERNEL_TYPES,
        evidence="hardware",
    ),
    data_dependent_shapes=Limit(
        says="With jit_compile enabled (the default before A2), operators are recompiled for every new shape.",
        source=_JIT,
        evidence="documented",
        effect="slow",
        hint="call torch_npu.npu.set_compile_mode(jit_compile=False)",
        only_on=("310p",),
    ),
    new_shapes=Limit(
        says="The first Stable Diffusion image took 600 s with jit_compile enabled and 40 s with it disabled.",
        source=_FIRST_RUN,
        evidence="hardware",
        effect="slow",
        hint="call torch_npu.npu.set_compile_mode(jit_compile=False)",
        only_on=("310p",),
    ),
    host_round_trip=RoundTrip(
        says="Drains the queue; copies with a dtype conversion blocked despite non_blocking=True. No timing was found.",
        source="https://gitcode.com/Ascend/pytorch/pull/39577",
        evidence="documented",
        effect="slow",
        hint="keep the scheduler's timesteps on the CPU and call set_begin_index",
        cost_us=None,
    ),
    batches=Unknown(says="No reports about batches on NPU were found."),
    training=Yes(says="Supported by diffusers.", source=DIFFUSERS_TORCH_UTILS, evidence="documented"),
    fused_attention=Yes(
        says="Attention is fused on the 910B and later, without a mask or with a boolean mask; otherwise the full "
        "score matrix is materialized.",
        source="https://gitcode.com/Ascend/op-plugin/blob/master/op_plugin/ops/opapi/"
        "ScaledDotProductAttentionKernelNpuOpApi.cpp",
        evidence="documented",
    ),
    memory=MemoryTerms(
        says="60.97 GiB is usable on a 910B, slightly more than the nominal 64 GB.",
        source="https://github.com/vllm-project/vllm-ascend/issues/1127",
        evidence="hardware",
    ),
    largest_tensor=(Unknown(says="No limit on tensor size was found."),),
    operations=(
        OperationLimit(
            name="index_complex64",
            says="Indexing rejects complex64 (aclnnIndex, 910B3, torch_npu 2.10).",
            source="https://github.com/vllm-project/vllm-omni/issues/4911",
            evidence="hardware",
            effect="error",
            hint="index the real and imaginary parts separately",
            operations=("index",),
            dtypes=("complex64", "complex128"),
        ),
        OperationLimit(
            name="gather_complex128",
            says="Gather rejects complex128 (aclnnGather).",
            source="https://github.com/vllm-project/vllm-omni/pull/6571",
            evidence="hardware",
            effect="error",
            hint="use complex64, or real-valued rotary embeddings",
            operations=("gather", "index_select"),
            dtypes=("complex128",),
        ),
    ),
    quirks=(
        Quirk(
            name="float32_convolutions_in_hf32",
            information_only=True,
            says="Convolutions run in HF32, a reduced-precision float32, unless allow_hf32 is disabled.",
            source=_ASCEND + "Pytorch/700/apiref/apilist/ptaoplist_000238.html",
            evidence="documented",
            effect="narrowed",
            hint="set torch_npu.npu.conv.allow_hf32 = False if full precision matters",
        ),
        Quirk(
            name="visible_devices_with_spaces",
            information_only=True,
            says="A space in ASCEND_RT_VISIBLE_DEVICES ('1, 2,3') silently drops the devices after it.",
            source=_ASCEND + "canncommercial/900/maintenref/envvar/envref_07_0028.html",
            evidence="documented",
            effect="wrong",
            hint="do not use spaces: 1,2,3",
        ),
    ),
    compiler=Compiler(
        says="torch.compile uses TorchAir's backend object or, since torch_npu 2.7.1-26.0.0, Inductor.",
        source=_TORCH_NPU + "/blob/v2.7.1-26.0.0/docs/zh/environment_variable_reference/TORCHINDUCTOR_NPU_BACKEND.md",
        evidence="documented",
        backend="inductor",
        dynamic=False,
        fullgraph=False,
        cache_variable="ACL_OP_COMPILER_CACHE_DIR",
        cache_default="$HOME/atc_data",
    ),
    distributed=Distributed(
        says="accelerate uses the hccl backend.",
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
            says="Cache directory for operators compiled in eager mode.",
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
            says="Wheels are published for Linux on x86_64 and aarch64.",
            source=_TORCH_NPU,
            evidence="documented",
        ),
        ModuleFound(
            module="torch_npu",
            hint="install CANN, source its set_env.sh, then pip install the torch-npu version that matches torch",
            says="torch_npu registers the device with torch.",
            source=_TORCH_NPU,
            evidence="documented",
        ),
    ),
    installation=(
        InstallCommand(
            command="pip install torch torch-npu",
            systems=("Linux",),
            says="CANN must be installed and its set_env.sh sourced; torch-npu requires the same version of torch.",
            source=_TORCH_NPU,
            evidence="documented",
        ),
    ),
    device_files=("/dev/davinci[0-9]*",),
    aliases=("ascend", "huawei"),
    product_pattern=r"(ascend-?)?\d{3}[a-z]?",
    products=(
        _ascend(
            "910c",
            "Ascend 910C (one die, Atlas 800I A3)",
            64 * GB,
            16,
            _SGLANG,
            says="Memory per torch device; each 910C card has two dies, and torch counts each die as a device.",
        ),
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
