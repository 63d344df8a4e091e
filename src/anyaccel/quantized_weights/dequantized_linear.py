"""A linear layer that keeps its weight in a quantized format and dequantizes it for each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from anyaccel.errors import UsageError
from anyaccel.quantized_weights.formats import Parts, WeightFormat

__all__ = ["DequantizedLinear", "listing_weights"]


class _ReadOnlyWeight(torch.Tensor):
    """A dequantized weight. Operations return plain tensors, and assignments to `data` raise `UsageError`."""

    __torch_function__ = torch.nn.Parameter.__torch_function__

    @property
    def data(self) -> torch.Tensor:
        """The tensor as a plain one."""
        return self.as_subclass(torch.Tensor).data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # peft does this when it merges an adapter.
        raise UsageError(
            "weights of a quantized layer cannot be changed: they are dequantized on each access",
            hint="convert the model first with model.dequantize(); LoRA adapters need not be fused",
        )


class DequantizedLinear(torch.nn.Linear):
    """A replacement for a quantized linear layer of another library, in plain operations.

    It is a `torch.nn.Linear`, so LoRA adapters can be added to it. Its `weight` is computed on each access.
    """

    format: WeightFormat
    dtype: torch.dtype
    """The dtype of `weight`."""
    part_names: tuple[str, ...]
    error: float | None = None
    """The relative error of the weight if `weights=` has quantized it."""

    @classmethod
    def convert(cls, layer: torch.nn.Module, form: WeightFormat, parts: Parts, dtype: torch.dtype) -> DequantizedLinear:
        """Return a quantized layer as a `DequantizedLinear`: the same object if its class can be changed.

        Hooks and references of the user then stay.
        """
        # The class changes when the layer has all attributes, so that an interruption leaves a layer that works.
        attributes: Any = layer
        attributes.format, attributes.dtype, attributes.part_names = form, dtype, tuple(parts)
        for name, part in parts.items():
            layer.register_buffer(name, part)
        converted: Any = layer
        try:
            layer.__class__ = cls
        except TypeError:  # the class has another memory layout, such as `QLinear` of quanto
            converted = cls.__new__(cls)
            vars(converted).update(vars(layer))
        del converted.weight
        return converted  # type: ignore[no-any-return]

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The dequantized weight. Changes to it would be lost, so they raise an error."""
        with torch.inference_mode():  # torch rejects changes of such tensors, except through `data`
            weight = self._dequantize(self.dtype)
        # Tensors of virtual devices are wrappers, which cannot be views of another class.
        return weight.as_subclass(_ReadOnlyWeight) if type(weight) is torch.Tensor else weight

    def _dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return self.format.dequantize({name: getattr(self, name) for name in self.part_names}).to(dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name in torch
        """Apply the layer, in the dtype of the input."""
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return torch.nn.functional.linear(input, self._dequantize(input.dtype), bias)

    def count_weights(self) -> int:
        """Return the number of elements of `weight`, without dequantizing it."""
        return self.in_features * self.out_features

    def count_bytes(self) -> int:
        """Return the size of the quantized weight."""
        return sum(getattr(self, name).nbytes for name in self.part_names)

    def to_linear(self, dtype: torch.dtype | None = None) -> torch.nn.Linear:
        """Return a plain layer with the dequantized weight, in its dtype by default."""
        linear = torch.nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = torch.nn.Parameter(self._dequantize(dtype or self.dtype), requires_grad=False)
        linear.bias = self.bias
        return linear.train(self.training)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        kept: dict[str, torch.Tensor] = {name: getattr(self, name) for name in self.part_names}
        moved = super()._apply(fn, recurse)
        for name, before in kept.items():
            after: torch.Tensor = getattr(self, name)
            # `model.to(dtype)` must not round the scales.
            if after.dtype != before.dtype:
                setattr(self, name, before.to(after.device))
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=next(iter(kept.values())).device)).dtype
        return moved

    def extra_repr(self) -> str:
        """Return the layer's sizes and format, as shown by `print(model)`."""
        return f"{super().extra_repr()}, format={self.format.name}"


@contextmanager
def listing_weights(model: torch.nn.Module) -> Iterator[None]:
    """Let `state_dict` of a model list the weights of its dequantized layers in this block, as zeros without memory.

    diffusers reads their shapes from it when it loads adapters (loaders/lora_pipeline.py, diffusers 0.42.1,
    `_maybe_expand_lora_state_dict`).
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, DequantizedLinear)}

    def add_weights(module: torch.nn.Module, content: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, layer in layers.items():
            zero = torch.zeros((), dtype=layer.dtype, device=getattr(layer, layer.part_names[0]).device)
            content[f"{prefix}{name}.weight"] = zero.expand(layer.out_features, layer.in_features)

    handle = model.register_state_dict_post_hook(add_weights)
    try:
        yield
    finally:
        handle.remove()
