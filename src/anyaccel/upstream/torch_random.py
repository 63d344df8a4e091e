"""Torch functions that draw random numbers."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BY_SHAPE", "FROM_VALUES", "INITIALIZERS", "INTEGERS", "IN_PLACE", "LIKE", "RANDOM_FUNCTIONS"]

BY_SHAPE = (torch.randn, torch.rand)
INTEGERS = (torch.randint, torch.randperm)
# Each function calls this method of an empty tensor.
LIKE = {
    torch.randn_like: Tensor.normal_, torch.rand_like: Tensor.uniform_, torch.randint_like: Tensor.random_
}  # fmt: skip
IN_PLACE = (
    Tensor.normal_, Tensor.uniform_, Tensor.random_, Tensor.exponential_, Tensor.bernoulli_, Tensor.cauchy_,
    Tensor.log_normal_, Tensor.geometric_,
)  # fmt: skip
# A function mode receives these instead of the methods above; the other functions of `torch.nn.init` call the methods.
INITIALIZERS = (torch.nn.init.uniform_, torch.nn.init.normal_, torch.nn.init.kaiming_uniform_)
# The functions with private names draw for `torch.distributions`.
FROM_VALUES = (
    torch.multinomial, Tensor.multinomial, torch.bernoulli, Tensor.bernoulli, torch.normal, torch.poisson,
    torch.binomial, torch._standard_gamma, torch._sample_dirichlet,
)  # fmt: skip
RANDOM_FUNCTIONS = frozenset((*BY_SHAPE, *LIKE, *INTEGERS, *IN_PLACE, *INITIALIZERS, *FROM_VALUES))
