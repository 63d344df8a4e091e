"""The Abacus 9000, a fictional accelerator. A backend needs only a sheet."""

from anyaccel.backends import Backend, Sheet
from anyaccel.backends.claim import DtypeLimit, Limit, RoundTrip, Unknown, Yes
from anyaccel.backends.requirement import ModuleFound
from anyaccel.backends.sheet import Compiler, Distributed, DtypeOrder, Dtypes, Product

MANUAL = "https://example.com/abacus/manual"

SHEET = Sheet(
    name="abacus",
    title="Abacus 9000",
    vendor="Example",
    documentation=MANUAL,
    preference=10,
    dtypes=Dtypes(
        float64=DtypeLimit(
            says="Beads hold 32 bits.",
            source=MANUAL,
            evidence="documented",
            effect="error",
            hint="use float32",
            becomes="float32",
        ),
        int64=Yes(says="int64 is supported.", source=MANUAL, evidence="documented"),
        float32=Yes(says="float32 is supported.", source=MANUAL, evidence="documented"),
        float16=Yes(says="float16 is supported.", source=MANUAL, evidence="documented"),
        bfloat16=Unknown(says="The manual does not say."),
        complex64=Unknown(says="The manual does not say."),
        complex128=Unknown(says="The manual does not say."),
        float8_e4m3fn=Unknown(says="The manual does not say."),
        float8_e5m2=Unknown(says="The manual does not say."),
    ),
    default_dtypes=DtypeOrder(
        says="float32 is the native dtype.", source=MANUAL, evidence="documented", order=("float32", "float16")
    ),
    random_numbers=Limit(
        says="The device has no random number generator.",
        source=MANUAL,
        evidence="documented",
        effect="error",
        hint="draw noise on the CPU",
    ),
    data_dependent_shapes=Limit(
        says="Shapes are fixed at compile time.",
        source=MANUAL,
        evidence="documented",
        effect="error",
        hint="keep shapes fixed",
    ),
    new_shapes=Limit(
        says="Every new shape is compiled.",
        source=MANUAL,
        evidence="documented",
        effect="slow",
        hint="use one image size",
    ),
    host_round_trip=RoundTrip(
        says="Reading a value takes three seconds.",
        source=MANUAL,
        evidence="documented",
        effect="slow",
        cost_us=3_000_000.0,
    ),
    batches=Yes(says="Batches are supported.", source=MANUAL, evidence="documented"),
    training=Unknown(says="The manual does not mention training."),
    largest_tensor=(Unknown(says="The manual does not say."),),
    compiler=Compiler(
        says="torch.compile has a backend named abacus.",
        source=MANUAL,
        evidence="documented",
        backend="abacus",
        dynamic=False,
        fullgraph=True,
    ),
    distributed=Distributed(says="Collectives run on the CPU.", source=MANUAL, evidence="documented", backend="gloo"),
    modules=("torch_abacus",),
    requirements=(
        ModuleFound(
            module="torch_abacus",
            hint="pip install torch-abacus, once somebody has written it",
            says="torch_abacus registers the device with torch.",
            source=MANUAL,
            evidence="documented",
        ),
    ),
    products=(
        Product(
            name="abacus9000",
            title="Abacus 9000",
            memory_bytes=9000,
            per_server=1,
            software="torch with torch_abacus",
            says="The device has 9000 bytes of memory.",
            source=MANUAL,
            evidence="documented",
        ),
    ),
)

BACKEND = Backend(sheet=SHEET)
