"""Backend for Apple silicon (`mps`), based on Metal Performance Shaders."""

from __future__ import annotations

from anyaccel.backends.citations import (
    COMFYUI,
    DIFFUSERS,
    DIFFUSERS_TORCH_UTILS,
    GIB,
    PYTORCH,
    TORCH_DISTRIBUTED,
    TORCH_INSTALL,
    TORCH_SOURCE,
)
from anyaccel.backends.claim import DtypeLimit, Limit, OperationLimit, Quirk, RoundTrip, SizeLimit, Unknown, Yes
from anyaccel.backends.driver import Driver, Memory
from anyaccel.backends.installation import InstallCommand
from anyaccel.backends.quirks import (
    HOST_NUMBER_OFFSET_IGNORED,
    NON_CONTIGUOUS_ATTENTION,
    UNINITIALISED_MEMORY_IS_NAN,
)
from anyaccel.backends.registry import Backend
from anyaccel.backends.requirement import ArchitectureIs, SystemIs, VersionIs
from anyaccel.backends.sheet import (
    Compiler,
    Distributed,
    DtypeOrder,
    Dtypes,
    MemoryTerms,
    Product,
    Quantization,
    Sheet,
    Variable,
)

_DIFFUSERS_PAGE = "https://huggingface.co/docs/diffusers/optimization/mps"
_VARIABLES = "https://docs.pytorch.org/docs/stable/mps_environment_variables.html"
_OPERATION_UTILS = "https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/mps/OperationUtils.mm"
_WATERMARKS = (
    "https://dev.to/nefayran/mps-backend-out-of-memory-on-a-mac-what-the-numbers-mean-and-how-to-set-the-watermark-43dp"
)

SHEET = Sheet(
    name="mps",
    title="Apple silicon (MPS)",
    vendor="Apple",
    documentation="https://docs.pytorch.org/docs/stable/notes/mps.html",
    preference=80,
    unified_memory=True,
    dtypes=Dtypes(
        float64=DtypeLimit(
            says="TypeError: the MPS framework doesn't support float64.",
            source=PYTORCH + "122602",
            evidence="hardware",
            effect="error",
            raises="TypeError",
            hint="cast tensors to float32 before moving them to the device, also those from NumPy arrays",
            becomes="float32",
        ),
        int64=DtypeLimit(
            says="Before macOS 13.3, reductions, sorting and cumsum cast int64 to int32; diffusers uses int32 on "
            "every macOS version.",
            source=PYTORCH + "95231",
            evidence="hardware",
            effect="narrowed",
            hint="use int32 for ids and timesteps",
            becomes="int32",
            contradicted_by=_OPERATION_UTILS,
        ),
        float32=Yes(says="Supported natively by Metal.", source=_OPERATION_UTILS, evidence="documented"),
        float16=Yes(says="Supported natively by Metal.", source=_OPERATION_UTILS, evidence="documented"),
        bfloat16=DtypeLimit(
            says="TypeError: MPS BFloat16 is only supported on macOS 14 or newer.",
            source="https://github.com/pytorch/torchchat/issues/616",
            evidence="hardware",
            effect="error",
            raises="TypeError",
            hint="use float16, or update macOS",
            becomes="float16",
            only_if=("macos<14",),
        ),
        complex64=Yes(
            says="Most operations support it (matrix products since torch 2.4); a few, such as dropout, still do not.",
            source=TORCH_SOURCE + "torch/testing/_internal/common_mps.py",
            evidence="documented",
        ),
        complex128=DtypeLimit(
            says="Moving a tensor to the device succeeds, but operations raise: Undefined type ComplexDouble.",
            source=PYTORCH + "176981",
            evidence="hardware",
            effect="error",
            hint="cast to complex64 first",
            becomes="complex64",
        ),
        float8_e4m3fn=DtypeLimit(
            says="TypeError: the MPS backend does not have support for that dtype.",
            source=PYTORCH + "148420",
            evidence="hardware",
            effect="error",
            raises="TypeError",
            hint="cast the weights to float16 on the CPU",
        ),
        float8_e5m2=DtypeLimit(
            says="TypeError: the MPS backend does not have support for that dtype.",
            source=PYTORCH + "132624",
            evidence="hardware",
            effect="error",
            raises="TypeError",
            hint="cast the weights to float16 on the CPU",
        ),
    ),
    default_dtypes=DtypeOrder(
        says="The diffusers documentation uses float16 on Macs; bfloat16 requires macOS 14.",
        source=_DIFFUSERS_PAGE,
        evidence="documented",
        order=("float16", "bfloat16", "float32"),
    ),
    random_numbers=Yes(
        says="torch.mps has its own generator; for the same seed, it returns different values from the CPU "
        "generator, and diffusers draws noise on the CPU.",
        source=TORCH_SOURCE + "torch/mps/__init__.py",
        evidence="documented",
    ),
    data_dependent_shapes=Unknown(says="No reports about nonzero or boolean masks on MPS were found."),
    new_shapes=Limit(
        says="Every new shape adds a graph to a cache that is never cleared: 315 shapes used 13.7 GB.",
        source=PYTORCH + "132596",
        evidence="hardware",
        effect="slow",
        hint="use only a few sizes per process",
    ),
    host_round_trip=RoundTrip(
        says="A linear layer took 23 µs without synchronization and 245 µs with it.",
        source=PYTORCH + "152199",
        evidence="hardware",
        effect="slow",
        hint="keep the scheduler's timesteps on the CPU and call set_begin_index",
        cost_us=222.0,
    ),
    batches=Limit(
        says="Batches of several prompts produced noise, black images or a crash.",
        source=DIFFUSERS + "363",
        evidence="hardware",
        effect="wrong",
        hint="run one image per call",
    ),
    training=Limit(
        says="diffusers lists training as unsupported.",
        source=DIFFUSERS_TORCH_UTILS,
        evidence="documented",
        effect="error",
        hint="train on another device",
    ),
    fused_attention=Limit(
        says="Up to torch 2.13, attention over more than eight queries materializes the full score matrix in float32.",
        source="https://github.com/pytorch/pytorch/pull/178545",
        evidence="documented",
        effect="slow",
        hint="slice the attention",
    ),
    memory=MemoryTerms(
        says="The limit that macOS recommends for the GPU is two thirds of memory on machines with up to 32 GB "
        "(10.67 of 16 GB, 21.33 of 32 GB) and three quarters on larger ones (72 of 96 GB, "
        "https://github.com/ggml-org/llama.cpp/issues/3213); on macOS 26 it is 74% to 84%.",
        source="https://github.com/abetlen/llama-cpp-python/issues/687",
        evidence="hardware",
        shares=((32 * GIB, 2 / 3), (None, 3 / 4)),
    ),
    quantized_weights=(
        Quantization(
            name="bitsandbytes-nf4",
            bits=4.13,
            says="4-bit NF4 weights; diffusers added support and tested it with FLUX.2-dev.",
            source="https://github.com/huggingface/diffusers/pull/13915",
            evidence="hardware",
        ),
        Quantization(
            name="gguf-q4",
            bits=4.5,
            says="GGUF weights, dequantized on the fly with plain torch operations.",
            source="https://github.com/huggingface/diffusers/pull/9964",
            evidence="inferred",
        ),
    ),
    largest_tensor=(
        SizeLimit(
            says="An NDArray larger than 2**32 is rejected; the documentation gives no unit, but Metal's error "
            "message says bytes.",
            source=_DIFFUSERS_PAGE,
            evidence="documented",
            effect="error",
            hint="slice the attention and tile the VAE",
            contradicted_by=COMFYUI + "2044",
            amount=2**32,
            unit="elements",
            of="tensor",
        ),
        SizeLimit(
            says="Attention with about 2**31 scores or more silently corrupts the image.",
            source=COMFYUI + "14837",
            evidence="hardware",
            effect="wrong",
            hint="slice the attention",
            amount=2**31,
            unit="elements",
            of="attention_scores",
        ),
    ),
    operations=(
        OperationLimit(
            name="baddbmm_reads_ignored_input",
            says="baddbmm with beta=0 reads the input that it should ignore: diffusers' sliced attention passes "
            "torch.empty, and a single NaN turns the image black.",
            source=DIFFUSERS + "14438",
            evidence="hardware",
            effect="wrong",
            hint="pass torch.zeros, or call scaled_dot_product_attention on slices",
            operations=("baddbmm",),
            reads_ignored_input=True,
        ),
        OperationLimit(
            name="bmm_past_2_32",
            says="bmm returns wrong results if an input or output has more than 2**32 elements.",
            source=PYTORCH + "197636",
            evidence="hardware",
            effect="wrong",
            hint="split the batch",
            operations=("bmm",),
            past_elements=2**32,
        ),
        OperationLimit(
            name="conv_transpose3d_half",
            says="ConvTranspose3D rejects float16 and bfloat16.",
            source=PYTORCH + "154696",
            evidence="hardware",
            effect="error",
            hint="run the video VAE in float32",
            operations=("conv_transpose3d",),
            dtypes=("float16", "bfloat16"),
        ),
        OperationLimit(
            name="int_mm",
            says="Integer matrix products, which int8 quantization requires, are not implemented.",
            source="https://github.com/MiniMax-AI/MiniMax-H3/issues/56",
            evidence="hardware",
            effect="error",
            hint="set PYTORCH_ENABLE_MPS_FALLBACK=1, or do not quantize",
            operations=("_int_mm",),
        ),
    ),
    quirks=(
        Quirk(
            name="first_pass_differs",
            information_only=True,
            says="The results of the first pass differ slightly from those of later passes.",
            source=_DIFFUSERS_PAGE,
            evidence="documented",
            effect="wrong",
            hint="update torch, or run one step first and discard the result",
            only_if=("torch<2.0",),
        ),
        Quirk(
            name=NON_CONTIGUOUS_ATTENTION,
            says="Fused attention returns wrong results for permuted query, key and value tensors (error of 3.6 "
            "instead of 8e-7).",
            source=PYTORCH + "181133",
            evidence="hardware",
            effect="wrong",
            hint="call .contiguous() on query, key and value",
            only_if=("torch<2.12",),
        ),
        Quirk(
            name=HOST_NUMBER_OFFSET_IGNORED,
            says="Arithmetic with a CPU scalar that is a view of a larger tensor, such as sigmas[3], silently uses "
            "the first element of that tensor; fixed in June 2026, after the 2.13 branch cut.",
            source=PYTORCH + "187117",
            evidence="hardware",
            effect="wrong",
            hint="clone the scalar or convert it to a Python float before using it with a device tensor",
            only_if=("torch>=2.12", "torch<2.14"),
        ),
        Quirk(
            name=UNINITIALISED_MEMORY_IS_NAN,
            says="torch.empty may contain NaN, and operations that should ignore the tensor may propagate it.",
            source=DIFFUSERS + "14438",
            evidence="hardware",
            effect="wrong",
            hint="use torch.zeros",
        ),
        Quirk(
            name="swaps_before_it_fails",
            information_only=True,
            says="The default limit (1.7 times the recommended size) exceeds physical memory, so the system swaps "
            "instead of raising an out-of-memory error.",
            source=_WATERMARKS,
            evidence="hardware",
            effect="slow",
            hint="lower both PYTORCH_MPS_HIGH_WATERMARK_RATIO and PYTORCH_MPS_LOW_WATERMARK_RATIO",
        ),
    ),
    compiler=Compiler(
        says="Inductor has generated Metal code since torch 2.8; its source calls this an early prototype.",
        source=PYTORCH + "157957",
        evidence="hardware",
        backend="inductor",
        dynamic=True,
        fullgraph=False,
        cache_variable="TORCHINDUCTOR_CACHE_DIR",
        cache_default="torchinductor_$USER in the temporary directory",
    ),
    distributed=Distributed(
        says="gloo is torch's default backend for MPS; each machine has one device.",
        source=TORCH_DISTRIBUTED,
        evidence="documented",
        backend="gloo",
    ),
    ray_resource="GPU",
    variables=(
        Variable(
            name="PYTORCH_ENABLE_MPS_FALLBACK",
            value="",
            when="by_user",
            says="1 enables a CPU fallback for operations that MPS does not implement.",
            source=_VARIABLES,
            evidence="documented",
        ),
        Variable(
            name="PYTORCH_MPS_HIGH_WATERMARK_RATIO",
            value="",
            when="by_user",
            says="Memory limit as a multiple of the recommended size; default 1.7.",
            source=_VARIABLES,
            evidence="documented",
        ),
        Variable(
            name="PYTORCH_MPS_LOW_WATERMARK_RATIO",
            value="",
            when="by_user",
            says="Memory use above which cached memory is released, as a multiple of the recommended size; default "
            "1.4.",
            source=_VARIABLES,
            evidence="documented",
        ),
    ),
    requirements=(
        SystemIs(
            systems=("Darwin",),
            hint="use a Mac with Apple silicon, or a virtual device on Linux: ANYACCEL_VIRTUAL=mps",
            says="Metal is available only on macOS.",
            source=_DIFFUSERS_PAGE,
            evidence="documented",
        ),
        VersionIs(
            subject="macos",
            wanted=">=12.6",
            recommended=">=13.0",
            hint="update macOS",
            says="Requires macOS 12.6 or later; 13.0 or later is recommended. torch 2.8 and later require macOS 14.",
            source=_DIFFUSERS_PAGE,
            evidence="documented",
        ),
        ArchitectureIs(
            architectures=("arm64",),
            hint="install an arm64 Python: python3 -c 'import platform; print(platform.machine())' must print arm64",
            says="Requires an arm64 build of Python, not one that runs under Rosetta.",
            source=_DIFFUSERS_PAGE,
            evidence="documented",
        ),
        VersionIs(
            subject="torch",
            wanted=">=1.13",
            recommended=">=2.0",
            hint=f"pip install --upgrade torch ({TORCH_INSTALL})",
            says="Requires torch 1.13 or later; 2.0 or later is recommended.",
            source=_DIFFUSERS_PAGE,
            evidence="documented",
        ),
    ),
    installation=(
        InstallCommand(
            command="pip install torch torchvision",
            systems=("Darwin",),
            architectures=("arm64",),
            says="The build on PyPI supports Apple silicon.",
            source=TORCH_INSTALL,
            evidence="documented",
        ),
    ),
    aliases=("metal", "apple"),
    product_pattern=r"m\d",
    products=(
        Product(
            name="apple-silicon",
            title="Mac with Apple silicon (M1 and later)",
            memory_bytes=None,
            per_server=1,
            software="torch on macOS",
            says="The CPU and GPU share memory; macOS recommends using at most 75% to 78% of it for the GPU (37.4 "
            "of 48 GB on one M5 Pro) and reports the exact size.",
            source=_WATERMARKS,
            evidence="hardware",
        ),
    ),
)


class MpsDriver(Driver):
    """The MPS driver.

    MPS has a single device, and the memory functions in `torch.mps` differ from those in `torch.cuda`.
    """

    def synchronize(self, index: int) -> None:
        self.module().synchronize()

    def memory(self, index: int) -> Memory:
        module = self.module()
        total, held = int(module.recommended_max_memory()), int(module.driver_allocated_memory())
        return Memory(
            used_bytes=int(module.current_allocated_memory()), free_bytes=max(0, total - held), total_bytes=total
        )


BACKEND = Backend(sheet=SHEET, driver=MpsDriver)
