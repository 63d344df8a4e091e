"""Checksums of tensors on a device, which detect changes through `.data`: these do not increment version counters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import islice

import numpy
import torch

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
    factors: dict[torch.device, torch.Tensor] = {}
    sums, counts = [], []
    for tensor in tensors:
        if tensor.device not in factors:
            factors[tensor.device] = _make_factors()[:, :chunk_size].to(tensor.device)
        chunks = _view_words(tensor).split(chunk_size)
        counts.append(len(chunks))
        for chunk in chunks:
            products = chunk * factors[tensor.device][:, : chunk.numel()]
            sums.append(products.sum(dim=1, dtype=torch.int32).to(tensors[0].device))
    # One transfer for all tensors: each one waits for the device.
    pairs = iter(torch.stack(sums).tolist() if sums else [])
    return [[value for pair in islice(pairs, count) for value in pair] for count in counts]


def _view_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as 16-bit integers, or as 8-bit integers if it has an odd number of bytes."""
    # Not 32-bit: a negated float differs by 2**31, so that the sum of an even number of them would not change. 64-bit
    # sums would detect it, but not all devices have 64-bit integers.
    dtype = torch.int16 if tensor.nbytes % 2 == 0 else torch.int8
    flat = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return flat.flatten().view(dtype)


@functools.cache
def _make_factors() -> torch.Tensor:
    # NumPy's generator, because function modes can replace torch's random functions.
    generator = numpy.random.default_rng(0)
    factors = generator.integers(-(2**31), 2**31, (2, _MAX_CHUNK_SIZE), dtype=numpy.int32)
    return torch.from_numpy(factors | 1)
