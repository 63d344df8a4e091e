"""Replacement of dtypes that the device does not support, in factory functions, casts and moves."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from anyaccel.backends.device_type_checks import is_host, is_on
from anyaccel.errors import UsageError

__all__ = [
    "DATA_CONSTRUCTORS",
    "cast_checked",
    "find_target_device",
    "make_handlers",
    "normalize_new_tensor",
    "parse_to_arguments",
    "replace_dtype",
    "requests_copy",
]

# Upstream reports, by dtype:
#   float64 raises on MPS (https://github.com/pytorch/pytorch/issues/122602), on Ascend NPUs
#   (https://github.com/huggingface/diffusers/issues/10428) and on Neuron
#   (https://github.com/huggingface/diffusers/pull/13289);
#   int64 is computed as int32 on MPS before macOS 13.3 (https://github.com/pytorch/pytorch/issues/95231) and on Neuron;
#   complex128 raises on MPS (https://github.com/pytorch/pytorch/issues/176981).
# NumPy schedules are float64 and token ids are int64, so nearly every pipeline uses both.

Tensor = torch.Tensor

_FACTORIES = (
    torch.zeros, torch.ones, torch.empty, torch.full, torch.arange, torch.linspace, torch.logspace, torch.eye,
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.zeros_like, torch.ones_like, torch.empty_like,
    torch.full_like, torch.rand_like, torch.randn_like, torch.randint_like, torch.empty_strided,
    torch.tril_indices, torch.triu_indices, Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full,
)  # fmt: skip
# Factories that return int64 for integer arguments.
_INT64_BY_DEFAULT = {torch.arange, torch.full, torch.randint, torch.randperm, torch.tril_indices, torch.triu_indices}
# Functions that build a tensor from Python numbers, NumPy arrays or tensors.
DATA_CONSTRUCTORS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
_CASTS = {Tensor.double: torch.float64, Tensor.long: torch.int64}
# Functions that accept only int64 indices, with the position and name of this argument.
_NEEDS_INT64 = {
    **dict.fromkeys((
        torch.gather, Tensor.gather, torch.scatter, Tensor.scatter, Tensor.scatter_, torch.scatter_add,
        Tensor.scatter_add, Tensor.scatter_add_, torch.scatter_reduce, Tensor.scatter_reduce, Tensor.scatter_reduce_,
        torch.index_fill, Tensor.index_fill, Tensor.index_fill_, torch.index_copy, Tensor.index_copy,
        Tensor.index_copy_,
    ), (2, "index")),
    **dict.fromkeys((torch.take, Tensor.take, torch.put, Tensor.put, Tensor.put_), (1, "index")),
    **dict.fromkeys((
        torch.take_along_dim, Tensor.take_along_dim, functional.max_unpool1d, functional.max_unpool2d,
        functional.max_unpool3d,
    ), (1, "indices")),
    **dict.fromkeys((
        functional.cross_entropy, functional.nll_loss, functional.multi_margin_loss, functional.multilabel_margin_loss,
    ), (1, "target")),
    **dict.fromkeys((torch.tensor_split, Tensor.tensor_split), (1, "tensor_indices_or_sections")),
    functional.one_hot: (0, "tensor"),
}  # fmt: skip


def make_handlers(
    device: torch.device, replacements: dict[torch.dtype, torch.dtype], inner: dict[Any, Any]
) -> dict[Any, Any]:
    """Return handlers for the torch functions that can create an unsupported dtype on the device.

    Handlers for factory functions replace the dtype and then call the function's handler in `inner`.
    """
    replacer = _DtypeReplacer(device, replacements, inner)
    handlers = dict(inner)
    handlers |= dict.fromkeys(_FACTORIES, replacer.create)
    handlers |= dict.fromkeys(DATA_CONSTRUCTORS, replacer.build)
    handlers |= {Tensor.to: replacer.move, Tensor.type: replacer.cast_by_type, Tensor.type_as: replacer.cast_like}
    handlers |= dict.fromkeys(_CASTS, replacer.cast)
    if torch.int64 in replacements:
        handlers |= dict.fromkeys(_NEEDS_INT64, _widen_indices)
        handlers[Tensor.__setitem__] = replacer.write
    return handlers


def replace_dtype(tensor: Tensor, replacements: dict[torch.dtype, torch.dtype]) -> Tensor:
    """Cast a tensor to the replacement for its dtype, if there is one."""
    replacement = replacements.get(tensor.dtype)
    return tensor if replacement is None else cast_checked(tensor, replacement)


def cast_checked(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor; raise `UsageError` if it is a CPU tensor of integers that do not fit in the new dtype."""
    # Only on the CPU: reading values on a device would synchronize with it.
    if tensor.dtype == torch.int64 and not dtype.is_floating_point and is_host(tensor.device) and tensor.numel():
        limits, (smallest, largest) = torch.iinfo(dtype), torch.aminmax(tensor)
        if smallest < limits.min or largest > limits.max:
            value = int(largest if largest > limits.max else smallest)
            name = str(dtype).removeprefix("torch.")
            raise UsageError(
                f"the int64 value {value} does not fit in {name}, which the device uses instead of int64",
                hint="compute with such values on the CPU",
            )
    return tensor.to(dtype)


class _DtypeReplacer:
    """Handlers that replace unsupported dtypes on the device; tensors on other devices are unchanged."""

    def __init__(self, device: torch.device, replacements: dict[torch.dtype, torch.dtype], inner: dict[Any, Any]):
        self.device_type = device.type
        self.replacements = replacements
        self.inner = inner

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function's handler in `inner`, or the function itself if it has no handler."""
        handler = self.inner.get(func)
        return handler(func, args, kwargs) if handler is not None else func(*args, **kwargs)

    def targets_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the result of a call with these arguments will be on the device.

        This depends on `device=`, a positional device, the first tensor or torch's default device.
        """
        requested = kwargs.get("device")
        if requested is None:
            requested = next((value for value in args if isinstance(value, torch.device)), None)
        if requested is not None:
            return torch.device(requested).type == self.device_type
        first = args[0] if args else None
        if isinstance(first, Tensor):
            return is_on(first.device, self.device_type)
        return torch.get_default_device().type == self.device_type

    def create(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a factory function such as `torch.zeros`, replacing a dtype that the device does not support."""
        if self.targets_device(args, kwargs):
            dtype = kwargs.get("dtype") or self._default_dtype(func, args, kwargs)
            if dtype in self.replacements:
                kwargs = {**kwargs, "dtype": self.replacements[dtype]}
        return self.call(func, args, kwargs)

    def write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `tensor[index] = values`, which requires values with the tensor's dtype if the index is a tensor.

        `torch.full` returns int32 instead of int64, but `argmax` still returns int64.
        """
        tensor, index, values = args
        if isinstance(values, Tensor) and values.dtype != tensor.dtype and self._are_replaced(tensor, values):
            args = (tensor, index, values.to(tensor.dtype))
        return self.call(func, args, kwargs)

    def _are_replaced(self, first: Tensor, second: Tensor) -> bool:
        """Return whether the dtype of one of two tensors on the device replaces the other's."""
        if not (is_on(first.device, self.device_type) and is_on(second.device, self.device_type)):
            return False
        replacements = self.replacements
        return replacements.get(first.dtype) == second.dtype or replacements.get(second.dtype) == first.dtype

    def _default_dtype(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
        """Return the dtype that a factory function uses if `dtype=` is not given.

        Return None for a bool or complex fill value, because its dtype is never replaced.
        """
        if args and isinstance(args[0], Tensor):
            return args[0].dtype
        values = [*args, *(kwargs[name] for name in ("start", "end", "step", "fill_value") if name in kwargs)]
        if func is torch.full:
            values = [args[1] if len(args) > 1 else kwargs.get("fill_value", 0.0)]
            if isinstance(values[0], bool | complex):
                return None
        if func in _INT64_BY_DEFAULT and all(_is_integer(value) for value in values):
            return torch.int64
        return torch.get_default_dtype()

    def build(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Build a tensor from Python or NumPy data on the CPU, cast it there and move it to the device."""
        func, args, kwargs = normalize_new_tensor(func, args, kwargs)
        data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        target = find_target_device(data, kwargs)
        if target.type != self.device_type:
            return func(*args, **kwargs)
        if isinstance(data, Tensor) and is_on(data.device, self.device_type):
            dtype = kwargs.get("dtype") or data.dtype
            return func(*args, **{**kwargs, "dtype": self.replacements.get(dtype, dtype), "device": target})
        built = func(*args, **{**kwargs, "device": "cpu"})
        return replace_dtype(built, self.replacements).to(target)

    def move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `tensor.to(…)`, casting to the replacement dtype before the copy."""
        tensor = args[0]
        device, dtype = parse_to_arguments(tensor, args[1:], kwargs)
        if device.type != self.device_type:
            return func(*args, **kwargs)
        replacement = self.replacements.get(dtype)
        if replacement is None:
            return func(*args, **kwargs)
        options = {name: kwargs[name] for name in ("non_blocking", "copy", "memory_format") if name in kwargs}
        if is_on(tensor.device, self.device_type):
            return func(tensor, dtype=replacement, **options)
        # In two steps: the device must never receive the unsupported dtype.
        return func(cast_checked(tensor.to(dtype), replacement), device=device, **options)

    def cast(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `tensor.double()` or `tensor.long()`, casting to the replacement dtype if there is one."""
        replacement = self.replacements.get(_CASTS[func])
        if replacement is None or args[0].device.type != self.device_type:
            return func(*args, **kwargs)
        return args[0].to(replacement)

    def cast_by_type(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `tensor.type(dtype)`, casting to the replacement for `dtype` if there is one."""
        dtype = args[1] if len(args) > 1 else kwargs.get("dtype")
        replacement = self.replacements.get(dtype) if isinstance(dtype, torch.dtype) else None
        if replacement is None or args[0].device.type != self.device_type:
            return func(*args, **kwargs)
        return args[0].to(replacement)

    def cast_like(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `tensor.type_as(other)`, which changes both device and dtype."""
        return self.move(Tensor.to, (args[0],), {"device": args[1].device, "dtype": args[1].dtype})


def _widen_indices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function that accepts only int64 indices, casting int32 indices to int64 first."""
    position, name = _NEEDS_INT64[func]
    if position < len(args):
        return func(*args[:position], _widen(args[position]), *args[position + 1 :], **kwargs)
    return func(*args, **{key: _widen(value) if key == name else value for key, value in kwargs.items()})


def _widen(value: Any) -> Any:
    return value.to(torch.int64) if isinstance(value, Tensor) and value.dtype == torch.int32 else value


def parse_to_arguments(
    tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device, torch.dtype]:
    """Return the device and dtype of the result of `tensor.to(…)`, for any of its signatures."""
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


def requests_copy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether `tensor.to(…)` has `copy=True`, which may be the second positional flag after `non_blocking`."""
    flags = [value for value in args if isinstance(value, bool)]
    return flags[1] if len(flags) > 1 else bool(kwargs.get("copy"))


def normalize_new_tensor(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Rewrite `tensor.new_tensor(data)` as `torch.tensor(data)` with explicit device and dtype.

    Calls to other functions are returned unchanged.
    """
    if func is not Tensor.new_tensor:
        return func, args, kwargs
    options = {name: value for name, value in kwargs.items() if value is not None}
    return torch.tensor, args[1:], {"device": args[0].device, "dtype": args[0].dtype, **options}


def find_target_device(data: Any, kwargs: dict[str, Any]) -> torch.device:
    """Return the device for a tensor built from `data` with the given keyword arguments."""
    requested = kwargs.get("device")
    if requested is not None:
        return torch.device(requested)
    return data.device if isinstance(data, Tensor) else torch.get_default_device()


def _is_integer(value: Any) -> bool:
    return not isinstance(value, float) and not (isinstance(value, Tensor) and value.is_floating_point())
