"""Backend for AWS Trainium and Inferentia, based on the native torch device `neuron`."""

from __future__ import annotations

from anyaccel.backends.citations import ACCELERATE_SOURCE, DIFFUSERS_SOURCE, DIFFUSERS_TORCH_UTILS, GIB
from anyaccel.backends.claim import DtypeLimit, Limit, OperationLimit, Quirk, RoundTrip, Unknown, Yes
from anyaccel.backends.driver import Driver, Memory
from anyaccel.backends.installation import InstallCommand
from anyaccel.backends.registry import Backend
from anyaccel.backends.requirement import ArchitectureIs, ModuleFound, SystemIs, VersionIs
from anyaccel.backends.sheet import Compiler, Distributed, DtypeOrder, Dtypes, MemoryTerms, Product, Sheet, Variable

_DOCS = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/"
_DOCS_2_33 = "https://awsdocs-neuron.readthedocs-hosted.com/en/v2.33.0/"
_COMPILE = _DOCS + "torch/compile/reference-torch-compile.html"
_VARIABLES = _DOCS + "torch/reference/env-vars.html"
_ERRORS = _DOCS + "compiler/error-codes/index.html"
_SETUP = _DOCS_2_33 + "setup/pytorch/index.html"
_RELEASE = _DOCS + "release-notes/components/torchneuron.html"
_UPDATE = _DOCS_2_33 + "setup/pytorch/update-manual.html"
_PULL = "https://github.com/huggingface/diffusers/pull/13289"
_BACKEND = "https://github.com/aws-neuron/torch-neuronx"
_SDK = "https://github.com/aws-neuron/aws-neuron-sdk/blob/master/"

_NATIVE = "torch_neuronx 2.13 or 2.14 (native torch device), Neuron SDK 2.33 and later"
_XLA = "torch-neuronx on torch-xla, last shipped with Neuron SDK 2.31: not a torch device, so no plan can run on it"


def _product(name: str, title: str, gib: int, per_server: int, says: str, source: str, native: bool = True) -> Product:
    return Product(
        name=name,
        title=title,
        memory_bytes=gib * GIB,
        per_server=per_server,
        software=_NATIVE if native else _XLA,
        native=native,
        says=says,
        source=source,
        evidence="inferred",
    )


SHEET = Sheet(
    name="neuron",
    title="AWS Neuron (Trainium, Inferentia)",
    vendor="AWS",
    documentation=_DOCS,
    preference=84,
    dtypes=Dtypes(
        float64=DtypeLimit(
            says="Pipelines failed on float64 rotary and timestep embeddings until diffusers cast them.",
            source=_PULL,
            evidence="documented",
            effect="error",
            hint="use float32; anyaccel.adjust_dtype returns the dtype to use",
            becomes="float32",
            contradicted_by=_BACKEND,  # its tests show float64 computed as float32 via the CPU
        ),
        int64=DtypeLimit(
            says="Reported as int64 but computed as int32, with a round trip to the CPU.",
            source=_BACKEND,
            evidence="documented",
            effect="narrowed",
            hint="use int32 for ids and float32 for timesteps",
            becomes="int32",
        ),
        float32=Yes(says="Supported by the tensor engine.", source=_DOCS, evidence="documented"),
        float16=Yes(says="Supported by the tensor engine.", source=_DOCS, evidence="documented"),
        bfloat16=Yes(says="The pipelines validated for diffusers ran in bfloat16.", source=_PULL, evidence="hardware"),
        complex64=DtypeLimit(
            says="The compiler rejects complex dtypes (NCC_EVRF004).",
            source=_ERRORS,
            evidence="documented",
            effect="error",
            hint="use real-valued rotary embeddings",
            contradicted_by=_VARIABLES,  # TORCH_NEURONX_COMPLEX_DECOMPOSE is on by default from torch 2.13
        ),
        complex128=DtypeLimit(
            says="The compiler rejects complex dtypes (NCC_EVRF004).",
            source=_ERRORS,
            evidence="documented",
            effect="error",
            hint="use real-valued rotary embeddings",
        ),
        float8_e4m3fn=DtypeLimit(
            says="Data type F8E4M3FN is not supported on Trn1 and Trn2 (NCC_EVRF051).",
            source=_ERRORS,
            evidence="documented",
            effect="error",
            hint="run in bfloat16",
            only_on=("trn2", "trn1", "inf2"),
        ),
        float8_e5m2=Unknown(says="No reports about float8_e5m2 were found."),
    ),
    default_dtypes=DtypeOrder(
        says="The pull request that added Neuron support to diffusers validated its pipelines in bfloat16.",
        source=_PULL,
        evidence="hardware",
        order=("bfloat16", "float32"),
    ),
    random_numbers=Limit(
        says="The device has no random number generator, so random tensors cannot be created on it.",
        source=_PULL,
        evidence="documented",
        effect="error",
        hint="draw noise on the CPU, as anyaccel.randn does",
        contradicted_by=_BACKEND,  # its tests show torch.randn falling back to the CPU and its generator
    ),
    data_dependent_shapes=Limit(
        says="Dynamic shapes are not supported (NCC_EMOD025); the scheduler's timestep lookup failed with this error.",
        source=_DOCS + "compiler/error-codes/EMOD025.html",
        evidence="documented",
        effect="error",
        hint="keep the scheduler's timesteps on the CPU and call set_begin_index",
        contradicted_by=_BACKEND,  # its tests show that eager nonzero runs on the device
    ),
    new_shapes=Limit(
        says="Every new shape, including every new batch size, triggers a recompilation.",
        source=ACCELERATE_SOURCE + "utils/operations.py",
        evidence="documented",
        effect="slow",
        hint="use only a few sizes, and warm them up",
    ),
    host_round_trip=RoundTrip(
        says="The SDXL and PixArt pipelines keep their timesteps on the CPU to avoid round trips; no timing was found.",
        source="https://github.com/huggingface/diffusers/pull/13718",
        evidence="documented",
        effect="slow",
        hint="keep the scheduler's timesteps on the CPU and call set_begin_index",
        cost_us=None,
    ),
    batches=Yes(says="SDXL with guidance runs with a batch size of two.", source=_PULL, evidence="inferred"),
    training=Limit(
        says="diffusers lists training as unsupported.",
        source=DIFFUSERS_TORCH_UTILS,
        evidence="documented",
        effect="error",
        hint="train with the vendor's own libraries",
        contradicted_by=_SDK + "frameworks/torch/pytorch-native-overview.rst",
    ),
    memory=MemoryTerms(
        says="Each core reserves 96 MB for microcode, and a logical core consists of two cores; graphs, rings and "
        "scratch buffers need additional memory.",
        source=_DOCS + "neuron-runtime/explore/device-memory.html",
        evidence="documented",
        kept_bytes=2 * 96 * 2**20,
    ),
    largest_tensor=(Unknown(says="No limit on tensor size was found, but graph size is limited; see the quirks."),),
    operations=(
        OperationLimit(
            name="repeat_interleave_by_tensor",
            says="repeat_interleave with a tensor of repeats cannot be lowered.",
            source=DIFFUSERS_SOURCE + "models/transformers/transformer_qwenimage21.py",
            evidence="documented",
            effect="error",
            hint="pass an integer as repeats",
            operations=("repeat_interleave.Tensor",),
        ),
    ),
    quirks=(
        Quirk(
            name="instruction_limit",
            information_only=True,
            says="A graph with too many instructions is rejected (NCC_EBVF030); the limit is not documented.",
            source=_DOCS_2_33 + "_sources/compiler/error-codes/EBVF030.rst",
            evidence="documented",
            effect="error",
            hint="compile each component separately, at a smaller size",
        ),
        Quirk(
            name="reserves_all_cores",
            information_only=True,
            says="A process reserves all cores by default, and no other process can use them until it exits.",
            source=_DOCS_2_33 + "neuron-runtime/guides/configuration-guide.html",
            evidence="documented",
            effect="error",
            hint="set NEURON_RT_VISIBLE_CORES",
        ),
        Quirk(
            name="float32_products_in_bfloat16",
            information_only=True,
            says="The compiler casts float32 matrix products to bfloat16 by default.",
            source=_DOCS + "general/appnotes/neuronx-cc/neuronx-cc-training-mixed-precision.html",
            evidence="documented",
            effect="narrowed",
            hint="pass --auto-cast=none to the compiler",
        ),
    ),
    compiler=Compiler(
        says="dynamic=True is rejected, every new shape triggers a recompilation, only the default mode has an "
        "effect, and full graphs are recommended.",
        source=_COMPILE,
        evidence="hardware",
        backend="neuron",
        dynamic=False,
        fullgraph=True,
        cache_variable="TORCH_NEURONX_NEFF_CACHE_DIR",
        cache_default="/tmp/neff_cache",
    ),
    distributed=Distributed(
        says="The backend has the same name as the device.",
        source=ACCELERATE_SOURCE + "state.py",
        evidence="documented",
        backend="neuron",
    ),
    modules=("torch_neuronx",),
    variables=(
        Variable(
            name="TORCH_NEURONX_NEFF_CACHE_DIR",
            value="",
            when="by_user",
            says="Directory of compiled graphs; read once, at the first compilation.",
            source=_VARIABLES,
            evidence="documented",
        ),
        Variable(
            name="TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION",
            value="",
            when="by_user",
            says="A failed compilation raises an error unless this is 0.",
            source=_VARIABLES,
            evidence="documented",
        ),
    ),
    visible_devices="NEURON_RT_VISIBLE_CORES",
    ray_resource="neuron_cores",
    requirements=(
        SystemIs(
            systems=("Linux",),
            hint="use an AWS instance with Trn2 or Trn3 chips",
            says="Wheels are published for Ubuntu.",
            source=_RELEASE,
            evidence="documented",
        ),
        ArchitectureIs(
            architectures=("x86_64",),
            hint="use an x86_64 instance (trn2, trn3)",
            says="Wheels are published for x86_64.",
            source=_RELEASE,
            evidence="documented",
        ),
        VersionIs(
            subject="python",
            wanted=">=3.12,<3.15",
            hint="use Python 3.12, 3.13 or 3.14",
            says="The native backend is built for Python 3.12 to 3.14.",
            source=_RELEASE,
            evidence="documented",
        ),
        ModuleFound(
            module="torch_neuronx",
            hint=f'pip install "torch-neuronx==2.14.*" "neuronx-cc==2.*" nki, from AWS\'s own index: {_UPDATE}',
            says="torch_neuronx registers the device with torch.",
            source=_UPDATE,
            evidence="documented",
        ),
    ),
    installation=(
        InstallCommand(
            command='pip install "torch-neuronx==2.14.*" "neuronx-cc==2.*" nki',
            systems=("Linux",),
            architectures=("x86_64",),
            says="The packages are in AWS's own index, which must be added to pip's configuration.",
            source=_UPDATE,
            evidence="documented",
        ),
    ),
    device_files=("/dev/neuron[0-9]*",),
    aliases=("trainium", "inferentia"),
    product_pattern=r"(trn|inf)\d",
    products=(
        _product(
            "trn3",
            "AWS Trainium 3 (one logical core)",
            36,
            256,
            "64 chips with 144 GiB and 8 cores each per UltraServer; two cores form one device, as on Trn2 (inferred).",
            _SDK + "about-neuron/arch/neuron-hardware/trn3-arch.rst",
        ),
        _product(
            "trn2",
            "AWS Trainium 2 (one logical core)",
            24,
            64,
            "16 chips with 96 GiB and 8 cores each per instance; two cores form one device.",
            _DOCS + "training/best-practices.html",
        ),
        _product(
            "trn1",
            "AWS Trainium (one core)",
            16,
            32,
            "16 chips with 32 GiB and 2 cores each per instance. The native backend supports only Trn2 and Trn3.",
            _SETUP,
            native=False,
        ),
        _product(
            "inf2",
            "AWS Inferentia 2 (one core)",
            16,
            24,
            "Up to 12 chips with 32 GiB and 2 cores each per instance. The native backend supports only Trn2 and Trn3.",
            _SETUP,
            native=False,
        ),
    ),
)


class NeuronDriver(Driver):
    """The Neuron driver.

    It synchronizes before it reads memory statistics, and computes free memory as total memory minus
    reserved memory.
    """

    def synchronize(self, index: int) -> None:
        self.module().synchronize()

    def memory(self, index: int) -> Memory:
        module = self.module()
        module.synchronize()
        total = int(module.get_device_properties(index).total_memory)
        held = int(module.memory_reserved(index))
        used = int(module.memory_allocated(index))
        return Memory(used_bytes=used, free_bytes=max(0, total - held), total_bytes=total)


BACKEND = Backend(sheet=SHEET, driver=NeuronDriver)
