"""Checksums of tensors on a device, which detect changes through `.data`: these do not increment version counters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import islice

import numpy
import torch

from anyaccel.upstream.torch_internals import skip_function_modes

__all__ = ["choose_chunk_size", "compute_checksums"]

# Elements per operation. Products and factors need 16 MiB each. On one H200, checksums take 8 ms per GB, and the copy
# to the device takes 76 ms; with half this size, they take 14 ms, because of the number of kernel launches.
_MAX_CHUNK_SIZE = 2**21
_MIN_CHUNK_SIZE = 64


def choose_chunk_size(total_bytes: int) -> int:
    """Return the number of elements per operation with which the checksums of a model need 1/16 of its memory."""
    return min(_MAX_CHUNK_SIZE, max(_MIN_CHUNK_SIZE, total_bytes // 256))


def compute_checksums(tensors: Sequence[torch.Tensor], chunk_size: int) -> list[list[int]]:
    """Return two checksums for each chunk of each tensor.

    A checksum is the sum of the tensor's 16-bit words, each multiplied by a pseudo-random odd number that depends on
    its position, modulo 2**32. It also changes with permutations, and if the same number is added to all words.
    """
    factors = _Factors(chunk_size)
    sums, counts = [], []
    # Without function modes: these operations do not need them, and a mode takes longer than an operation.
    with torch.no_grad(), skip_function_modes():
        for tensor in tensors:
            words = _view_words(tensor)
            chunks = words.split(chunk_size) if words.numel() > chunk_size else (words,)
            counts.append(len(chunks))
            for chunk in chunks:
                sums.append((chunk * factors.find(chunk)).sum(dim=1, dtype=torch.int32))
        # One transfer for all tensors: each one waits for the device.
        pairs = iter(torch.stack([pair.to(sums[0].device) for pair in sums]).tolist() if sums else [])
    return [[value for pair in islice(pairs, count) for value in pair] for count in counts]


def _view_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as 16-bit integers, or as 8-bit integers if it has an odd number of bytes."""
    # Not 32-bit: a negated float differs by 2**31, so that the sum of an even number of them would not change. 64-bit
    # sums would detect it, but not all devices have 64-bit integers.
    dtype = torch.int16 if tensor.nbytes % 2 == 0 else torch.int8
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return flat.flatten().view(dtype)


class _Factors:
    """The factors of the words, on each device."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._all: dict[torch.device, torch.Tensor] = {}
        self._first: dict[tuple[torch.device, int], torch.Tensor] = {}

    def find(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return the factors of a chunk's words. Many chunks have the same size."""
        device, count = chunk.device, chunk.numel()
        if device not in self._all:
            self._all[device] = _make_factors()[:, : self._chunk_size].to(device)
        if (device, count) not in self._first:
            self._first[device, count] = self._all[device][:, :count]
        return self._first[device, count]


@functools.cache
def _make_factors() -> torch.Tensor:
    # NumPy's generator, because function modes can replace torch's random functions.
    generator = numpy.random.default_rng(0)
    factors = generator.integers(-(2**31), 2**31, (2, _MAX_CHUNK_SIZE), dtype=numpy.int32)
    return torch.from_numpy(factors | 1)
