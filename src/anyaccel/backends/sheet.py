"""The capability sheet: everything that anyaccel knows about one accelerator, as frozen data.

Code asks a sheet for a capability (`sheet.rng_on_device`), never a device for its name. What is not known is an
`Unknown`, never a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

from anyaccel.backends.claim import Answer, Claim, DtypeLimit, Limit, OperationLimit, Quirk, SizeLimit, Unknown, Yes
from anyaccel.backends.requirement import Requirement
from anyaccel.errors import UnknownProductError, nearest

__all__ = [
    "Compiler",
    "Distributed",
    "DtypeOrder",
    "Dtypes",
    "MemoryTerms",
    "Mode",
    "Product",
    "Quantization",
    "Sheet",
    "Speedup",
    "Variable",
]

LimitT = TypeVar("LimitT", bound=Limit)

_NO_WORD_ON_ATTENTION = Unknown(says="Whether attention holds all its scores was not found.")
_NO_WORD_ON_MEMORY = Unknown(says="What the device's software keeps for itself was not found.")


@dataclass(frozen=True, kw_only=True)
class DtypeOrder(Claim):
    """The number types to run a model in, the best first."""

    order: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """Whether the device takes each number type."""

    float64: Answer
    int64: Answer
    float32: Answer
    float16: Answer
    bfloat16: Answer
    complex64: Answer
    complex128: Answer
    float8_e4m3fn: Answer
    float8_e5m2: Answer


@dataclass(frozen=True, kw_only=True)
class Compiler(Claim):
    """How `torch.compile` is called for the device, and where its results are kept."""

    backend: str
    """The `backend=` of `torch.compile`: `inductor`."""
    dynamic: bool
    """Whether `dynamic=True` is taken; otherwise every shape is a graph of its own."""
    fullgraph: bool
    """Whether a graph must be whole: a break is an error, or costs more than it saves."""
    modes: tuple[str, ...] = ("default",)
    cache_variable: str = ""
    """The environment variable that names the cache folder; empty where none is known."""
    cache_value: str = "{}"
    """How that variable names a folder, with `{}` in its place: `{},false,1024,false`."""
    cache_default: str = ""
    """Where results go without that variable; empty where they are not kept on disk or it is not known."""


@dataclass(frozen=True, kw_only=True)
class Variable(Claim):
    """An environment variable of the vendor's software."""

    name: str
    value: str
    """The value that diffusion needs; empty where it is left to the user."""
    when: Literal["before_import", "before_run", "by_user"]
    switch: str = ""
    """The wish that turns it off: `hpu_migration`; empty where it is always set."""


@dataclass(frozen=True, kw_only=True)
class Mode(Claim):
    """One way in which the vendor's software executes, chosen before it is imported."""

    name: str
    """`eager`, `lazy`."""
    settings: tuple[tuple[str, str], ...] = ()
    """The variables that choose it, with their values: `(("PT_HPU_LAZY_MODE", "0"),)`."""
    captures: bool = False
    """Whether the denoiser is recorded as a graph of the device and replayed."""


@dataclass(frozen=True, kw_only=True)
class Distributed(Claim):
    """The backend of `torch.distributed` for several devices of this kind."""

    backend: str
    module: str = ""
    """A module that must be imported first."""


@dataclass(frozen=True, kw_only=True)
class MemoryTerms(Claim):
    """How much of a device's memory tensors can have, and how it is handed out."""

    shares: tuple[tuple[int | None, float], ...] = ((None, 1.0),)
    """The share of the memory on the label that the system lets the device have, up to which size: the first that fits
    holds; None means any."""
    kept_bytes: int = 0
    """What the device's own software keeps of that."""
    segment_bytes: int = 0
    """Large tensors get whole segments of this size; 0 where they get what they need."""
    fixed_bytes: int = 0
    """What libraries hold beside the tensors once they have run."""

    def usable_bytes(self, total: int) -> int:
        """What is left for tensors of the memory on the label."""
        share = next(share for most, share in self.shares if most is None or total <= most)
        return max(0, int(total * share) - self.kept_bytes)


@dataclass(frozen=True, kw_only=True)
class Quantization(Claim):
    """A form of smaller weights that diffusers loads on the device."""

    name: str
    """As its library is called: `gguf-q4`."""
    bits: float
    """For one number, with the scales that go with it."""


@dataclass(frozen=True, kw_only=True)
class Speedup(Claim):
    """A way to be faster."""

    name: str
    """`capture`, `channels_last`, `compile`, `group_norm`, `float8`."""
    gain: float
    """How many times as fast what it is for becomes, as it was measured or is expected."""


@dataclass(frozen=True, kw_only=True)
class Product(Claim):
    """One product that can be bought or rented, counted as torch counts devices."""

    name: str
    """Lower case, as on the command line: `gaudi2`."""
    title: str
    memory_bytes: int | None
    """Memory of one device; None where it varies or is not known."""
    per_server: int | None
    """Devices in one server or instance of the usual size; None where it varies."""
    software: str
    """What runs it."""
    native: bool = True
    """Whether that software is a torch device, so that a plan can run there at all."""
    reported_as: str = ""
    """A pattern of the name that the device gives itself: `H200`; empty where it was not found."""


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """What one accelerator can do, what it cannot, and how each is known."""

    name: str
    """The name that users write: `hpu`."""
    title: str
    vendor: str
    documentation: str
    """The address of the vendor's own documentation."""
    device_type: str = ""
    """torch's name of the device where it differs: `cuda` for ROCm."""
    torch_build: str = ""
    """The key in `torch.version` that a build for this device sets: `hip`; empty where any build does."""
    preference: int
    """`auto` takes the available device with the highest number."""
    can_be_virtual: bool = True
    """Whether a virtual one makes sense: not where the CPU itself is the device, or the vendor's code is everywhere."""
    is_host: bool = False
    """Whether the device is the CPU of this machine: its memory is host memory, and its cores are its devices."""
    unified_memory: bool = False
    """Whether the device and the host share one memory, so that moving to the host frees nothing."""

    dtypes: Dtypes
    default_dtypes: DtypeOrder
    random_numbers: Answer
    """Random numbers drawn on the device."""
    data_dependent_shapes: Answer
    """Operations whose result's shape depends on values: `nonzero`, masks."""
    new_shapes: Answer
    """A shape that was not seen before."""
    host_round_trip: Answer
    """Reading a value back in the middle of a run: `item()`, `.cpu()`."""
    batches: Answer
    """Several images in one call."""
    training: Answer
    fused_attention: Answer = _NO_WORD_ON_ATTENTION
    """Attention that never holds its scores whole."""
    memory: MemoryTerms | Unknown = _NO_WORD_ON_MEMORY
    """What of its memory tensors can have."""
    quantized_weights: tuple[Quantization, ...] = ()
    """The forms of smaller weights that can be had there; they are offered, and never taken silently."""
    speedups: tuple[Speedup, ...] = ()
    """What pays there and changes no picture."""
    largest_tensor: tuple[SizeLimit | Yes | Unknown, ...]
    operations: tuple[OperationLimit, ...] = ()
    quirks: tuple[Quirk, ...] = ()

    compiler: Compiler | Unknown
    distributed: Distributed | Unknown
    modes: tuple[Mode, ...] = ()
    """The ways in which it executes, the default first; empty where there is one."""
    modules: tuple[str, ...] = ()
    """Imported before the first use, so that torch learns of the device."""
    variables: tuple[Variable, ...] = ()
    visible_devices: str = ""
    """The environment variable that picks which devices a process sees."""
    ray_resource: str = ""
    """What Ray counts such devices as by itself, as 2.60 does in `_private/accelerators`: `GPU`; empty where it does
    not, and a node must be started with a resource of the sheet's name."""
    requirements: tuple[Requirement, ...] = ()
    device_files: tuple[str, ...] = ()
    """Where Linux shows that the hardware is there, as patterns: `/dev/neuron*`."""
    pci_vendor: str = ""
    """The vendor of those files' hardware where other vendors' have files of that name: `0x1da3`."""
    products: tuple[Product, ...] = ()
    aliases: tuple[str, ...] = ()
    """Other words for the device: `gaudi` for `hpu`."""
    product_pattern: str = ""
    """A pattern of the vendor's product names, for the hint about a product that is not listed: `rtx`."""

    @property
    def torch_name(self) -> str:
        """The name in `torch.device(…)`: `cuda` for ROCm, the sheet's own name otherwise."""
        return self.device_type or self.name

    @property
    def rng_on_device(self) -> bool:
        """Whether a source says that random numbers can be drawn on the device; the host draws them otherwise."""
        return isinstance(self.random_numbers, Yes)

    @property
    def static_shapes(self) -> bool:
        """Whether every shape must be known when a graph is made."""
        return _lacks(self.data_dependent_shapes)

    @property
    def reliable_batches(self) -> bool:
        """Whether nothing is known against several images in one call."""
        return not _lacks(self.batches)

    @property
    def trains(self) -> bool:
        """Whether a source says that models can be trained there."""
        return isinstance(self.training, Yes)

    def dtype(self, name: str) -> Answer:
        """Whether the device takes a number type; Unknown for one that no sheet speaks of."""
        answer: Answer = getattr(self.dtypes, name, Unknown(says=f"no sheet speaks of {name}"))
        return answer

    def adjusted_dtype(self, name: str) -> str:
        """The number type to ask for instead of `name`: `float32` for `float64` on a device without it."""
        answer = self.dtype(name)
        if isinstance(answer, DtypeLimit) and not answer.conditional and answer.becomes:
            return answer.becomes
        return name

    def has_quirk(self, name: str) -> bool:
        """Whether a quirk holds here for certain; one with an open condition does not."""
        return any(quirk.name == name and not quirk.conditional for quirk in self.quirks)

    def speedup(self, name: str) -> Speedup | None:
        """The way of that name to be faster, if it is known to pay here."""
        return next((one for one in self.speedups if one.name == name), None)

    def usable_bytes(self, total: int) -> int:
        """What tensors can have of a device with that much memory on its label."""
        return self.memory.usable_bytes(total) if isinstance(self.memory, MemoryTerms) else total

    def product(self, name: str) -> Product:
        """The product of that name: `gaudi2`."""
        for product in self.products:
            if product.name.lower() == str(name).lower():
                return product
        known = [product.name for product in self.products]
        raise UnknownProductError(
            f"{self.title} ({self.name}) has no product {name!r} on its sheet", hint=nearest(str(name), known)
        )

    def claims(self) -> Iterator[tuple[str, Claim | Unknown]]:
        """Every statement of the sheet with its name: `("dtypes.float64", DtypeLimit(…))`."""
        for field in fields(self):
            yield from _walk(field.name, getattr(self, field.name))

    def with_claims(self, changes: Mapping[str, Claim | Unknown]) -> Sheet:
        """The sheet with some statements exchanged, by the names that `claims` gives them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: _exchange(name, value, changes) for name, value in values.items()})

    def limits(self, kind: type[LimitT]) -> dict[str, LimitT]:
        """The limits of one kind by name; `sheet.limits(Limit)` gives them all."""
        return {name: claim for name, claim in self.claims() if isinstance(claim, kind)}

    def on(self, product: str | None = None, versions: Mapping[str, str] | None = None) -> Sheet:
        """The sheet as it reads for one product and set of versions: each condition that can be decided is.

        >>> anyaccel.sheet("hpu").on(product="gaudi2").dtype("float16")  # doctest: +SKIP
        Yes(…)
        """
        if product is not None:
            product = self.product(product).name
        changes = {field.name: _settle(getattr(self, field.name), product, versions or {}) for field in fields(self)}
        return replace(self, **changes)


def _lacks(answer: Answer) -> bool:
    """Whether it fails for certain: an open question or condition does not, and what is only slow works."""
    return isinstance(answer, Limit) and not answer.conditional and answer.effect != "slow"


def _walk(path: str, value: object) -> Iterator[tuple[str, Claim | Unknown]]:
    if isinstance(value, Claim | Unknown):
        yield path, value
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _walk(f"{path}.{_label(item, index)}", item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _walk(f"{path}.{field.name}", getattr(value, field.name))


def _label(item: object, index: int) -> str:
    return getattr(item, "name", "") or getattr(item, "of", "") or str(index)


def _exchange(path: str, value: Any, changes: Mapping[str, Claim | Unknown]) -> Any:
    """The same value with the statements inside it that are to be exchanged."""
    if isinstance(value, Claim | Unknown):
        return changes.get(path, value)
    if isinstance(value, tuple):
        return tuple(_exchange(f"{path}.{_label(item, index)}", item, changes) for index, item in enumerate(value))
    if isinstance(value, Dtypes):
        parts = {f.name: _exchange(f"{path}.{f.name}", getattr(value, f.name), changes) for f in fields(value)}
        return Dtypes(**parts)
    return value


def _settle(value: Any, product: str | None, versions: Mapping[str, str]) -> Any:
    """The same value with every limit inside it kept, dropped or turned into a Yes."""
    if isinstance(value, tuple):
        settled = (_settle(item, product, versions) for item in value)
        kept = [new for old, new in zip(value, settled, strict=True) if not (isinstance(old, Limit) and _is_yes(new))]
        return tuple(kept)
    if isinstance(value, Limit) and value.conditional:
        verdict = value.applies(product, versions)
        if verdict is None:
            return value
        if verdict:
            return replace(value, only_on=(), only_if=())
        return Yes(says=f"Not here: {value.says}", source=value.source, evidence="inferred")
    if isinstance(value, Dtypes):
        return Dtypes(**{f.name: _settle(getattr(value, f.name), product, versions) for f in fields(value)})
    return value


def _is_yes(value: object) -> bool:
    return isinstance(value, Yes)
