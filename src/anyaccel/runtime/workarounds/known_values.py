"""Values of small device tensors that are also known on the CPU, so that reading them does not wait for the device.

Pipelines create such tensors from Python numbers and branch on results computed only from them in every step, for
example `if augment_sigma >= sigma` in Cosmos. Their values are computed on the CPU as well, and reading one returns
the CPU's value. A boolean mask with known values becomes integer indices, which have a known shape.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from anyaccel.backends.device_type_checks import is_host, is_on
from anyaccel.runtime.workarounds.dtypes import parse_to_arguments
from anyaccel.upstream.torch_internals import read_version

__all__ = ["KnownValues"]

Tensor = torch.Tensor
Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

# Below the size from which torch computes elementwise operations with several threads (at::internal::GRAIN_SIZE).
_MAX_ELEMENTS = 32768

_TO_CPU, _TO_CUDA = Tensor.cpu.__name__, Tensor.cuda.__name__
_READS = {
    _TO_CPU, "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__", "numpy", "to",
    "nonzero", "argwhere",
}  # fmt: skip
_CASTS = {
    _TO_CUDA, "to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "bool", "clone",
    "contiguous",
}  # fmt: skip
# The values of the first argument have no effect.
_LIKE = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor"}
# Functions without side effects whose results depend only on the values of their arguments, as a torch function mode
# names them.
_COMPUTED = """
zeros ones full tensor as_tensor arange linspace
add sub rsub mul div true_divide floor_divide remainder pow neg abs sqrt rsqrt exp log square reciprocal round floor
ceil sin cos sign clamp clip minimum maximum where eq ne lt le gt ge isnan isfinite masked_fill
logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
__rsub__ __rdiv__ __rpow__ __floordiv__ __rfloordiv__ __eq__ __invert__ __and__ __or__ __xor__
sum any all prod mean min max amin amax argmin argmax cumsum count_nonzero
__getitem__ reshape view view_as flatten unsqueeze squeeze expand expand_as repeat tile repeat_interleave permute
transpose t movedim unbind split chunk stack cat concat roll flip select narrow index_select gather broadcast_to
detach
"""
_FOLLOWED = {*_COMPUTED.split(), *_CASTS, *_LIKE}
# Stands for an argument with unknown values.
_UNKNOWN = object()


@dataclass(frozen=True)
class _Entry:
    reference: weakref.ref[Tensor]
    version: int
    value: Tensor


class KnownValues:
    """The values of the small tensors that one pipeline call creates on the device from values of the CPU.

    Only the pipeline's own code is followed. A tensor that a model or an in-place operation has written to is no
    longer known: its version counter, which it shares with its views, has changed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._entries: dict[int, _Entry] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Any:
        """Return what the function reads from a known value; otherwise `run` it and follow its result's values."""
        name = _find_name(func)
        known = self._find(args[0]) if args else None
        if known is not None and name in _READS:
            target, dtype = parse_to_arguments(args[0], args[1:], kwargs) if name == "to" else (None, known.dtype)
            if target is None or is_host(target):
                return self._read(func, name, known, (args[1:], kwargs), dtype, run)
        if name in ("__getitem__", "__setitem__") and self._entries:
            args = (args[0], self._replace_masks(args[1], run), *args[2:])
        result = run(func, args, kwargs)
        if name == "__setitem__" and known is not None:
            self._follow_write(func, known, args)
        elif name in ("data", "__set__") and args:
            self._entries.pop(id(args[0]), None)  # writes to `tensor.data` do not change the version
        elif name in _FOLLOWED:
            self._follow(func, name, args, kwargs, result)
        return result

    def _find(self, tensor: Any) -> Tensor | None:
        """Return the known value of a tensor on the device, or None."""
        entry = self._entries.get(id(tensor))
        if entry is None or not isinstance(tensor, Tensor) or entry.reference() is not tensor:
            return None
        return entry.value if read_version(tensor) == entry.version else None

    def _add(self, tensor: Tensor, value: Tensor) -> None:
        key = id(tensor)
        if value.shape == tensor.shape and is_host(value.device):
            reference = weakref.ref(tensor, lambda _: self._entries.pop(key, None))
            self._entries[key] = _Entry(reference, read_version(tensor), value.to(tensor.dtype))

    def _read(
        self, func: Any, name: str, known: Tensor, more: tuple[Any, dict[str, Any]], dtype: torch.dtype, run: Run
    ) -> Any:
        """Return the result of a function that reads a tensor, computed from its known value."""
        if name in (_TO_CPU, "to"):
            return known.to(dtype, copy=True)
        result = func(known.clone() if name == "numpy" else known, *more[0], **more[1])
        if name in ("nonzero", "argwhere"):
            return (
                tuple(self._send(item, run) for item in result)
                if isinstance(result, tuple)
                else self._send(result, run)
            )
        return result

    def _send(self, tensor: Tensor, run: Run) -> Any:
        """Copy a CPU tensor to the device; its values remain known."""
        return self.run(Tensor.to, (tensor, self.device), {}, run)

    def _replace_masks(self, index: Any, run: Run) -> Any:
        """Replace the boolean masks with known values in an index by integer indices."""
        entries = index if isinstance(index, tuple) else (index,)
        masks = [
            self._find(entry) if isinstance(entry, Tensor) and entry.dtype is torch.bool else None for entry in entries
        ]
        if not any(mask is not None and mask.dim() for mask in masks):
            return index
        replaced: list[Any] = []
        for entry, mask in zip(entries, masks, strict=True):
            if mask is not None and mask.dim():  # a mask over n dimensions becomes n indices
                replaced += [self._send(indices, run) for indices in mask.nonzero(as_tuple=True)]
            else:
                replaced.append(entry)
        return tuple(replaced)

    def _follow(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Compute the values of a result on the CPU if those of all arguments are known."""
        results = result if isinstance(result, list | tuple) else (result,)
        if kwargs.get("out") is not None or not results or not all(self._is_small(tensor) for tensor in results):
            return
        if name in _CASTS:
            kwargs = {"dtype": result.dtype, "copy": True}  # a copy: the CPU tensor may be written to later
            func, args = Tensor.to, args[:1]
        elif name in _LIKE and args:
            args = (torch.empty((), dtype=args[0].dtype, device="cpu").expand(args[0].shape), *args[1:])
        cpu_args = [self._to_cpu(value) for value in args]
        cpu_kwargs = {key: self._to_cpu(value) for key, value in kwargs.items() if key != "device"}
        if any(value is _UNKNOWN for value in (*cpu_args, *cpu_kwargs.values())):
            return
        if "device" in kwargs:
            cpu_kwargs |= {"device": "cpu"}
        values = func(*cpu_args, **cpu_kwargs)
        for tensor, value in zip(results, values if isinstance(values, list | tuple) else (values,), strict=True):
            # An array given to `as_tensor` shares its memory with the result.
            self._add(tensor, value.clone() if name == "as_tensor" else value)

    def _is_small(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and is_on(value.device, self.device.type)
            and value.numel() <= _MAX_ELEMENTS
            and not (value.is_complex() or value.requires_grad or value.is_inference())
        )

    def _to_cpu(self, value: Any) -> Any:
        """Return an argument with the known values of its tensors, or `_UNKNOWN`."""
        if isinstance(value, Tensor):
            if not is_host(value.device):
                known = self._find(value)
                return _UNKNOWN if known is None else known
            return value if value.numel() <= _MAX_ELEMENTS else _UNKNOWN
        if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
            items = [self._to_cpu(item) for item in value]
            return _UNKNOWN if any(item is _UNKNOWN for item in items) else type(value)(items)
        return value

    def _follow_write(self, func: Any, known: Tensor, args: tuple[Any, ...]) -> None:
        """Apply `tensor[index] = values` to a copy of the tensor's known value."""
        index, values = self._to_cpu(args[1]), self._to_cpu(args[2])
        if index is not _UNKNOWN and values is not _UNKNOWN:
            value = known.clone()
            func(value, index, values)
            self._add(args[0], value)


def _find_name(func: Any) -> str:
    """Return the name of a torch function, or `data` if it reads this attribute."""
    name: str = getattr(func, "__name__", "")
    return "data" if name == "__get__" and func.__self__ is Tensor.data else name
