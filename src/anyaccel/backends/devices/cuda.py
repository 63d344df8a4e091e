"""Backend for NVIDIA CUDA and AMD ROCm. torch uses the device type `cuda` for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from anyaccel.backends.citations import (
    DIFFUSERS_SOURCE,
    DIFFUSERS_TORCH_UTILS,
    INDUCTOR_CACHE,
    PYTORCH,
    SCHEDULER_SYNC,
    TENSORS,
    TORCH_DISTRIBUTED,
    TORCH_INSTALL,
    TORCH_SOURCE,
    UV_TORCH,
)
from anyaccel.backends.claim import DtypeLimit, OperationLimit, Quirk, RoundTrip, Unknown, Yes
from anyaccel.backends.cuda_graphs import make_recorder
from anyaccel.backends.driver import Driver, Recorder
from anyaccel.backends.installation import InstallCommand
from anyaccel.backends.products.data_center import INSTINCT, NVIDIA
from anyaccel.backends.products.geforce import GEFORCE, RTX_30
from anyaccel.backends.products.radeon import RADEON, RX_7000
from anyaccel.backends.quirks import CONVOLUTIONS_REORDER, NON_CONTIGUOUS_ATTENTION
from anyaccel.backends.registry import Backend
from anyaccel.backends.requirement import BuiltFor, SystemIs
from anyaccel.backends.sheet import (
    Compiler,
    Distributed,
    DtypeOrder,
    Dtypes,
    MemoryTerms,
    Quantization,
    Sheet,
    Speedup,
    Variable,
)

_CUDA = TORCH_SOURCE + "torch/cuda/__init__.py"
_HIP = "https://docs.pytorch.org/docs/2.13/notes/hip.html"
_HIP_VARIABLES = "https://rocm.docs.amd.com/projects/HIP/en/latest/reference/env_variables.html"
_AMD_FP8 = "https://github.com/ROCm/legacy-rocm-build/issues/6019"
_CHANNELS_LAST = "https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html"
_FLOAT8 = "https://github.com/sayakpaul/diffusers-torchao"
_OUR_MEMORY = "benchmarks/results/memory_cuda.json"
_OUR_H200 = "benchmarks/results/round_trip_cuda.json"
_OUR_SPEED = "benchmarks/results/speed_cuda.json"
# Products with a compute capability below 8.9.
_BEFORE_ADA = ("a100-40gb", "a100-80gb", "a10g", *RTX_30)
_WITHOUT_OCP_FP8 = ("mi250x", "mi300x", "mi325x", *RX_7000)


def _measured(name: str, gain: float, says: str) -> Speedup:
    return Speedup(name=name, gain=gain, says=says, source=_OUR_SPEED, evidence="hardware")


_FP8 = DtypeLimit(
    says="Matrix products require compute capability 8.9 or later; storage works on every device.",
    source=PYTORCH + "164251",
    evidence="hardware",
    effect="error",
    hint="store the weights in float8 and cast them for computation, or run in bfloat16",
    only_on=_BEFORE_ADA,
)

CUDA = Sheet(
    name="cuda",
    title="NVIDIA CUDA",
    vendor="NVIDIA",
    documentation="https://docs.pytorch.org/docs/stable/notes/cuda.html",
    torch_build="cuda",
    preference=90,
    can_be_virtual=False,
    dtypes=Dtypes(
        float64=Yes(says="Supported for CUDA tensors.", source=TENSORS, evidence="documented"),
        int64=Yes(says="Supported for CUDA tensors.", source=TENSORS, evidence="documented"),
        float32=Yes(says="Supported for CUDA tensors.", source=TENSORS, evidence="documented"),
        float16=Yes(says="Supported for CUDA tensors.", source=TENSORS, evidence="documented"),
        bfloat16=Yes(
            says="Native on compute capability 8.0 and later; emulated, and slower, on older devices.",
            source=_CUDA,
            evidence="documented",
        ),
        complex64=Yes(says="Supported for CUDA tensors.", source=TENSORS, evidence="documented"),
        complex128=Yes(says="Supported for CUDA tensors.", source=TENSORS, evidence="documented"),
        float8_e4m3fn=_FP8,
        float8_e5m2=_FP8,
    ),
    default_dtypes=DtypeOrder(
        says="bfloat16 has the range of float32 and is native on compute capability 8.0 and later.",
        source=_CUDA,
        evidence="documented",
        order=("bfloat16", "float16", "float32"),
    ),
    random_numbers=Yes(
        says="CUDA has its own generators; for the same seed, they return different values from the CPU generator.",
        source="https://docs.pytorch.org/docs/stable/notes/randomness.html",
        evidence="documented",
    ),
    data_dependent_shapes=Yes(
        says="Works in eager mode, with a device-to-host synchronization.", source=SCHEDULER_SYNC, evidence="hardware"
    ),
    new_shapes=Yes(says="A new shape costs nothing in eager mode.", source=TENSORS, evidence="documented"),
    host_round_trip=RoundTrip(
        says="Takes 7.7 µs on an idle H200 and drains the stream; some schedulers do this at every step.",
        source=_OUR_H200,
        evidence="hardware",
        effect="slow",
        hint="keep the scheduler's timesteps on the CPU and call set_begin_index",
        cost_us=7.7,
    ),
    batches=Yes(
        says="diffusers runs its batch tests on CUDA.",
        source="https://github.com/huggingface/diffusers/blob/v0.42.1/tests/pipelines/test_pipelines_common.py",
        evidence="documented",
    ),
    training=Yes(says="Supported by diffusers.", source=DIFFUSERS_TORCH_UTILS, evidence="documented"),
    fused_attention=Yes(
        says="Flash and memory-efficient attention store no score matrix; heads wider than 256 use float32.",
        source=_OUR_MEMORY,
        evidence="hardware",
    ),
    memory=MemoryTerms(
        says="The CUDA context uses 0.3 to 0.4 GiB per process, and cuBLAS uses 33 MiB. The allocator rounds a "
        "tensor of 10 MiB or more up to a multiple of 2 MiB if that adds at most 1 MiB.",
        source=_OUR_MEMORY,
        evidence="hardware",
        kept_bytes=400 * 2**20,
        segment_bytes=2 * 2**20,
        fixed_bytes=33 * 2**20,
    ),
    quantized_weights=(
        Quantization(
            name="torchao-int8",
            bits=8.1,
            says="int8 weights; matrix products run in the dtype of the model.",
            source="https://github.com/huggingface/diffusers/pull/10009",
            evidence="documented",
        ),
        Quantization(
            name="gguf-q4",
            bits=4.5,
            says="GGUF weights, dequantized on the fly with plain torch operations.",
            source="https://github.com/huggingface/diffusers/pull/9964",
            evidence="documented",
        ),
        Quantization(
            name="bitsandbytes-nf4",
            bits=4.13,
            says="4-bit NF4 weights.",
            source=DIFFUSERS_SOURCE + "quantizers/bitsandbytes/bnb_quantizer.py",
            evidence="documented",
        ),
    ),
    speedups=(
        _measured("compile", 1.3, "Compiled stock pipelines took 0.43 to 0.79 times as long as eager ones."),
        _measured(
            "capture",
            1.5,
            "With CUDA graphs, SD 1.5 took 0.41 times and SDXL 0.78 times as long as the compiled stock pipelines.",
        ),
        Speedup(
            name="channels_last",
            gain=1.1,
            says="Half-precision convolution kernels run in channels-last format.",
            source=_CHANNELS_LAST,
            evidence="documented",
        ),
        Speedup(
            name="group_norm",
            gain=1.3,
            says="An anyaccel kernel fuses GroupNorm in channels-last format with the activation that follows.",
            source=_CHANNELS_LAST,
            evidence="inferred",
        ),
        Speedup(
            name="float8",
            gain=1.3,
            says="Row-wise scaled float8 products of large matrices take just over half as long as half-precision "
            "ones.",
            source=_FLOAT8,
            evidence="documented",
        ),
    ),
    largest_tensor=(Unknown(says="No general limit on tensor size was found; see the operations and quirks."),),
    operations=(
        OperationLimit(
            name="convolution_past_int32",
            says="A convolution over a tensor with more than 2**31 elements fails with an illegal memory access.",
            source=PYTORCH + "117736",
            evidence="hardware",
            effect="error",
            hint="tile the VAE",
            operations=("convolution",),
            past_elements=2**31,
        ),
        OperationLimit(
            name="channels_last_interpolate_past_int32",
            says="Nearest-neighbor interpolation in channels-last format returns zeros beyond 2**31 elements.",
            source=PYTORCH + "141831",
            evidence="hardware",
            effect="wrong",
            hint="call .contiguous() first, or tile the VAE",
            operations=("upsample_nearest2d",),
            past_elements=2**31,
        ),
    ),
    quirks=(
        Quirk(
            name=CONVOLUTIONS_REORDER,
            says="A half-precision convolution copies its input, weight and output to channels-last format unless "
            "the input is already in that format: decoding at 1024 × 1024 needs 2.4 GiB instead of 1.5 GiB.",
            source=_OUR_MEMORY,
            evidence="hardware",
            effect="slow",
            hint="tile the VAE, or decode one image at a time",
        ),
        Quirk(
            name="masked_attention_past_2_32",
            information_only=True,
            says="Memory-efficient attention with a mask returns wrong results if queries × keys exceeds 2**32.",
            source=PYTORCH + "187227",
            evidence="hardware",
            effect="wrong",
            hint="slice the attention, or use another attention kernel",
        ),
    ),
    compiler=Compiler(
        says="torch.compile generates Triton kernels.",
        source=INDUCTOR_CACHE,
        evidence="documented",
        backend="inductor",
        dynamic=True,
        fullgraph=False,
        modes=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        cache_variable="TORCHINDUCTOR_CACHE_DIR",
        cache_default="torchinductor_$USER in the temporary directory",
    ),
    distributed=Distributed(
        says="nccl is torch's backend for CUDA.", source=TORCH_DISTRIBUTED, evidence="documented", backend="nccl"
    ),
    visible_devices="CUDA_VISIBLE_DEVICES",
    ray_resource="GPU",
    requirements=(
        SystemIs(
            systems=("Linux", "Windows"),
            hint="on a Mac, use mps",
            says="CUDA builds of torch exist for Linux and Windows.",
            source=TORCH_INSTALL,
            evidence="documented",
        ),
        BuiltFor(
            builds=("cuda", "hip"),
            hint=f"install a torch build for your GPU: {TORCH_INSTALL}",
            says="A CPU build of torch has no CUDA support.",
            source=TORCH_INSTALL,
            evidence="documented",
        ),
    ),
    installation=(
        InstallCommand(
            command="uv pip install torch torchvision --torch-backend=cu130",
            systems=("Linux", "Windows"),
            device_files=("/dev/nvidia[0-9]*",),
            says="The build for CUDA 13.0, which requires an NVIDIA driver of version 580 or later.",
            source=UV_TORCH,
            evidence="documented",
        ),
    ),
    device_files=("/dev/nvidia[0-9]*", "/dev/kfd"),
    aliases=("nvidia",),
    product_pattern=r"(rtx|gtx|geforce|quadro|tesla|titan|g[bh]\d00|[abhpv]\d00$|[al]\d{1,2}[sg]?$|a\d000|t4$)",
    products=(
        *NVIDIA,
        *GEFORCE,
    ),
    assumed_product="a10g",
)

_ROCM_FP8 = DtypeLimit(
    says="OCP fp8 runs only on gfx950 and gfx12; MI300 and MI325 use the FNUZ format, and older GPUs have no fp8.",
    source=_AMD_FP8,
    evidence="hardware",
    effect="error",
    hint="run in bfloat16, or store the weights in fp8 and cast them for computation",
    only_on=_WITHOUT_OCP_FP8,
)

ROCM = replace(
    CUDA,
    name="rocm",
    title="AMD ROCm",
    vendor="AMD",
    documentation=_HIP,
    device_type="cuda",
    torch_build="hip",
    fused_attention=Unknown(says="No list of GPUs and releases that support fused attention was found."),
    memory=Unknown(says="No figure for the memory reserved by the driver and runtime was found."),
    speedups=(),
    quantized_weights=(),
    dtypes=replace(
        CUDA.dtypes,
        float64=Yes(says="Supported through the torch.cuda interface.", source=_HIP, evidence="documented"),
        bfloat16=Yes(says="torch reports it as supported on every GPU.", source=_CUDA, evidence="documented"),
        complex64=Unknown(says="No list of the complex dtypes supported on ROCm was found."),
        complex128=Unknown(says="No list of the complex dtypes supported on ROCm was found."),
        float8_e4m3fn=_ROCM_FP8,
        float8_e5m2=_ROCM_FP8,
    ),
    random_numbers=Yes(says="Available through torch.cuda, as on CUDA.", source=_HIP, evidence="documented"),
    new_shapes=Yes(
        says="New shapes work, but convolutions may be tuned again for each one; see the quirk miopen_search.",
        source="https://github.com/ROCm/TheRock/issues/2591",
        evidence="hardware",
    ),
    host_round_trip=RoundTrip(
        says="Drains the stream, as on CUDA; no timing was found.",
        source=SCHEDULER_SYNC,
        evidence="inferred",
        effect="slow",
        hint="keep the scheduler's timesteps on the CPU and call set_begin_index",
        cost_us=None,
    ),
    batches=Unknown(says="No reports about batches on ROCm were found."),
    largest_tensor=(Unknown(says="No limit on tensor size was found."),),
    operations=(),
    quirks=(
        Quirk(
            name=NON_CONTIGUOUS_ATTENTION,
            says="Fused attention returned wrong results for a non-contiguous value (bfloat16, MI300X, ROCm 7.0).",
            source="https://github.com/ROCm/pytorch/issues/3230",
            evidence="hardware",
            effect="wrong",
            hint="call .contiguous() on query, key and value",
            contradicted_by=_HIP,
        ),
        Quirk(
            name="miopen_search",
            information_only=True,
            says="The first VAE decode may spend minutes searching for kernels (37 min on ROCm 7.12, 1 min on 7.14).",
            source="https://github.com/ROCm/TheRock/issues/2591",
            evidence="hardware",
            effect="slow",
            hint="set MIOPEN_FIND_MODE=2 and torch.backends.cudnn.benchmark = False",
        ),
        Quirk(
            name="vae_decode_timeout",
            information_only=True,
            says="VAE decoding above 1024 pixels hit the driver timeout (ROCm 6.3, WSL).",
            source="https://github.com/ROCm/legacy-rocm-build/issues/4729",
            evidence="hardware",
            effect="error",
            hint="set MIOPEN_FIND_MODE=2, or tile the VAE",
        ),
    ),
    distributed=Distributed(
        says="nccl (RCCL on ROCm) and gloo are available.", source=_HIP, evidence="documented", backend="nccl"
    ),
    variables=(
        Variable(
            name="MIOPEN_FIND_MODE",
            value="",
            when="by_user",
            says="2 uses the first kernel that works instead of searching for the fastest.",
            source="https://github.com/ROCm/MIOpen/blob/develop/docs/how-to/find-and-immediate.rst",
            evidence="documented",
        ),
    ),
    visible_devices="ROCR_VISIBLE_DEVICES",
    ray_resource="GPU",
    requirements=(
        SystemIs(
            systems=("Linux", "Windows"),
            hint="use Linux or Windows",
            says="ROCm builds of torch exist for Linux and Windows.",
            source=_HIP_VARIABLES,
            evidence="documented",
        ),
        BuiltFor(
            builds=("hip",),
            hint=f"install a ROCm build of torch: {TORCH_INSTALL}",
            says="A CUDA or CPU build of torch has no ROCm support.",
            source=_HIP,
            evidence="documented",
        ),
    ),
    installation=(
        InstallCommand(
            command="uv pip install torch torchvision --torch-backend=rocm7.2",
            systems=("Linux",),
            says="The build for ROCm 7.2.",
            source=UV_TORCH,
            evidence="documented",
        ),
    ),
    device_files=("/dev/kfd",),
    aliases=("hip", "amd"),
    product_pattern=r"(rx|radeon|instinct|mi)-?\d",
    products=(
        *INSTINCT,
        *RADEON,
    ),
    assumed_product="rx7900xtx",
)


class CudaDriver(Driver):
    """The driver for CUDA and ROCm, with support for graphs, events and side streams."""

    has_events = True

    def __init__(self, sheet: Sheet) -> None:
        super().__init__(sheet)
        self._pools: dict[int, list[Any]] = {}

    def record_event(self, index: int) -> Callable[[], None]:
        event = self.module().current_stream(index).record_event()
        return event.synchronize  # type: ignore[no-any-return]

    def recorder(self, index: int) -> Recorder | None:
        import torch

        # Graphs replay one after another, so they can share one pool. It must outlive all of them.
        if index not in self._pools:
            self._pools[index] = [torch.cuda.MemPool()]
        return make_recorder(index, self._pools[index])


BACKEND = Backend(sheet=CUDA, variants=(ROCM,), driver=CudaDriver)
