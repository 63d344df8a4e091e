"""Backend for Cambricon MLU (`mlu`), based on `torch_mlu`."""

from __future__ import annotations

from anyaccel.backends.citations import ACCELERATE_SOURCE, GB, SCHEDULER_SYNC
from anyaccel.backends.claim import DtypeLimit, RoundTrip, Unknown, Yes
from anyaccel.backends.registry import Backend
from anyaccel.backends.requirement import ModuleFound, SystemIs
from anyaccel.backends.sheet import Compiler, Distributed, DtypeOrder, Dtypes, Product, Sheet

_REPOSITORY = "https://github.com/Cambricon/torch_mlu"
_TYPES = _REPOSITORY + "/blob/0fc9aec1e21145c1fdf2c458e28798ee32a2c3fe/torch_mlu/csrc/aten/utils/types.cpp"
_MODULE = _REPOSITORY + "/blob/0c488210aebc5f37bdaaeb6995dfe27d66ec36d3/torch_mlu/mlu/__init__.py"
_README = _REPOSITORY + "/blob/17f8951733fbe45fcdea31c2ddd10ba234794091/README.md"
_INDUCTOR = _REPOSITORY + "/blob/4ef769f3867d810f80152dec119ef93e7d73b54a/torch_mlu/_inductor/config.py"
_NO_COMPLEX = "https://github.com/huggingface/diffusers/pull/13824"
_TRAINING = "https://github.com/huggingface/diffusers/pull/14791"
_BEFORE_MAJOR_5 = ("mlu370-x8", "mlu290-m5")


def _mlu(name: str, title: str, memory_bytes: int | None, says: str, source: str) -> Product:
    return Product(
        name=name,
        title=title,
        memory_bytes=memory_bytes,
        per_server=None,
        software="torch with torch_mlu and Neuware",
        reported_as=name.upper(),
        says=says,
        source=source,
        evidence="documented",
    )


_FP8 = DtypeLimit(
    says="torch_mlu supports fp8 on device generation 6 and later.",
    source=_MODULE,
    evidence="documented",
    effect="error",
    hint="run in float16",
    only_on=(*_BEFORE_MAJOR_5, "mlu590"),
)

SHEET = Sheet(
    name="mlu",
    title="Cambricon MLU",
    vendor="Cambricon",
    documentation=_REPOSITORY,
    preference=82,
    dtypes=Dtypes(
        float64=DtypeLimit(
            says="Silently stored as float32 on the device.",
            source=_TYPES,
            evidence="documented",
            effect="narrowed",
            hint="use float32, the actual precision on the device",
            becomes="float32",
        ),
        int64=DtypeLimit(
            says="Many kernels, such as compare, nonzero and cummin, cast it to int32 and back.",
            source=_TYPES,
            evidence="documented",
            effect="narrowed",
            hint="keep values below 2**31",
        ),
        float32=Yes(says="Supported by the vendor's kernel library.", source=_TYPES, evidence="documented"),
        float16=Yes(says="Supported by the vendor's kernel library.", source=_TYPES, evidence="documented"),
        bfloat16=DtypeLimit(
            says="torch_mlu supports bfloat16 on device generation 5 and later.",
            source=_MODULE,
            evidence="documented",
            effect="error",
            hint="use float16",
            becomes="float16",
            only_on=_BEFORE_MAJOR_5,
        ),
        complex64=DtypeLimit(
            says="diffusers lists MLU among the devices without complex arithmetic.",
            source=_NO_COMPLEX,
            evidence="documented",
            effect="error",
            hint="use real-valued rotary embeddings",
            contradicted_by=_TYPES,
        ),
        complex128=DtypeLimit(
            says="Silently stored as complex64 on the device.",
            source=_TYPES,
            evidence="documented",
            effect="narrowed",
            hint="use real-valued rotary embeddings",
        ),
        float8_e4m3fn=_FP8,
        float8_e5m2=_FP8,
    ),
    default_dtypes=DtypeOrder(
        says="bfloat16 on device generation 5 and later, float16 on older devices.",
        source=_MODULE,
        evidence="documented",
        order=("bfloat16", "float16", "float32"),
    ),
    random_numbers=Unknown(says="torch_mlu has a random number module; no reports about its quality were found."),
    data_dependent_shapes=Unknown(says="No reports about nonzero or boolean masks on MLU were found."),
    new_shapes=Unknown(says="No reports about the cost of a new shape were found."),
    host_round_trip=RoundTrip(
        says="Drains the queue, as on CUDA; no timing was found.",
        source=SCHEDULER_SYNC,
        evidence="inferred",
        effect="slow",
        hint="keep the scheduler's timesteps on the CPU and call set_begin_index",
        cost_us=None,
    ),
    batches=Unknown(says="No reports about batches on MLU were found."),
    training=Yes(says="A diffusers training test passes on an MLU590.", source=_TRAINING, evidence="hardware"),
    largest_tensor=(Unknown(says="No limit on tensor size was found."),),
    compiler=Compiler(
        says="torch_mlu has its own Inductor settings: max_autotune is enabled, and compilation uses a single thread.",
        source=_INDUCTOR,
        evidence="documented",
        backend="inductor",
        dynamic=False,
        fullgraph=False,
        cache_variable="TORCHINDUCTOR_CACHE_DIR",
        cache_default="torchinductor_$USER in the temporary directory",
    ),
    distributed=Distributed(
        says="accelerate uses the cncl backend.",
        source=ACCELERATE_SOURCE + "state.py",
        evidence="documented",
        backend="cncl",
    ),
    modules=("torch_mlu",),
    visible_devices="MLU_VISIBLE_DEVICES",
    requirements=(
        SystemIs(
            systems=("Linux",),
            hint="use a Linux server with Cambricon cards",
            says="The vendor publishes wheels for Linux.",
            source=_README,
            evidence="documented",
        ),
        ModuleFound(
            module="torch_mlu",
            hint=f"install Neuware and the vendor's torch_mlu wheel for your torch: {_README}",
            says="torch_mlu registers the device with torch.",
            source=_README,
            evidence="documented",
        ),
    ),
    device_files=("/dev/cambricon_dev[0-9]*",),
    aliases=("cambricon",),
    product_pattern=r"mlu\d",
    products=(
        _mlu("mlu590", "Cambricon MLU590", None, "No memory size was found.", _TRAINING),
        _mlu(
            "mlu370-x8",
            "Cambricon MLU370-X8",
            48 * GB,
            "Memory size according to a reseller.",
            "http://guangxilong.com/c/032129635H022.html",
        ),
        _mlu(
            "mlu290-m5",
            "Cambricon MLU290-M5",
            32 * GB,
            "Memory size according to a blog.",
            "http://t.zoukankan.com/kongchung-p-14746622.html",
        ),
    ),
)

BACKEND = Backend(sheet=SHEET)
