"""A Triton kernel, which has no equivalent on other devices."""

import sys

import torch
import triton
import triton.language as tl

models, output = sys.argv[1:3]


@triton.jit
def add(x, y, n, block: tl.constexpr):
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    mask = offsets < n
    tl.store(x + offsets, tl.load(x + offsets, mask) + tl.load(y + offsets, mask), mask)


x = torch.ones(16, device="cuda")
add[(1,)](x, x, 16, block=16)
