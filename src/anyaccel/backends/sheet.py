"""Capability sheets: what anyaccel knows about each accelerator, as frozen dataclasses.

Code checks capabilities such as `sheet.rng_on_device` instead of device names. A capability without
a source is an explicit `Unknown`; see docs/decisions/0001-answers.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

from anyaccel.backends.claim import Answer, Claim, DtypeLimit, Limit, OperationLimit, Quirk, SizeLimit, Unknown, Yes
from anyaccel.backends.installation import InstallCommand
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

_UNKNOWN_ATTENTION = Unknown(says="It is not known whether attention materializes the full score matrix.")
_UNKNOWN_MEMORY = Unknown(says="No figure for the memory reserved by the driver and runtime was found.")


@dataclass(frozen=True, kw_only=True)
class DtypeOrder(Claim):
    """The dtypes in which to run a model, in order of preference."""

    order: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """Claims about whether the device supports each dtype."""

    # No defaults: a new sheet must answer for every dtype, if only with Unknown.
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
    """Arguments to `torch.compile` for the device, and the compiler's cache directory."""

    backend: str
    """The `backend=` of `torch.compile`: `inductor`."""
    dynamic: bool
    """Whether `dynamic=True` is supported; otherwise every shape is compiled separately."""
    fullgraph: bool
    """Whether to use `fullgraph=True`: graph breaks are errors or cost more than compiling saves."""
    modes: tuple[str, ...] = ("default",)
    cache_variable: str = ""
    """The environment variable of the cache directory; empty if unknown."""
    cache_value: str = "{}"
    """Template of the variable's value, `{}` being the directory: `{},false,1024,false`."""
    cache_default: str = ""
    """The default cache directory; empty if unknown or if nothing is cached on disk."""


@dataclass(frozen=True, kw_only=True)
class Variable(Claim):
    """An environment variable that the vendor's software reads."""

    name: str
    value: str
    """The value that anyaccel sets; empty if the user decides."""
    when: Literal["before_import", "before_run", "by_user"]
    switch: str = ""
    """The placement option that turns it off: `hpu_migration`; empty if it is always set."""


@dataclass(frozen=True, kw_only=True)
class Mode(Claim):
    """An execution mode, such as `lazy`, that must be set before the vendor's software is imported."""

    name: str
    """`eager`, `lazy`."""
    settings: tuple[tuple[str, str], ...] = ()
    """The environment variables that select it: `(("PT_HPU_LAZY_MODE", "0"),)`."""
    captures: bool = False
    """Whether the denoiser is captured as a device graph."""


@dataclass(frozen=True, kw_only=True)
class Distributed(Claim):
    """The `torch.distributed` backend of the device."""

    backend: str
    module: str = ""
    """The module to import first."""


@dataclass(frozen=True, kw_only=True)
class MemoryTerms(Claim):
    """The device memory that tensors can use, and the allocator's segment size."""

    shares: tuple[tuple[int | None, float], ...] = ((None, 1.0),)
    """Pairs of a maximum nominal size (None for any) and the usable share of it; the first match applies."""
    kept_bytes: int = 0
    """Bytes of it reserved by the device's software."""
    segment_bytes: int = 0
    """The segment size of large tensors; 0 if the allocator does not use segments."""
    fixed_bytes: int = 0
    """Bytes that libraries allocate at their first use."""

    def usable_bytes(self, total: int) -> int:
        """Return the number of bytes available to tensors, given the nominal memory size."""
        # For example macOS lets the GPU use two thirds of small memories and three quarters of large ones.
        share = next(share for most, share in self.shares if most is None or total <= most)
        return max(0, int(total * share) - self.kept_bytes)


@dataclass(frozen=True, kw_only=True)
class Quantization(Claim):
    """A quantization format that diffusers supports on the device."""

    name: str
    """The library and format: `gguf-q4`."""
    bits: float
    """Bits per weight, including scales."""


@dataclass(frozen=True, kw_only=True)
class Speedup(Claim):
    """An optimization that is known to work on the device."""

    name: str
    """`capture`, `channels_last`, `compile`, `group_norm`, `float8`."""
    gain: float
    """The measured or expected speedup factor of the affected part."""


@dataclass(frozen=True, kw_only=True)
class Product(Claim):
    """One hardware product, such as `gaudi2`; its memory size is per torch device."""

    name: str
    """Lower case, as on the command line: `gaudi2`."""
    title: str
    memory_bytes: int | None
    """Memory of one device; None if it varies or is unknown."""
    per_server: int | None
    """Devices in a typical server or instance; None if it varies."""
    software: str
    """The software stack that runs it."""
    native: bool = True
    """Whether that software provides a torch device, which running a plan requires."""
    reported_as: str = ""
    """Regular expression of the name that the device reports: `H200`; empty if unknown."""
    half_precision_flops: float | None = None
    """Published dense matrix FLOPs per second in half precision, accumulated in float32; None if unknown."""
    memory_bytes_per_s: float | None = None
    """Published memory bandwidth; None if unknown."""
    figures_source: str = ""
    """The URL of the throughput and the bandwidth, if it differs from the source of the memory size."""


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """The capabilities and limits of one accelerator, with their sources."""

    name: str
    """The device name that users write: `hpu`."""
    title: str
    vendor: str
    documentation: str
    """The URL of the vendor's documentation."""
    device_type: str = ""
    """The torch device type if it differs from the name: `cuda` for ROCm."""
    torch_build: str = ""
    """The attribute of `torch.version` that a build for this device sets: `hip`; empty if any build works."""
    preference: int
    """`auto` selects the available device with the highest value."""
    can_be_virtual: bool = True
    """Whether it can be emulated: not for the CPU itself, nor for CUDA, which too much code expects."""
    is_host: bool = False
    """Whether the device is the CPU of this machine."""
    unified_memory: bool = False
    """Whether the device shares memory with the CPU, so offloading to the CPU frees nothing."""

    dtypes: Dtypes
    default_dtypes: DtypeOrder
    random_numbers: Answer
    """Random numbers generated on the device."""
    data_dependent_shapes: Answer
    """Operations with data-dependent output shapes: `nonzero`, masks."""
    new_shapes: Answer
    """The cost of a shape that was not used before."""
    host_round_trip: Answer
    """Reading a value back during a run: `item()`, `.cpu()`."""
    batches: Answer
    """Several images in one call."""
    training: Answer
    fused_attention: Answer = _UNKNOWN_ATTENTION
    """Attention that never materializes all scores."""
    memory: MemoryTerms | Unknown = _UNKNOWN_MEMORY
    """The memory that tensors can use."""
    quantized_weights: tuple[Quantization, ...] = ()
    """Supported quantizations. They are suggested to the user, never applied silently."""
    speedups: tuple[Speedup, ...] = ()
    """Speedups known to work on the device."""
    largest_tensor: tuple[SizeLimit | Yes | Unknown, ...]
    operations: tuple[OperationLimit, ...] = ()
    quirks: tuple[Quirk, ...] = ()

    compiler: Compiler | Unknown
    distributed: Distributed | Unknown
    modes: tuple[Mode, ...] = ()
    """The execution modes, default first; empty if there is only one."""
    modules: tuple[str, ...] = ()
    """Modules to import before the first use; they register the device with torch."""
    variables: tuple[Variable, ...] = ()
    visible_devices: str = ""
    """The environment variable that selects the visible devices of a process."""
    ray_resource: str = ""
    """The resource under which Ray detects the device (Ray 2.60, `_private/accelerators`): `GPU`; empty if it does
    not, so a node must be started with a custom resource of the sheet's name."""
    requirements: tuple[Requirement, ...] = ()
    installation: tuple[InstallCommand, ...] = ()
    """The commands that install the device's build of torch, by operating system."""
    device_files: tuple[str, ...] = ()
    """Patterns of the device files that Linux creates for the hardware: `/dev/neuron*`."""
    pci_vendor: str = ""
    """The PCI vendor ID, if several vendors use these device files: `0x1da3`."""
    products: tuple[Product, ...] = ()
    assumed_product: str = ""
    """The product that `explain` assumes for a device that is not on this machine; empty for the smallest one."""
    aliases: tuple[str, ...] = ()
    """Other names of the device: `gaudi` for `hpu`."""
    product_pattern: str = ""
    """Regular expression of the vendor's product names, for hints about unlisted products: `rtx`."""

    @property
    def torch_name(self) -> str:
        """The torch device type: `cuda` for ROCm, otherwise the sheet name."""
        return self.device_type or self.name

    @property
    def rng_on_device(self) -> bool:
        """Whether random numbers can be generated on the device; if not or unknown, the CPU is used."""
        # Unknown counts as no: drawing on the CPU is always correct.
        return isinstance(self.random_numbers, Yes)

    @property
    def static_shapes(self) -> bool:
        """Whether all shapes must be known when a graph is compiled."""
        return _lacks(self.data_dependent_shapes)

    @property
    def reliable_batches(self) -> bool:
        """Whether generating several images per call has no known problems."""
        # Unknown counts as reliable: one image at a time would slow down every device without a report.
        return not _lacks(self.batches)

    @property
    def trains(self) -> bool:
        """Whether the sheet confirms that the device supports training."""
        return isinstance(self.training, Yes)

    def dtype(self, name: str) -> Answer:
        """Return the claim about a dtype, or an `Unknown` if the sheet does not cover the dtype."""
        answer: Answer = getattr(self.dtypes, name, Unknown(says=f"sheets do not cover {name}"))
        return answer

    def adjusted_dtype(self, name: str) -> str:
        """Return the dtype to use instead of `name`, or `name` itself if the sheet lists no replacement."""
        answer = self.dtype(name)
        # An open condition changes no dtype: float16 on hpu stays until the product is known.
        if isinstance(answer, DtypeLimit) and not answer.conditional and answer.becomes:
            return answer.becomes
        return name

    def has_quirk(self, name: str) -> bool:
        """Return whether a quirk definitely applies; a quirk with an unresolved condition does not count."""
        return any(quirk.name == name and not quirk.conditional for quirk in self.quirks)

    def speedup(self, name: str) -> Speedup | None:
        """Return the optimization with this name, or None if it is not known to work on the device."""
        return next((speedup for speedup in self.speedups if speedup.name == name), None)

    def usable_bytes(self, total: int) -> int:
        """Return the number of bytes available to tensors, given the nominal memory size."""
        return self.memory.usable_bytes(total) if isinstance(self.memory, MemoryTerms) else total

    def product(self, name: str) -> Product:
        """Return the product with this name, such as `gaudi2`; raise if it is not on the sheet."""
        # Products of plugins may have upper-case names.
        for product in self.products:
            if product.name.lower() == str(name).lower():
                return product
        names = [product.name for product in self.products]
        raise UnknownProductError(
            f"unknown product {name!r} for {self.title} ({self.name})", hint=nearest(str(name), names)
        )

    def claims(self) -> Iterator[tuple[str, Claim | Unknown]]:
        """Yield all claims with their names: `("dtypes.float64", DtypeLimit(…))`."""
        # Walking the fields finds new kinds of claims without a list to maintain.
        for field in fields(self):
            yield from _walk(field.name, getattr(self, field.name))

    def with_claims(self, changes: Mapping[str, Claim | Unknown]) -> Sheet:
        """Return a copy of the sheet with some claims replaced; `changes` uses the names that `claims` yields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: _replace_claims(name, value, changes) for name, value in values.items()})

    def limits(self, kind: type[LimitT]) -> dict[str, LimitT]:
        """Return all limits of the given class, keyed by name; `sheet.limits(Limit)` returns every limit."""
        return {name: claim for name, claim in self.claims() if isinstance(claim, kind)}

    def on(self, product: str | None = None, versions: Mapping[str, str] | None = None) -> Sheet:
        """Return a copy of the sheet with conditional limits resolved for a product and versions.

        >>> anyaccel.sheet("hpu").on(product="gaudi2").dtype("float16")  # doctest: +SKIP
        Yes(…)
        """
        if product is not None:
            product = self.product(product).name  # conditions compare the exact spelling of the sheet
        changes = {field.name: _resolve(getattr(self, field.name), product, versions or {}) for field in fields(self)}
        return replace(self, **changes)


def _lacks(answer: Answer) -> bool:
    """Return whether a feature is known to fail; False if support is unknown, conditional or only slow."""
    return isinstance(answer, Limit) and not answer.conditional and answer.effect != "slow"


def _walk(path: str, value: object) -> Iterator[tuple[str, Claim | Unknown]]:
    # Claims are dataclasses too, so they are checked first: their own fields are not claims.
    if isinstance(value, Claim | Unknown):
        yield path, value
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _walk(f"{path}.{_label(item, index)}", item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _walk(f"{path}.{field.name}", getattr(value, field.name))


def _label(item: object, index: int) -> str:
    # Evidence files refer to these names: an index is stable only while the order of the sheet is.
    return getattr(item, "name", "") or getattr(item, "of", "") or str(index)


def _replace_claims(path: str, value: Any, changes: Mapping[str, Claim | Unknown]) -> Any:
    """Return a copy of a sheet field's value with the claims in `changes` replaced."""
    if isinstance(value, Claim | Unknown):
        return changes.get(path, value)
    if isinstance(value, tuple):
        return tuple(
            _replace_claims(f"{path}.{_label(item, index)}", item, changes) for index, item in enumerate(value)
        )
    if isinstance(value, Dtypes):
        answers = {f.name: _replace_claims(f"{path}.{f.name}", getattr(value, f.name), changes) for f in fields(value)}
        return Dtypes(**answers)
    return value


def _resolve(value: Any, product: str | None, versions: Mapping[str, str]) -> Any:
    """Return a copy of a sheet field's value with its conditional limits resolved.

    A limit that applies loses its conditions. A limit that does not apply is removed from a tuple or
    replaced by a `Yes`. A limit with unknown conditions is kept.
    """
    if isinstance(value, tuple):
        resolved = (_resolve(item, product, versions) for item in value)
        # Lists such as quirks contain only limits that may apply, so a limit that does not apply is dropped.
        pairs = zip(value, resolved, strict=True)
        return tuple(new for old, new in pairs if not (isinstance(old, Limit) and _is_yes(new)))
    if isinstance(value, Limit) and value.conditional:
        verdict = value.applies(product, versions)
        if verdict is None:
            return value
        if verdict:  # without conditions it counts as certain from now on
            return replace(value, only_on=(), only_if=())
        return Yes(says=f"Does not apply here: {value.says}", source=value.source, evidence="inferred")
    if isinstance(value, Dtypes):
        return Dtypes(**{f.name: _resolve(getattr(value, f.name), product, versions) for f in fields(value)})
    return value


def _is_yes(value: object) -> bool:
    return isinstance(value, Yes)
