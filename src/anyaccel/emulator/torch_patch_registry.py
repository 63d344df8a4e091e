"""Table of all patched torch attributes, and functions that apply and remove the patches.

Virtual accelerators, `anyaccel run` and the benchmark patch torch. Each of them registers a layer,
`wrap(original) -> replacement`, for a name in the table. The layers for a name are nested, with the
most recently registered one outermost. They can be removed in any order; removing the last one
restores the original object.

Known limitation: a name bound by `from torch import load` before the patch still refers to the
original.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from anyaccel.errors import UpstreamError

__all__ = [
    "PATCHES",
    "Patch",
    "apply_patch",
    "find_patch",
    "is_patched",
    "patched",
    "remove_patches",
    "replace_by",
    "replace_class",
]

Wrap = Callable[[Any], Any]
# The torch releases with which every entry was tested.
KNOWN_GOOD = ("2.13",)
# Marks a missing attribute, because None can be the value of an existing one.
_ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """Table entry for a patched attribute: its name, the reason for the patch, and an upstream link."""

    name: str
    """The dotted name. `*` matches the part that depends on the device."""
    why: str
    """Why the attribute must be patched."""
    link: str = ""
    """The upstream issue, pull request or documentation page, if any."""
    aliases: tuple[str, ...] = ()
    """Other names of the same object; they get the same replacement."""
    optional: bool = False
    """Whether a supported torch may lack the attribute. It is then added, and deleted with the patch."""
    known_good: tuple[str, ...] = KNOWN_GOOD


def _list_patches(owner: str, names: str, why: str, link: str = "", optional: bool = False) -> list[Patch]:
    return [Patch(f"{owner}.{name}", why, link, optional=optional) for name in names.split()]


_PYTORCH = "https://github.com/pytorch/pytorch"
_PYTORCH_DOCS = "https://docs.pytorch.org/docs/stable"
_ACCELERATOR = "torch.accelerator reports the device that torch was built for, not one registered from Python."
_FIRST_ARGUMENT = "The device is an argument of a constructor, which __torch_function__ modes do not intercept."

_NOT_COMPILED = "The functions of this module raise or return defaults in a torch built without the device."

# `apply_patch` rejects every name without an entry, so each patch has a reason and a link to check after an upgrade.
PATCHES: tuple[Patch, ...] = (
    *_list_patches(
        "torch",
        "tensor as_tensor asarray from_dlpack kaiser_window",
        "The data is written before dispatch: build on the CPU and move. A __torch_function__ mode runs too late.",
        "https://github.com/albanD/subclass_zoo/pull/36",
    ),
    Patch(
        "torch.random.manual_seed",
        "It seeds only devices that torch was built for or that a vendor package registered.",
        f"{_PYTORCH}/pull/97420",
        aliases=("torch.manual_seed",),
    ),
    Patch(
        "torch.Tensor.__new__",
        "torch.Tensor([x, y]) reads tensor elements in C++ by address; the address of a wrapper tensor is null.",
        f"{_PYTORCH}/pull/65340",
    ),
    Patch(
        "torch.Tensor.data",
        "The setter replaces the storage of a wrapper tensor, not that of its inner tensor.",
        f"{_PYTORCH}/pull/111162",
    ),
    Patch(
        "torch.Tensor.pin_memory",
        "Pinning requires the driver of a real accelerator.",
        f"{_PYTORCH}/issues/159740",
    ),
    Patch(
        "torch.Tensor.is_pinned",
        "Only the driver of a real accelerator knows which memory is pinned.",
        f"{_PYTORCH}/pull/129460",
    ),
    Patch(
        "torch.nn.Module._apply",
        "It assigns `.data` if it considers two tensors compatible; wrapper tensors must be swapped.",
        f"{_PYTORCH}/pull/122755",
    ),
    Patch(
        "torch.autograd._engine_run_backward",
        "The engine counts the devices once, at the first backward pass, and has no thread for those added later.",
        f"{_PYTORCH_DOCS}/notes/autograd.html#multithreaded-autograd",
        aliases=("torch.autograd.graph._engine_run_backward",),
    ),
    Patch(
        "torch.utils.swap_tensors",
        "It rejects parameters that an autograd graph references, which a module on a real device accepts.",
        f"{_PYTORCH}/pull/122755",
    ),
    Patch(
        "torch.load",
        "A virtual device has no storages, and `map_location` is parsed before any __torch_function__ mode runs.",
        f"{_PYTORCH}/pull/98920",
        aliases=("torch.serialization.load",),
    ),
    Patch(
        "torch.Generator",
        "The C++ constructor accepts only devices that torch was built for.",
        f"{_PYTORCH}/issues/92202",
    ),
    Patch(
        "torch.Event",
        "Its methods call the device guard in C++; the guard of a virtual device has no events.",
        f"{_PYTORCH_DOCS}/generated/torch.Event.html",
    ),
    Patch(
        "torch.device",
        "torch.device(0) means the accelerator that torch was built for.",
        f"{_PYTORCH_DOCS}/tensor_attributes.html",
    ),
    Patch(
        "torch.compile",
        "The backend and its options depend on the device; torch.compile has no per-device defaults.",
        f"{_PYTORCH_DOCS}/generated/torch.compile.html",
    ),
    *_list_patches(
        "torch.accelerator",
        "current_accelerator is_available device_count current_device_index set_device_index synchronize "
        "current_stream",
        _ACCELERATOR,
        f"{_PYTORCH_DOCS}/accelerator.html",
    ),
    *_list_patches(
        "torch.accelerator",
        "device_index empty_cache get_memory_info memory_allocated max_memory_allocated memory_reserved "
        "max_memory_reserved memory_stats reset_peak_memory_stats",
        _ACCELERATOR,
        f"{_PYTORCH_DOCS}/accelerator.html",
        optional=True,
    ),
    Patch("torch.mps.*", _NOT_COMPILED, f"{_PYTORCH_DOCS}/mps.html", optional=True),
    Patch("torch.xpu.*", _NOT_COMPILED, f"{_PYTORCH_DOCS}/xpu.html", optional=True),
    Patch(
        "torch.nn.attention.flex_attention.flex_attention",
        "It accepts only some devices, and checks them before any __torch_function__ mode runs.",
        f"{_PYTORCH_DOCS}/nn.attention.flex_attention.html",
    ),
    Patch(
        "torch.distributed.distributed_c10d.is_*_available",
        "init_process_group rejects a backend that torch was built without.",
        f"{_PYTORCH_DOCS}/distributed.html",
    ),
    Patch(
        "torch.distributed.distributed_c10d.ProcessGroup*",
        "torch instantiates this class for the backend; a build without the backend lacks it.",
        f"{_PYTORCH_DOCS}/distributed.html",
        optional=True,
    ),
    Patch(
        "safetensors.safe_open",
        "safetensors accepts a fixed list of devices: read to the CPU and move.",
        "https://github.com/safetensors/safetensors/pull/804",
        aliases=("safetensors.torch.safe_open",),
    ),
    Patch(
        "safetensors.torch.load_file",
        "The device is parsed in Rust, which __torch_function__ modes do not intercept.",
        "https://github.com/safetensors/safetensors/issues/674",
    ),
    Patch("torch.amp.autocast_mode.autocast.__init__", _FIRST_ARGUMENT, f"{_PYTORCH_DOCS}/amp.html"),
    Patch("torch.amp.grad_scaler.GradScaler.__init__", _FIRST_ARGUMENT, f"{_PYTORCH_DOCS}/amp.html"),
    Patch("torch.utils._device.DeviceContext.__init__", _FIRST_ARGUMENT, f"{_PYTORCH}/pull/91525"),
    Patch(
        "torch.Tensor.record_stream",
        "It checks the class of the stream before any __torch_function__ mode runs, and there are no CUDA streams.",
        f"{_PYTORCH}/pull/44301",
    ),
    Patch(
        "torch.cuda.__class__",
        "Scripts query torch.cuda. Only a module class can answer attribute reads and assignments.",
        "https://docs.python.org/3/reference/datamodel.html#customizing-module-attribute-access",
    ),
    Patch(
        "threading.Thread.start",
        "A __torch_function__ mode is active only in the thread that entered it.",
        f"{_PYTORCH}/issues/115917",
    ),
    Patch(
        "torch.randn",
        "The same seed gives different values in half precision.",
        "https://github.com/huggingface/diffusers/issues/11056",
    ),
)


def find_patch(name: str) -> Patch:
    """Return the table entry for an attribute; raise UpstreamError if there is none."""
    for patch in PATCHES:
        if fnmatchcase(name, patch.name):
            return patch
    raise UpstreamError(f"{name} has no entry in PATCHES", hint=f"add a Patch for {name} to PATCHES, with the reason")


@dataclass
class _Replacement:
    """State of one patched attribute: the original value and the layers that wrap it."""

    original: Any
    owners: list[tuple[Any, str, Any]]
    """For each name: the owner, the attribute, and the value in the owner's own namespace."""
    layers: dict[str, Wrap] = field(default_factory=dict)

    def write(self) -> None:
        value = self.original
        # From the original each time: a layer in the middle can be removed.
        for wrap in self.layers.values():
            value = wrap(value)
        for owner, attribute, _ in self.owners:
            setattr(owner, attribute, value)

    def restore(self) -> None:
        for owner, attribute, own in self.owners:
            # An inherited attribute must not become an own attribute: it is deleted instead.
            if own is not _ABSENT:
                setattr(owner, attribute, own)
            # `__class__` is a descriptor, never in the owner's `__dict__`, and cannot be deleted.
            elif attribute == "__class__":
                setattr(owner, attribute, self.original)
            else:
                delattr(owner, attribute)


# Patched attributes by name. The original is read once, before the first layer replaces it.
_REPLACEMENTS: dict[str, _Replacement] = {}


def apply_patch(name: str, wrap: Wrap, user: str) -> None:
    """Replace an attribute in the table with `wrap(original)`.

    `user` identifies the code that applies the patch. A second patch by the same user replaces its
    first.
    """
    if name not in _REPLACEMENTS:
        _REPLACEMENTS[name] = _read_original(name, find_patch(name))
    # A dict keeps the position of an existing key: a replaced layer stays where it was.
    replacement = _REPLACEMENTS[name]
    replacement.layers[user] = wrap
    replacement.write()


def is_patched(name: str) -> bool:
    """Return whether an attribute is replaced."""
    return name in _REPLACEMENTS


def remove_patches(user: str) -> None:
    """Remove all patches applied by `user`; restore the originals of attributes with no other patches."""
    for name, replacement in list(_REPLACEMENTS.items()):
        if replacement.layers.pop(user, None) is None:
            continue
        if replacement.layers:
            replacement.write()
        else:
            replacement.restore()
            del _REPLACEMENTS[name]


@contextmanager
def patched(name: str, wrap: Wrap, user: str) -> Iterator[None]:
    """Apply a patch inside the `with` block, then remove all patches applied by `user`."""
    apply_patch(name, wrap, user)
    try:
        yield
    finally:
        remove_patches(user)


def replace_by(value: Any) -> Wrap:
    """Return a `wrap` function for `apply_patch` that replaces the original with `value`."""
    return lambda _: value


def _read_original(name: str, patch: Patch) -> _Replacement:
    owners, originals = [], []
    for dotted in (name, *patch.aliases):
        path, _, attribute = dotted.rpartition(".")
        owner = pkgutil.resolve_name(path)
        original = getattr(owner, attribute, _ABSENT)
        if original is _ABSENT and not patch.optional:
            raise UpstreamError(
                f"cannot patch {dotted}, which the installed {dotted.partition('.')[0]} does not have. "
                f"Reason for the patch: {patch.why}",
                hint=f"use a tested torch release: {', '.join(patch.known_good)}",
            )
        # vars, not getattr: restore must not turn an inherited attribute into an own one.
        owners.append((owner, attribute, vars(owner).get(attribute, _ABSENT)))
        originals.append(original)
    return _Replacement(originals[0], owners)


class _ReplacedClass(type):
    """Metaclass for a replacement class: type checks use the original class, and calls invoke `build`."""

    original: Any
    build: Callable[..., Any]

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.original)

    # Code that imported the original class earlier compares it with this one, also as a key of a dict.
    def __eq__(cls, other: object) -> bool:
        return other is cls or bool(other == cls.original)

    def __hash__(cls) -> int:
        return hash(cls.original)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.build(*args, **kwargs)


def replace_class(original: Any, build: Callable[..., Any]) -> Any:
    """Return a class that creates instances with `build` but otherwise behaves like `original`.

    For `isinstance`, `==` and pickle, the two classes are the same.
    """
    # pickle and torch.save find a class by module and name: instances are saved exactly as without the patch.
    namespace = {"original": original, "build": staticmethod(build), "__module__": "torch", "__doc__": original.__doc__}
    return _ReplacedClass(original.__name__, (), namespace)
