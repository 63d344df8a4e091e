"""Quantized weights as plain tensors, and how to dequantize them in operations that every device supports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from anyaccel.upstream.gguf_internals import dequantize_blocks

__all__ = ["FLOAT8", "Blocks", "Gguf", "Parts", "WeightFormat", "make_float8_table", "pack_bits", "unpack_bits"]

# The tensors of a quantized weight, by name. All are uint8, int8 or floating-point tensors.
Parts: TypeAlias = Mapping[str, torch.Tensor]
# The names of formats with float8 codes.
FLOAT8 = {torch.float8_e4m3fn: "fp8-e4m3", torch.float8_e5m2: "fp8-e5m2"}


@dataclass(frozen=True, kw_only=True)
class WeightFormat(ABC):
    """How the tensors of a quantized weight give the weight."""

    name: str
    """The format as users write it: `nf4`, `gguf:Q4_0`."""
    shape: tuple[int, ...]
    """The shape of the dequantized weight."""

    @abstractmethod
    def dequantize(self, parts: Parts) -> torch.Tensor:
        """Return the weight in float32."""


@dataclass(frozen=True, kw_only=True)
class Blocks(WeightFormat):
    """Codes of 8, 4 or 2 bits in row-major order, with one scale for every `block` consecutive weights.

    The parts are `codes`, `scales` and optionally

    - `table`: the value of each code; without it, the code is the value,
    - `offsets`: one summand per block,
    - `scale_table`, `scale_factors` and `scale_offset`: the scales are codes of this table, times one factor for every
      `scale_block` consecutive scales, plus the offset (double quantization of bitsandbytes, NVFP4).
    """

    block: int
    bits: int = 8
    high_first: bool = False
    """Whether the first weight in a byte is in its highest bits."""
    native: torch.dtype | None = None
    """The float8 dtype of the codes, if the device has it: it is then faster than `table`."""
    scale_block: int = 1

    def dequantize(self, parts: Parts) -> torch.Tensor:
        """Return the weight in float32."""
        codes = unpack_bits(parts["codes"].reshape(-1), self.bits, high_first=self.high_first)
        if self.native is not None:
            values = codes.view(self.native).to(torch.float32)
        else:
            values = _look_up(parts["table"], codes) if "table" in parts else codes.to(torch.float32)
        values = values.reshape(-1, self.block) * self._read_scales(parts).reshape(-1, 1)
        if "offsets" in parts:
            values = values + parts["offsets"].to(torch.float32).reshape(-1, 1)
        count = 1
        for size in self.shape:
            count *= size
        return values.reshape(-1)[:count].reshape(self.shape)

    def _read_scales(self, parts: Parts) -> torch.Tensor:
        scales = parts["scales"]
        if "scale_table" not in parts:
            return scales.to(torch.float32)
        values = _look_up(parts["scale_table"], scales.reshape(-1))
        padding = -len(values) % self.scale_block
        padded = torch.nn.functional.pad(values, (0, padding)).reshape(-1, self.scale_block)
        return (padded * parts["scale_factors"].reshape(-1, 1) + parts["scale_offset"]).reshape(-1)[: len(values)]


@dataclass(frozen=True, kw_only=True)
class Gguf(WeightFormat):
    """Blocks of a GGUF file, as bytes. The only part is `codes`."""

    kind: int
    """The number of the quantization in the `gguf` package."""

    def dequantize(self, parts: Parts) -> torch.Tensor:
        """Return the weight in float32."""
        return dequantize_blocks(parts["codes"], self.kind).to(torch.float32).reshape(self.shape)


def unpack_bits(packed: torch.Tensor, bits: int, *, high_first: bool = False) -> torch.Tensor:
    """Return the codes in a tensor of bytes, one per element."""
    if bits == 8:
        return packed
    shifts = range(0, 8, bits)
    codes = [(packed >> shift) & (2**bits - 1) for shift in (reversed(shifts) if high_first else shifts)]
    return torch.stack(codes, -1).reshape(-1)


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the inverse of `unpack_bits`; the last byte is padded with zeros."""
    if bits == 8:
        return codes
    per_byte = 8 // bits
    padded = torch.nn.functional.pad(codes.reshape(-1).to(torch.uint8), (0, -codes.numel() % per_byte))
    columns = padded.reshape(-1, per_byte)
    packed = torch.zeros_like(columns[:, 0])
    for column in range(per_byte):
        packed |= columns[:, column] << (column * bits)
    return packed


def make_float8_table(dtype: torch.dtype) -> torch.Tensor:
    """Return the values of all 256 codes of a float8 dtype, in float32."""
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).to(torch.float32)


def _look_up(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    # int32: several devices have no int64.
    return table.index_select(0, codes.to(torch.int32))
