"""A weight of a model file that has been read but not yet been assigned to a layer: codes of 8 bits with scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from anyaccel.quantized_weights.library_layers import QuantizedWeight, make_float8, make_int8
from anyaccel.upstream.torch_internals import skip_subclass_functions, tree_map_only

__all__ = ["ScaledWeight"]

# Functions that keep rows together or split them: applied to the codes and to the scales.
_ROW_FUNCTIONS = (torch.chunk, torch.Tensor.chunk, torch.split, torch.Tensor.split)
_JOIN_FUNCTIONS = (torch.cat, torch.concat, torch.concatenate)
# Functions that change neither shape nor values.
_SAME = (torch.Tensor.contiguous, torch.Tensor.detach, torch.Tensor.clone, torch.clone, torch.detach)
# Functions that read the shape or the place of the tensor.
_READ = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_meta")),
        *(
            getattr(torch.Tensor, name).__get__
            for name in ("requires_grad", "is_leaf", "grad", "is_sparse", "is_nested")
        ),
        *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.is_contiguous),
        *(torch.Tensor.is_floating_point, torch.is_floating_point, torch.Tensor.element_size, torch.Tensor.stride),
        *(torch.Tensor.__len__, torch.Tensor.untyped_storage, torch.Tensor.data_ptr, torch.Tensor.storage_offset),
        *(torch.Tensor.is_complex, torch.is_complex, torch.numel, torch.Tensor.__hash__, torch.Tensor.__class__),
    }
)


class ScaledWeight(torch.Tensor):
    """Codes with one scale per row or per block of a row, or with none.

    Converters of single-file checkpoints split and concatenate rows, which keeps the codes. Every other function gets
    the dequantized values in float32, so that scales are never dropped.

    All codes have the dtype `float8_e4m3fn` here, also those of `kind` e5m2 and int8: the loader of diffusers
    dequantizes other dtypes (`load_model_dict_into_meta`).
    """

    kind: torch.dtype
    scales: torch.Tensor | None
    """Two dimensions: rows and blocks of a row."""

    @classmethod
    def make(cls, codes: torch.Tensor, scales: torch.Tensor | None, kind: torch.dtype | None = None) -> ScaledWeight:
        """Return the weight with codes of one byte each."""
        made = codes.detach().view(torch.float8_e4m3fn).as_subclass(cls)
        made.kind, made.scales = kind or codes.dtype, scales
        return made

    def read_codes(self) -> torch.Tensor:
        """Return the codes in their own dtype."""
        with skip_subclass_functions():
            return self.as_subclass(torch.Tensor).view(self.kind)

    def quantized(self) -> QuantizedWeight:
        """Return the format and the tensors for a `DequantizedLinear`."""
        codes, scales = self.read_codes(), self.scales
        if self.kind is torch.int8:
            return make_int8("int8", codes, torch.ones(1) if scales is None else scales)
        return make_float8(codes, torch.ones(1) if scales is None else scales)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the values."""
        values = self.read_codes().to(torch.float32)
        if self.scales is not None:
            blocks = values.reshape(*self.scales.shape, -1)
            values = (blocks * self.scales.to(values.device).unsqueeze(-1)).reshape(values.shape)
        return values.to(dtype)

    def _with_rows(self, codes: torch.Tensor, scales: torch.Tensor | None) -> ScaledWeight:
        return ScaledWeight.make(codes, scales, self.kind)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Apply a function of torch to the codes and scales if it keeps rows, and to the values otherwise."""
        kwargs = dict(kwargs or {})
        if func in _READ:
            with skip_subclass_functions():
                return func(*args, **kwargs)
        result = cls._apply_to_rows(func, args, kwargs)
        if result is not None:
            return result
        plain = tree_map_only(ScaledWeight, ScaledWeight.dequantize, (args, kwargs))
        return func(*plain[0], **plain[1])

    @classmethod
    def _apply_to_rows(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function that keeps rows, or None for another function."""
        source: Any = args[0] if args else None
        if func in _ROW_FUNCTIONS and kwargs.get("dim", args[2] if len(args) > 2 else 0) == 0:
            codes = func(source.read_codes(), *args[1:], **kwargs)
            scales = [None] * len(codes) if source.scales is None else func(source.scales, *args[1:], **kwargs)
            return tuple(source._with_rows(code, scale) for code, scale in zip(codes, scales, strict=True))
        if func in _JOIN_FUNCTIONS and kwargs.get("dim", args[1] if len(args) > 1 else 0) == 0:
            return cls._join(func, list(source))
        if func is torch.Tensor.to and isinstance(source, cls):
            target = torch.empty(0, dtype=source.dtype, device=source.device).to(*args[1:], **kwargs)
            if target.dtype is not source.dtype:
                return source.dequantize(target.dtype).to(target.device)
            scales = None if source.scales is None else source.scales.to(target.device)
            return source._with_rows(source.read_codes().to(target.device), scales)
        if func in _SAME:
            return source._with_rows(func(source.read_codes()), source.scales)
        return None

    @classmethod
    def _join(cls, func: Callable[..., Any], parts: list[Any]) -> Any:
        first = parts[0]
        for part in parts:
            if (
                not isinstance(part, cls)
                or part.kind is not first.kind
                or (part.scales is None) != (first.scales is None)
            ):
                return None
            if part.scales is not None and part.scales.shape[1] != first.scales.shape[1]:
                return None
        scales = None if first.scales is None else func([part.scales for part in parts])
        return first._with_rows(func([part.read_codes() for part in parts]), scales)
