"""The Abacus 9000, an invented accelerator: one sheet, and nothing else."""

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
        int64=Yes(says="Two rows make one number.", source=MANUAL, evidence="documented"),
        float32=Yes(says="One row.", source=MANUAL, evidence="documented"),
        float16=Yes(says="Half a row.", source=MANUAL, evidence="documented"),
        bfloat16=Unknown(says="The manual does not say."),
        complex64=Unknown(says="The manual does not say."),
        complex128=Unknown(says="The manual does not say."),
        float8_e4m3fn=Unknown(says="The manual does not say."),
        float8_e5m2=Unknown(says="The manual does not say."),
    ),
    default_dtypes=DtypeOrder(
        says="float32 is one row.", source=MANUAL, evidence="documented", order=("float32", "float16")
    ),
    random_numbers=Limit(
        says="An abacus does not roll dice.",
        source=MANUAL,
        evidence="documented",
        effect="error",
        hint="draw noise on the host",
    ),
    data_dependent_shapes=Limit(
        says="The frame is made to measure.",
        source=MANUAL,
        evidence="documented",
        effect="error",
        hint="keep shapes fixed",
    ),
    new_shapes=Limit(
        says="A carpenter is called.", source=MANUAL, evidence="documented", effect="slow", hint="keep to one size"
    ),
    host_round_trip=RoundTrip(
        says="Somebody has to look.", source=MANUAL, evidence="documented", effect="slow", cost_us=3_000_000.0
    ),
    batches=Yes(says="Frames stand side by side.", source=MANUAL, evidence="documented"),
    training=Unknown(says="Nobody has lived long enough."),
    largest_tensor=(Unknown(says="The manual does not say."),),
    compiler=Compiler(
        says="The carpenter's name.",
        source=MANUAL,
        evidence="documented",
        backend="abacus",
        dynamic=False,
        fullgraph=True,
    ),
    distributed=Distributed(says="By post.", source=MANUAL, evidence="documented", backend="gloo"),
    modules=("torch_abacus",),
    requirements=(
        ModuleFound(
            module="torch_abacus",
            hint="pip install torch-abacus, once somebody has written it",
            says="torch learns of the device from its own module.",
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
            says="Nine thousand beads.",
            source=MANUAL,
            evidence="documented",
        ),
    ),
)

BACKEND = Backend(sheet=SHEET)
