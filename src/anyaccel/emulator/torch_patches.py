"""Patches of torch: the table of what is replaced, and the only functions that apply and remove a replacement.

Virtual accelerators, `anyaccel run` and the benchmark each replace parts of torch. A user of this module registers a
layer, `wrap(original) -> replacement`, for a name of the table. All layers of a name make one replacement, the layer
that was registered last on the outside; the original object returns when the last layer is removed, in any order.

Known limitation: what `from torch import load` bound before a patch was applied stays the original.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from anyaccel.errors import UpstreamError

__all__ = ["PATCHES", "Patch", "apply_patch", "find_patch", "patched", "remove_patches", "replace_by", "replace_class"]

Wrap = Callable[[Any], Any]
KNOWN_GOOD = ("2.13",)
"""The torch releases in which every entry was tested."""
_ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """An attribute that is replaced."""

    name: str
    """The dotted name. `*` is the part that depends on the device."""
    why: str
    link: str = ""
    """The upstream issue or document, where there is one."""
    aliases: tuple[str, ...] = ()
    """Other names of the same function, which get the same replacement."""
    optional: bool = False
    """Whether a supported torch may lack it: there it is added, and deleted again."""
    known_good: tuple[str, ...] = KNOWN_GOOD


def _list_patches(owner: str, names: str, why: str, link: str = "", optional: bool = False) -> list[Patch]:
    return [Patch(f"{owner}.{name}", why, link, optional=optional) for name in names.split()]


_PYTORCH = "https://github.com/pytorch/pytorch"
_PYTORCH_DOCS = "https://docs.pytorch.org/docs/stable"
_ACCELERATOR = "torch.accelerator reports the device that torch was built for, and not one registered from Python."
_FIRST_ARGUMENT = "The device is an argument of a class, which no __torch_function__ mode sees."

PATCHES: tuple[Patch, ...] = (
    *_list_patches(
        "torch",
        "tensor as_tensor asarray from_dlpack kaiser_window",
        "The data is written before dispatch: build on the CPU and move. A mode sees the device too late.",
        "https://github.com/albanD/subclass_zoo/pull/36",
    ),
    Patch(
        "torch.random.manual_seed",
        "It seeds only the devices that torch was built for or that a vendor's package registered.",
        f"{_PYTORCH}/pull/97420",
        aliases=("torch.manual_seed",),
    ),
    Patch("torch.Tensor.__new__", "torch.Tensor([x, y]) reads elements that are tensors in C++, by their address."),
    Patch(
        "torch.Tensor.data",
        "The setter exchanges the storage of a wrapper tensor, and not that of the tensor inside.",
        f"{_PYTORCH}/pull/111162",
    ),
    Patch("torch.Tensor.pin_memory", "Pinning requires the driver of a device that is not there."),
    Patch("torch.Tensor.is_pinned", "Which memory is pinned is known to the driver, which is not there."),
    Patch(
        "torch.nn.Module._apply",
        "It assigns `.data` where it takes two tensors to be alike; wrapper tensors have to be swapped.",
        f"{_PYTORCH}/issues/115792",
    ),
    Patch(
        "torch.load",
        "A virtual device has no storage to load to, and a device name in `map_location` is read before any mode.",
        f"{_PYTORCH}/pull/98920",
        aliases=("torch.serialization.load",),
    ),
    Patch(
        "torch.Generator",
        "The constructor, in C++, accepts only the devices that torch was built for.",
        f"{_PYTORCH}/issues/92202",
    ),
    Patch(
        "torch.device",
        "torch.device(0) is a device of the accelerator that torch was built for.",
        f"{_PYTORCH_DOCS}/tensor_attributes.html",
    ),
    Patch(
        "torch.compile",
        "The backend and the options depend on the device, and torch.compile has no default per device.",
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
    Patch("torch.mps.*", "This torch was built without the device, and its module has to answer.", optional=True),
    Patch("torch.xpu.*", "This torch was built without the device, and its module has to answer.", optional=True),
    Patch(
        "torch.distributed.distributed_c10d.is_*_available",
        "init_process_group refuses a backend that torch was built without.",
        f"{_PYTORCH_DOCS}/distributed.html",
    ),
    Patch(
        "torch.distributed.distributed_c10d.ProcessGroup*",
        "torch makes the backend from this class, which a build without it lacks.",
        f"{_PYTORCH_DOCS}/distributed.html",
        optional=True,
    ),
    Patch(
        "safetensors.safe_open",
        "safetensors accepts a fixed list of devices: read to the CPU and move.",
        "https://github.com/safetensors/safetensors/pull/804",
        aliases=("safetensors.torch.safe_open",),
    ),
    Patch("safetensors.torch.load_file", "The device is read in Rust, where no mode sees it."),
    Patch("torch.amp.autocast_mode.autocast.__init__", _FIRST_ARGUMENT, f"{_PYTORCH_DOCS}/amp.html"),
    Patch("torch.amp.grad_scaler.GradScaler.__init__", _FIRST_ARGUMENT, f"{_PYTORCH_DOCS}/amp.html"),
    Patch("torch.utils._device.DeviceContext.__init__", _FIRST_ARGUMENT),
    Patch(
        "torch.Tensor.record_stream",
        "It checks the type of the stream before any mode sees the call, and CUDA's streams do not exist here.",
        f"{_PYTORCH}/pull/44301",
    ),
    Patch("torch.cuda.__class__", "Scripts ask the module of CUDA for the device; a class is the only way to answer."),
    Patch(
        "threading.Thread.start",
        "A __torch_function__ mode belongs to the thread that entered it.",
        f"{_PYTORCH}/issues/115917",
    ),
    Patch(
        "torch.randn",
        "In half precision torch draws different numbers from the same seed.",
        "https://github.com/huggingface/diffusers/issues/11056",
    ),
)


def find_patch(name: str) -> Patch:
    """Return the entry for an attribute; an attribute that is not listed may not be replaced."""
    for patch in PATCHES:
        if fnmatchcase(name, patch.name):
            return patch
    raise UpstreamError(f"{name} is not in the table of patches", hint="add an entry to PATCHES with the reason")


@dataclass
class _Replacement:
    """The one replacement of an attribute, made of every user's layer."""

    original: Any
    owners: list[tuple[Any, str, Any]]
    """For each name: the owner, the attribute, and what the owner's own namespace held."""
    layers: dict[str, Wrap] = field(default_factory=dict)

    def write(self) -> None:
        value = self.original
        for wrap in self.layers.values():
            value = wrap(value)
        for owner, attribute, _ in self.owners:
            setattr(owner, attribute, value)

    def restore(self) -> None:
        for owner, attribute, own in self.owners:
            if own is not _ABSENT:
                setattr(owner, attribute, own)
            elif attribute == "__class__":
                setattr(owner, attribute, self.original)
            else:
                delattr(owner, attribute)


_REPLACEMENTS: dict[str, _Replacement] = {}


def apply_patch(name: str, wrap: Wrap, user: str) -> None:
    """Replace a listed attribute by `wrap(original)`; a second layer of the same user replaces its first."""
    if name not in _REPLACEMENTS:
        _REPLACEMENTS[name] = _read(name, find_patch(name))
    replacement = _REPLACEMENTS[name]
    replacement.layers[user] = wrap
    replacement.write()


def remove_patches(user: str) -> None:
    """Remove every layer of a user; an attribute without layers becomes the original object again."""
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
    """Apply a patch while the block runs."""
    apply_patch(name, wrap, user)
    try:
        yield
    finally:
        remove_patches(user)


def replace_by(value: Any) -> Wrap:
    """Return a layer that does not call what it replaces."""
    return lambda _: value


def _read(name: str, patch: Patch) -> _Replacement:
    owners, originals = [], []
    for dotted in (name, *patch.aliases):
        path, _, attribute = dotted.rpartition(".")
        owner = pkgutil.resolve_name(path)
        original = getattr(owner, attribute, _ABSENT)
        if original is _ABSENT and not patch.optional:
            raise UpstreamError(
                f"{dotted} does not exist in this installation; it has to be replaced: {patch.why}",
                hint=f"use a torch release known to work: {', '.join(patch.known_good)}",
            )
        owners.append((owner, attribute, vars(owner).get(attribute, _ABSENT)))
        originals.append(original)
    return _Replacement(originals[0], owners)


class _ReplacedClass(type):
    """The class of a replaced class: instances are the original's, and a call goes to `build`."""

    original: Any
    build: Callable[..., Any]

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.original)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.original)

    def __eq__(cls, other: object) -> bool:
        return other is cls or bool(other == cls.original)

    def __hash__(cls) -> int:
        return hash(cls.original)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.build(*args, **kwargs)


def replace_class(original: Any, build: Callable[..., Any]) -> Any:
    """Return a class that is `original` to isinstance, == and pickle, and that calls `build` to make an instance."""
    # pickle and torch.save look a class up by its name: instances are saved exactly as without the patch.
    names = {"original": original, "build": staticmethod(build), "__module__": "torch", "__doc__": original.__doc__}
    return _ReplacedClass(original.__name__, (), names)
