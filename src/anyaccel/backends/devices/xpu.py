"""Backend for Intel GPUs (Arc, Data Center GPU Max, integrated), based on `torch.xpu`."""

from __future__ import annotations

from anyaccel.backends.citations import (
    COMFYUI,
    DIFFUSERS_SOURCE,
    DIFFUSERS_TORCH_UTILS,
    PYTORCH,
    SCHEDULER_SYNC,
    TORCH_DISTRIBUTED,
    TORCH_SOURCE,
    UV_TORCH,
)
from anyaccel.backends.claim import DtypeLimit, OperationLimit, Quirk, RoundTrip, SizeLimit, Unknown, Yes
from anyaccel.backends.installation import InstallCommand
from anyaccel.backends.products.arc import ARC, ARC_A
from anyaccel.backends.registry import Backend
from anyaccel.backends.requirement import BuiltFor, SystemIs
from anyaccel.backends.sheet import Compiler, Distributed, DtypeOrder, Dtypes, Product, Quantization, Sheet, Variable

_GET_STARTED = "https://docs.pytorch.org/docs/stable/notes/get_start_xpu.html"
_OPS = "https://github.com/intel/torch-xpu-ops/issues/"
_IPEX = "https://github.com/intel/intel-extension-for-pytorch/issues/"
_XPU = TORCH_SOURCE + "torch/xpu/__init__.py"
_WITHOUT_FP64 = (*ARC_A, "iris-xe")
_BUFFER_ON_IGPU = "https://github.com/intel/compute-runtime/issues/890"
_MIB = 2**20
_TILE = "Memory size as reported by the device; torch counts each tile of a Max as a device."
_SHARED = "Shares memory with the CPU."


def _product(name: str, title: str, memory_bytes: int | None, says: str, source: str, reported_as: str = "") -> Product:
    return Product(
        name=name,
        title=title,
        memory_bytes=memory_bytes,
        per_server=None,
        software="an XPU build of torch",
        reported_as=reported_as,
        says=says,
        source=source,
        evidence="hardware",
    )


SHEET = Sheet(
    name="xpu",
    title="Intel GPU (XPU)",
    vendor="Intel",
    documentation=_GET_STARTED,
    torch_build="xpu",
    preference=60,
    dtypes=Dtypes(
        float64=DtypeLimit(
            says="Arc A (Alchemist) and Iris Xe do not support float64 ('Required aspect fp64 is not supported on "
            "the device'); Arc B and Max do.",
            source=_OPS + "1742",
            evidence="hardware",
            effect="error",
            hint="use float32 unless torch.xpu.get_device_properties().has_fp64 is true",
            becomes="float32",
            only_on=_WITHOUT_FP64,
            contradicted_by=PYTORCH + "149953",
        ),
        int64=Yes(
            says="Supported; every device listing we found reports 64-bit atomics.",
            source=_OPS + "3663",
            evidence="hardware",
        ),
        float32=Yes(says="Supported by every kernel.", source=_GET_STARTED, evidence="documented"),
        float16=Yes(
            says="Every device listing we found reports has_fp16=1.", source=_OPS + "3663", evidence="hardware"
        ),
        bfloat16=Yes(
            says="torch reports it as supported; it is emulated on hardware without native support.",
            source=_XPU,
            evidence="documented",
        ),
        complex64=Yes(
            says="Fourier transforms are native; for matrix products, see the quirk complex_products_need_onemkl.",
            source=_OPS + "1210",
            evidence="documented",
        ),
        complex128=DtypeLimit(
            says="Fails like float64 on hardware without float64.",
            source=_OPS + "663",
            evidence="hardware",
            effect="error",
            hint="use complex64",
            becomes="complex64",
            only_on=_WITHOUT_FP64,
        ),
        float8_e4m3fn=Yes(
            says="Storage and casts work (diffusers' layerwise casting tests pass); for arithmetic, see the "
            "operations.",
            source="https://github.com/huggingface/diffusers/pull/11406",
            evidence="hardware",
        ),
        float8_e5m2=Unknown(
            says="No reports about float8_e5m2 were found; support for further fp8 operations is in progress."
        ),
    ),
    default_dtypes=DtypeOrder(
        says="bfloat16 has the range of float32; float16 attention produced NaN with several drivers.",
        source=_OPS + "1730",
        evidence="hardware",
        order=("bfloat16", "float16", "float32"),
    ),
    random_numbers=Yes(
        says="torch.xpu has its own generators.",
        source=TORCH_SOURCE + "torch/xpu/random.py",
        evidence="documented",
    ),
    data_dependent_shapes=Unknown(says="No reports about nonzero or boolean masks on XPU were found."),
    new_shapes=Unknown(says="No reports about the cost of a new shape in eager mode were found."),
    host_round_trip=RoundTrip(
        says="Drains the queue, as on CUDA; no timing was found.",
        source=SCHEDULER_SYNC,
        evidence="inferred",
        effect="slow",
        hint="keep the scheduler's timesteps on the CPU and call set_begin_index",
        cost_us=None,
    ),
    batches=Unknown(says="No reports about batches on XPU were found."),
    training=Yes(says="Supported by diffusers.", source=DIFFUSERS_TORCH_UTILS, evidence="documented"),
    fused_attention=Yes(
        says="torch has used oneDNN's fused attention since 2.7, for head dimensions up to 256.",
        source="https://github.com/pytorch/pytorch/pull/147614",
        evidence="documented",
    ),
    quantized_weights=(
        Quantization(
            name="gguf-q4",
            bits=4.5,
            says="GGUF weights, dequantized on the fly with plain torch operations.",
            source="https://github.com/huggingface/diffusers/pull/11404",
            evidence="hardware",
        ),
        Quantization(
            name="bitsandbytes-nf4",
            bits=4.13,
            says="4-bit NF4 weights.",
            source=DIFFUSERS_SOURCE + "quantizers/bitsandbytes/bnb_quantizer.py",
            evidence="documented",
        ),
    ),
    largest_tensor=(
        SizeLimit(
            says="A single allocation of 4 GiB fails on an Arc A770 with 15 GiB free.",
            source="https://github.com/intel/intel-xpu-backend-for-triton/issues/7477",
            evidence="hardware",
            effect="error",
            hint="slice the attention and tile the VAE",
            only_on=("arc-a770", "arrow-lake-igpu"),
            contradicted_by=_IPEX + "325",
            amount=4 * 2**30 - 1,
            unit="bytes",
            of="tensor",
        ),
    ),
    operations=(
        OperationLimit(
            name="float8_arithmetic",
            says="Addition, comparison and other operations raise: \"add_xpu\" not implemented for 'Float8_e4m3fn'.",
            source=_OPS + "1939",
            evidence="hardware",
            effect="error",
            hint="store the weights in float8 and cast them for computation",
            operations=("add", "mul", "eq", "ne", "gt", "lt", "where"),
            dtypes=("float8_e4m3fn",),
        ),
    ),
    quirks=(
        Quirk(
            name="complex_products_need_onemkl",
            information_only=True,
            says="Builds without oneMKL raise 'Complex datatype matmul is not supported in oneDNN'.",
            source="https://github.com/intel/torch-xpu-ops/pull/2786",
            evidence="hardware",
            effect="error",
            hint="use real-valued rotary embeddings",
        ),
        Quirk(
            name="float64_inside_kernels",
            information_only=True,
            says="Kernels that use float64 internally (logcumsumexp, tril_indices, pdist) fail for every dtype.",
            source=_OPS + "1150",
            evidence="hardware",
            effect="error",
            hint="run these operations on the CPU",
            only_on=_WITHOUT_FP64,
        ),
        Quirk(
            name="large_pictures_corrupt",
            information_only=True,
            says="Stable Cascade produced corrupt images on Arc A even after the problem had been fixed for smaller "
            "models.",
            source=_IPEX + "529",
            evidence="hardware",
            effect="wrong",
            hint="compare one image with the same image generated on the CPU",
            only_on=("arc-a770",),
        ),
        Quirk(
            name="float16_nan",
            information_only=True,
            says="SDXL in float16 produced only NaN on one B580.",
            source=COMFYUI + "14743",
            evidence="hardware",
            effect="wrong",
            hint="use bfloat16",
            only_on=("arc-b580",),
        ),
        Quirk(
            name="first_picture_slow",
            information_only=True,
            says="The first image after each prompt change took 7 to 8 times as long (A750).",
            source=COMFYUI + "9039",
            evidence="hardware",
            effect="slow",
            hint="warm up the pipeline; SYCL_CACHE_PERSISTENT=1 caches kernels on disk",
        ),
    ),
    compiler=Compiler(
        says="torch.compile generates Triton kernels.",
        source=TORCH_SOURCE + "torch/_inductor/config.py",
        evidence="documented",
        backend="inductor",
        dynamic=True,
        fullgraph=False,
        cache_variable="TORCHINDUCTOR_CACHE_DIR",
        cache_default="torchinductor_$USER in the temporary directory",
    ),
    distributed=Distributed(
        says="xccl has been built into torch since 2.8.",
        source=TORCH_DISTRIBUTED,
        evidence="documented",
        backend="xccl",
    ),
    variables=(
        Variable(
            name="SYCL_CACHE_PERSISTENT",
            value="",
            when="by_user",
            says="1 caches compiled kernels on disk; off by default.",
            source="https://intel.github.io/llvm-docs/EnvironmentVariables.html",
            evidence="documented",
        ),
        Variable(
            name="PYTORCH_ENABLE_XPU_FALLBACK",
            value="",
            when="by_user",
            says="1 enables a CPU fallback for operations that XPU does not implement.",
            source=_OPS + "2254",
            evidence="hardware",
        ),
    ),
    visible_devices="ZE_AFFINITY_MASK",
    ray_resource="GPU",
    requirements=(
        SystemIs(
            systems=("Linux", "Windows"),
            hint="use Linux or Windows with an Intel GPU",
            says="Supported on Linux and Windows 11.",
            source=_GET_STARTED,
            evidence="documented",
        ),
        BuiltFor(
            builds=("xpu",),
            hint=f"install an XPU build of torch: {_GET_STARTED}",
            says="A CUDA or CPU build of torch has no XPU support.",
            source=_GET_STARTED,
            evidence="documented",
        ),
    ),
    installation=(
        InstallCommand(
            command="uv pip install torch torchvision --torch-backend=xpu",
            systems=("Linux", "Windows"),
            says="The XPU build, which requires Intel's GPU driver.",
            source=UV_TORCH,
            evidence="documented",
        ),
    ),
    device_files=("/dev/dri/renderD*",),
    pci_vendor="0x8086",
    aliases=("arc",),
    product_pattern=r"(arc|max|flex|iris)[- ]?[a-z]*[- ]?\d",
    products=(
        _product("max-1550", "Data Center GPU Max 1550 (one tile)", 65520 * _MIB, _TILE, _OPS + "3888", "Max 1550"),
        *ARC,
        _product("arrow-lake-igpu", "Arrow Lake graphics", None, _SHARED, _BUFFER_ON_IGPU),
        _product("iris-xe", "Iris Xe graphics", None, _SHARED, PYTORCH + "149953", r"Iris.*Xe"),
    ),
    assumed_product="arc-b580",
)

BACKEND = Backend(sheet=SHEET)
