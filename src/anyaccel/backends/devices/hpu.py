"""Backend for Intel Gaudi (`hpu`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyaccel.backends.citations import ACCELERATE_SOURCE, DIFFUSERS_SOURCE, GB
from anyaccel.backends.claim import DtypeLimit, Limit, OperationLimit, Quirk, RoundTrip, Unknown, Yes
from anyaccel.backends.driver import Driver
from anyaccel.backends.installation import InstallCommand
from anyaccel.backends.quirks import FLOAT32_ATTENTION
from anyaccel.backends.registry import Backend
from anyaccel.backends.requirement import ModuleFound, SystemIs
from anyaccel.backends.sheet import (
    Compiler,
    Distributed,
    DtypeOrder,
    Dtypes,
    MemoryTerms,
    Mode,
    Product,
    Sheet,
    Variable,
)

if TYPE_CHECKING:
    import torch

_DOCS = "https://docs.habana.ai/en/latest/"
_BRIDGE = "https://github.com/HabanaAI/gaudi-pytorch-bridge/blob/"
_TENSOR_UTILS = _BRIDGE + "f90046f4e6efe15d0e7ba218c974a816cc038c71/backend/helpers/tensor_utils.cpp"
_CAST_TEST = _BRIDGE + "3674ee89149096c57d019bdb52393f48ba16a80e/tests/pytest_working/any_mode/test_hpu_cast.py"
_FRONTEND = _BRIDGE + "47ac7d08773ddccb40511b0070621233c8d845c2/pytorch_helpers/habana_helpers/frontend_utils.cpp"
_FLAGS = _DOCS + "PyTorch/Runtime_Flags.html"
_MATRIX = _DOCS + "PyTorch/Reference/PyTorch_Support_Matrix.html"
_INSTALL = _DOCS + "Installation_Guide/Installation_Methods/Bare_Metal_Installation.html"
_OPTIMUM = "https://github.com/huggingface/optimum-habana/"
_BROKEN_RANDN = (
    _OPTIMUM + "blob/2c4d83fcb817d20e895f3e5b23438ebced330272/"
    "optimum/habana/diffusers/schedulers/scheduling_euler_ancestral_discrete.py"
)
_COMPLEX = "https://github.com/vllm-project/vllm-gaudi/pull/1617"
_TRANSFORMERS = "https://huggingface.co/docs/transformers/perf_train_gaudi"
_PIPELINE_UTILS = DIFFUSERS_SOURCE + "pipelines/pipeline_utils.py"

_FP8_ON_FIRST = DtypeLimit(
    says="Gaudi 2 and Gaudi 3 support fp8; the first Gaudi does not.",
    source=_CAST_TEST,
    evidence="documented",
    effect="error",
    hint="run in bfloat16",
    only_on=("gaudi1",),
)
_NO_COMPLEX = DtypeLimit(
    says="RuntimeError: Complex datatype is not supported on HPU device; complex rotary embeddings fail.",
    source=_COMPLEX,
    evidence="hardware",
    effect="error",
    hint="use real-valued rotary embeddings",
)


def _gaudi(name: str, title: str, memory_bytes: int, software: str) -> Product:
    return Product(
        name=name,
        title=title,
        memory_bytes=memory_bytes,
        per_server=8,
        software=software,
        reported_as=rf"^{name.upper().removesuffix('1')}$",
        says="Eight devices per server; nominal memory size.",
        source=_TRANSFORMERS,
        evidence="documented",
    )


SHEET = Sheet(
    name="hpu",
    title="Intel Gaudi (HPU)",
    vendor="Intel",
    documentation=_DOCS,
    preference=85,
    dtypes=Dtypes(
        float64=DtypeLimit(
            says="Stored as float32 on the device, although torch still reports float64.",
            source=_TENSOR_UTILS,
            evidence="documented",
            effect="narrowed",
            hint="use float32, the actual precision on the device",
            becomes="float32",
        ),
        int64=DtypeLimit(
            says="Stored as int32 on the first Gaudi, and on every Gaudi in lazy mode unless "
            "PT_ENABLE_INT64_SUPPORT=1 is set, although torch still reports int64. In eager mode, Gaudi 2 and 3 keep "
            "int64.",
            source=_TENSOR_UTILS,
            evidence="documented",
            effect="narrowed",
            hint="keep values below 2**31",
            not_in=(("gaudi2", "eager"), ("gaudi3", "eager")),
            # Eager mode keeps int64 on Gaudi 2 and 3.
            contradicted_by="https://github.com/HabanaAI/gaudi-pytorch-bridge",
        ),
        float32=Yes(says="Covered by the vendor's cast test.", source=_CAST_TEST, evidence="documented"),
        float16=DtypeLimit(
            says="float16 is not supported on the first Gaudi.",
            source=_TENSOR_UTILS,
            evidence="documented",
            effect="error",
            hint="use bfloat16",
            becomes="bfloat16",
            only_on=("gaudi1",),
        ),
        bfloat16=Yes(
            says="Covered by the vendor's cast test on every generation.", source=_CAST_TEST, evidence="documented"
        ),
        complex64=_NO_COMPLEX,
        complex128=_NO_COMPLEX,
        float8_e4m3fn=_FP8_ON_FIRST,
        float8_e5m2=_FP8_ON_FIRST,
    ),
    default_dtypes=DtypeOrder(
        says="Every generation supports bfloat16; in accelerate's own test, float16 results differed by 10% from "
        "the CPU.",
        source=ACCELERATE_SOURCE + "test_utils/scripts/test_script.py",
        evidence="hardware",
        order=("bfloat16", "float32"),
    ),
    random_numbers=Limit(
        says="Optimum's pipelines draw noise on the CPU: 'torch.randn is broken on HPU so running it on CPU'.",
        source=_BROKEN_RANDN,
        evidence="inferred",
        effect="wrong",
        hint="draw noise on the CPU, as anyaccel.randn does",
        contradicted_by="https://github.com/huggingface/diffusers/pull/11328",  # its pipelines drew noise on the device
    ),
    data_dependent_shapes=Limit(
        says="Supported in every mode, but every new output shape triggers a recompilation.",
        source=_DOCS + "PyTorch/Model_Optimization_PyTorch/Dynamic_Shapes.html",
        evidence="documented",
        effect="slow",
        hint="keep shapes fixed; set PT_HPU_METRICS_FILE to count compilations",
    ),
    new_shapes=Limit(
        says="Every new shape, such as another resolution, triggers a recompilation.",
        source=_DOCS + "PyTorch/Model_Optimization_PyTorch/Dynamic_Shapes.html",
        evidence="documented",
        effect="slow",
        hint="use only a few sizes",
    ),
    host_round_trip=RoundTrip(
        says="`.item()` copies synchronously and busy-waits until the copy has finished.",
        source=_FRONTEND,
        evidence="documented",
        effect="slow",
        hint="keep the scheduler's timesteps on the CPU and call set_begin_index",
        cost_us=None,
    ),
    batches=Yes(
        says="Stable Diffusion 3 ran with batch sizes from 1 to 8.", source=_OPTIMUM + "pull/1682", evidence="hardware"
    ),
    training=Yes(says="Supported in eager and lazy mode.", source=_MATRIX, evidence="documented"),
    fused_attention=Limit(
        says="Unfused attention needed 27 GiB; the vendor's FusedSDPA needed 1 GiB.",
        source="https://github.com/vllm-project/vllm-gaudi/pull/249",
        evidence="inferred",
        effect="slow",
        hint="slice the attention",
    ),
    memory=MemoryTerms(
        says="94.62 GiB is usable on Gaudi 2 and 29.85 GiB on the first Gaudi, close to the nominal size in GB "
        "(https://github.com/huggingface/optimum-habana/pull/89).",
        source="https://github.com/huggingface/optimum-habana/pull/1111",
        evidence="hardware",
    ),
    largest_tensor=(Unknown(says="No limit on tensor size was found."),),
    operations=(
        OperationLimit(
            name="masked_fill_int64",
            says="masked_fill on int64 tensors fails on the first Gaudi (masked_fill_fwd_i64, synStatus 26).",
            source="https://github.com/huggingface/transformers/pull/36424",
            evidence="hardware",
            effect="error",
            hint="call masked_fill on an int32 tensor",
            operations=("masked_fill", "masked_fill_"),
            dtypes=("int64",),
            only_on=("gaudi1",),
        ),
    ),
    quirks=(
        Quirk(
            name="mode_decides_speed",
            information_only=True,
            says="Flux with 28 steps generated 0.399 images per second in eager mode, 0.002 in lazy mode and 0.086 "
            "with HPU graphs.",
            source=_OPTIMUM + "pull/1331",
            evidence="hardware",
            effect="slow",
            hint="choose the mode for each model with PT_HPU_LAZY_MODE, set before habana_frameworks is imported",
        ),
        Quirk(
            name=FLOAT32_ATTENTION,
            says="Eager mode runs attention in float32 by default.",
            source="https://github.com/huggingface/diffusers/pull/12310",
            evidence="documented",
            effect="slow",
            hint="allow bfloat16 reductions in attention (sdp_on_bf16)",
        ),
        Quirk(
            name="migration_fakes_cuda",
            information_only=True,
            says="With PT_HPU_GPU_MIGRATION=1, torch.cuda and the nccl backend appear to be available.",
            source=_DOCS + "PyTorch/PyTorch_Model_Porting/GPU_Migration_Toolkit/GPU_Migration_Toolkit.html",
            evidence="documented",
            effect="wrong",
            hint="do not rely on torch.cuda.is_available() on Gaudi",
        ),
    ),
    compiler=Compiler(
        says="hpu_backend works only in eager mode (PT_HPU_LAZY_MODE=0); inductor is not supported.",
        source=_MATRIX,
        evidence="documented",
        backend="hpu_backend",
        dynamic=True,
        fullgraph=False,
        cache_variable="PT_HPU_RECIPE_CACHE_CONFIG",
        cache_value="{},false,1024,false",
    ),
    distributed=Distributed(
        says="The hccl backend is available once its module is imported.",
        source=_DOCS + "PyTorch/PyTorch_Scaling_Guide/Distributed_Backend_Initialization.html",
        evidence="documented",
        backend="hccl",
        module="habana_frameworks.torch.distributed.hccl",
    ),
    modes=(
        Mode(
            name="eager",
            settings=(("PT_HPU_LAZY_MODE", "0"),),
            says="The vendor's default, required by hpu_backend, and the fastest mode for Flux: 0.399 images per "
            "second, compared with 0.086 with HPU graphs and 0.002 in lazy mode.",
            source=_OPTIMUM + "pull/1331",
            evidence="hardware",
        ),
        Mode(
            name="lazy",
            settings=(("PT_HPU_LAZY_MODE", "1"),),
            captures=True,
            says="Operations are collected into graphs, and the denoiser is captured as an HPU graph, which only "
            "this mode supports; suited to launch-bound models.",
            source=_MATRIX,
            evidence="documented",
        ),
    ),
    modules=("habana_frameworks.torch",),
    variables=(
        Variable(
            name="PT_HPU_GPU_MIGRATION",
            value="1",
            when="before_import",
            switch="hpu_migration",
            says="Maps CUDA calls to the HPU; diffusers sets it in .to('hpu').",
            source=_PIPELINE_UTILS,
            evidence="documented",
        ),
        Variable(
            name="PT_HPU_MAX_COMPOUND_OP_SIZE",
            value="1",
            when="before_run",
            says="Limits the number of operations per graph; diffusers sets it in .to('hpu').",
            source=_PIPELINE_UTILS,
            evidence="documented",
        ),
        Variable(
            name="PT_HPU_LAZY_MODE",
            value="",
            when="by_user",
            says="0 selects eager mode, the default in releases after 1.21; 1 selects lazy mode, the only one with "
            "HPU graphs.",
            source=_FLAGS,
            evidence="documented",
        ),
        Variable(
            name="PT_HPU_RECIPE_CACHE_CONFIG",
            value="",
            when="by_user",
            says="Format: PATH,DELETE,MEGABYTES,NFS. With the default (,false,1024,false), nothing is cached on disk.",
            source=_FLAGS,
            evidence="documented",
        ),
        Variable(
            name="PT_ENABLE_INT64_SUPPORT",
            value="",
            when="by_user",
            says="1 enables int64 in lazy mode.",
            source=_TRANSFORMERS,
            evidence="documented",
        ),
    ),
    visible_devices="HABANA_VISIBLE_MODULES",
    ray_resource="HPU",
    requirements=(
        SystemIs(
            systems=("Linux",),
            hint="use a Linux server with Gaudi cards",
            says="The vendor supports only Linux.",
            source=_DOCS + "Support_Matrix/Support_Matrix.html",
            evidence="documented",
        ),
        ModuleFound(
            module="habana_frameworks.torch",
            hint=f"install Intel's torch and plugin: habanalabs-installer.sh install --type pytorch ({_INSTALL})",
            says="Intel's plugin registers the device with torch; it requires Intel's own build of torch.",
            source=_INSTALL,
            evidence="documented",
        ),
    ),
    installation=(
        InstallCommand(
            command="habanalabs-installer.sh install --type pytorch",
            systems=("Linux",),
            says="Installs Intel's build of torch with the plugin; the script is part of the Gaudi software.",
            source=_INSTALL,
            evidence="documented",
        ),
    ),
    device_files=("/dev/accel/accel[0-9]*",),
    pci_vendor="0x1da3",
    aliases=("gaudi", "habana"),
    product_pattern=r"gaudi-?\d",
    products=(
        _gaudi("gaudi3", "Intel Gaudi 3", 128 * GB, "torch with habana_frameworks.torch"),
        _gaudi("gaudi2", "Intel Gaudi 2", 96 * GB, "torch with habana_frameworks.torch"),
        _gaudi("gaudi1", "Intel Gaudi (first generation)", 32 * GB, "torch with habana_frameworks.torch, up to 1.21"),
    ),
)


class HpuDriver(Driver):
    """The Gaudi driver: each process uses one device, and `synchronize` does not accept an index."""

    def synchronize(self, index: int) -> None:
        self.module().synchronize()

    def capture(self, model: torch.nn.Module) -> torch.nn.Module:
        import habana_frameworks.torch as vendor  # type: ignore[import-not-found]

        wrapped: torch.nn.Module = vendor.hpu.wrap_in_hpu_graph(model)
        return wrapped


BACKEND = Backend(sheet=SHEET, driver=HpuDriver)
