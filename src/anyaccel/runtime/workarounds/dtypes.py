"""Number types that a device lacks, wherever a pipeline or a model asks for one: factories, casts, moves."""

from __future__ import annotations

from typing import Any

import torch

from anyaccel.backends.torch_device import is_on

__all__ = [
    "DATA_CONSTRUCTORS",
    "find_target_device",
    "make_handlers",
    "normalize_new_tensor",
    "parse_to_arguments",
    "replace_dtype",
]

Tensor = torch.Tensor

_FACTORIES = (
    torch.zeros, torch.ones, torch.empty, torch.full, torch.arange, torch.linspace, torch.logspace, torch.eye,
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.zeros_like, torch.ones_like, torch.empty_like,
    torch.full_like, torch.rand_like, torch.randn_like, torch.randint_like, torch.empty_strided,
    torch.tril_indices, torch.triu_indices, Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full,
)  # fmt: skip
_WHOLE_BY_DEFAULT = {torch.arange, torch.full, torch.randint, torch.randperm, torch.tril_indices, torch.triu_indices}
"""Factories that give whole numbers of 64 bits for whole arguments."""
DATA_CONSTRUCTORS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
_CASTS = {Tensor.double: torch.float64, Tensor.long: torch.int64}
_NEEDS_INT64 = (
    torch.gather, Tensor.gather, torch.scatter, Tensor.scatter, Tensor.scatter_, torch.scatter_add,
    Tensor.scatter_add, Tensor.scatter_add_, torch.take_along_dim, Tensor.take_along_dim, torch.take, Tensor.take,
    torch.nn.functional.one_hot, torch.nn.functional.cross_entropy, torch.index_fill, Tensor.index_fill,
    Tensor.index_fill_, Tensor.index_copy_, Tensor.put_, torch.scatter_reduce, Tensor.scatter_reduce,
)  # fmt: skip
"""Functions that take indices of 64 bits alone."""


def make_handlers(
    device: torch.device, replacements: dict[torch.dtype, torch.dtype], inner: dict[Any, Any]
) -> dict[Any, Any]:
    """Handlers for every function that can make a tensor of a lacking type on the device; `inner` runs behind them."""
    adjust = _Adjust(device, replacements, inner)
    handlers = dict(inner)
    handlers |= dict.fromkeys(_FACTORIES, adjust.make)
    handlers |= dict.fromkeys(DATA_CONSTRUCTORS, adjust.build)
    handlers |= {Tensor.to: adjust.move, Tensor.type: adjust.cast_by_type, Tensor.type_as: adjust.cast_alike}
    handlers |= dict.fromkeys(_CASTS, adjust.cast)
    if torch.int64 in replacements:
        handlers |= dict.fromkeys(_NEEDS_INT64, _widen_indices)
    return handlers


def replace_dtype(tensor: Tensor, replacements: dict[torch.dtype, torch.dtype]) -> Tensor:
    """The tensor in the type that stands in for its own."""
    instead = replacements.get(tensor.dtype)
    return tensor if instead is None else tensor.to(instead)


class _Adjust:
    """The replacements, applied to what targets the device and to nothing else."""

    def __init__(self, device: torch.device, replacements: dict[torch.dtype, torch.dtype], inner: dict[Any, Any]):
        self.kind = device.type
        self.replacements = replacements
        self.inner = inner

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function, by way of the repair behind this one if there is one."""
        handler = self.inner.get(func)
        return handler(func, args, kwargs) if handler is not None else func(*args, **kwargs)

    def targets(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the result will lie on the device: by `device=`, by an argument, or by the tensor it is made like."""
        asked = kwargs.get("device")
        if asked is None:
            asked = next((value for value in args if isinstance(value, torch.device)), None)
        if asked is not None:
            return _kind_of(asked) == self.kind
        first = args[0] if args else None
        if isinstance(first, Tensor):
            return is_on(first.device, self.kind)
        return torch.get_default_device().type == self.kind

    def make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A factory: ask for the other type from the start."""
        if self.targets(args, kwargs):
            asked = kwargs.get("dtype") or self._default(func, args, kwargs)
            if asked in self.replacements:
                kwargs = {**kwargs, "dtype": self.replacements[asked]}
        return self.call(func, args, kwargs)

    def _default(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
        """The type that a factory gives by itself, where that can be a lacking one."""
        if args and isinstance(args[0], Tensor):
            return args[0].dtype
        numbers = [*args, *(kwargs[name] for name in ("start", "end", "step", "fill_value") if name in kwargs)]
        if func is torch.full:
            numbers = [args[1] if len(args) > 1 else kwargs.get("fill_value", 0.0)]
            if isinstance(numbers[0], bool | complex):
                return None
        if func in _WHOLE_BY_DEFAULT and all(_is_whole(value) for value in numbers):
            return torch.int64
        return torch.get_default_dtype()

    def build(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A tensor from numbers or from NumPy: cast on the host, then moved."""
        func, args, kwargs = normalize_new_tensor(func, args, kwargs)
        data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        place = find_target_device(data, kwargs)
        if place.type != self.kind:
            return func(*args, **kwargs)
        if isinstance(data, Tensor) and is_on(data.device, self.kind):
            asked = kwargs.get("dtype") or data.dtype
            return func(*args, **{**kwargs, "dtype": self.replacements.get(asked, asked), "device": place})
        built = func(*args, **{**kwargs, "device": "cpu"})
        return replace_dtype(built, self.replacements).to(place)

    def move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`tensor.to(…)`: cast before it arrives, and to no type that is lacking there."""
        tensor = args[0]
        device, dtype = parse_to_arguments(tensor, args[1:], kwargs)
        if device.type != self.kind:
            return func(*args, **kwargs)
        instead = self.replacements.get(dtype)
        if instead is None:
            return func(*args, **kwargs)
        more = {name: kwargs[name] for name in ("non_blocking", "copy", "memory_format") if name in kwargs}
        if is_on(tensor.device, self.kind):
            return func(tensor, dtype=instead, **more)
        return func(func(tensor, dtype=instead), device=device, **more)

    def cast(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`tensor.double()`, `tensor.long()`."""
        instead = self.replacements.get(_CASTS[func])
        if instead is None or args[0].device.type != self.kind:
            return func(*args, **kwargs)
        return args[0].to(instead)

    def cast_by_type(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`tensor.type(torch.float64)`."""
        asked = args[1] if len(args) > 1 else kwargs.get("dtype")
        instead = self.replacements.get(asked) if isinstance(asked, torch.dtype) else None
        if instead is None or args[0].device.type != self.kind:
            return func(*args, **kwargs)
        return args[0].to(instead)

    def cast_alike(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`tensor.type_as(other)`: to the other's place and type."""
        return self.move(Tensor.to, (args[0],), {"device": args[1].device, "dtype": args[1].dtype})


def _widen_indices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give the indices back their 64 bits for a function that takes no others; the first argument is no index."""

    def widen(value: Any) -> Any:
        return value.to(torch.int64) if isinstance(value, Tensor) and value.dtype == torch.int32 else value

    if func is torch.nn.functional.one_hot:
        return func(*(widen(value) for value in args), **kwargs)
    if len(args) < 3:
        named = {name: value if name == "src" else widen(value) for name, value in kwargs.items()}
        return func(*args[:1], *(widen(value) for value in args[1:]), **named)
    index = 1 if func in (torch.take, Tensor.take, torch.take_along_dim, Tensor.take_along_dim, Tensor.put_) else 2
    widened = [widen(value) if position == index else value for position, value in enumerate(args)]
    return func(*widened, **{name: widen(value) if name == "index" else value for name, value in kwargs.items()})


def parse_to_arguments(
    tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device, torch.dtype]:
    """Where and in which type `tensor.to(…)` ends, in any of its spellings."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    other = kwargs.get("other")
    for value in args:
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, Tensor):
            other = value
        elif isinstance(value, torch.device | str) or (isinstance(value, int) and not isinstance(value, bool)):
            device = value
    if other is not None:
        return other.device, other.dtype
    target = tensor.device if device is None else torch.device(device)
    return target, tensor.dtype if dtype is None else dtype


def normalize_new_tensor(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """`tensor.new_tensor(data)` as `torch.tensor(data)` of that tensor's place and type; the others as they are."""
    if func is not Tensor.new_tensor:
        return func, args, kwargs
    named = {name: value for name, value in kwargs.items() if value is not None}
    return torch.tensor, args[1:], {"device": args[0].device, "dtype": args[0].dtype, **named}


def find_target_device(data: Any, kwargs: dict[str, Any]) -> torch.device:
    """Where a tensor that is built from data will lie."""
    asked = kwargs.get("device")
    if asked is not None:
        return torch.device(asked)
    return data.device if isinstance(data, Tensor) else torch.get_default_device()


def _kind_of(device: Any) -> str:
    return torch.device(device).type


def _is_whole(value: Any) -> bool:
    return not isinstance(value, float) and not (isinstance(value, Tensor) and value.is_floating_point())
