"""Torch functions that draw random numbers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = [
    "BY_SHAPE", "FROM_VALUES", "INITIALIZERS", "INTEGERS", "IN_PLACE", "LIKE", "RANDOM_FUNCTIONS", "WITHOUT_GENERATOR",
]  # fmt: skip

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
# Functions that always use the default generator. Those in `functional` are written in Python, and a function mode is
# not active in the functions that they call.
WITHOUT_GENERATOR = (
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d, functional.alpha_dropout,
    functional.feature_alpha_dropout, functional.gumbel_softmax, functional.rrelu,
    functional.fractional_max_pool2d, functional.fractional_max_pool3d,
    functional.fractional_max_pool2d_with_indices, functional.fractional_max_pool3d_with_indices,
    torch.dropout, torch.dropout_, torch.native_dropout, torch.feature_dropout, torch.feature_dropout_,
    torch.alpha_dropout, torch.alpha_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
    torch.rrelu, torch.rrelu_, torch.svd_lowrank, torch.pca_lowrank, torch.lobpcg,
)  # fmt: skip
RANDOM_FUNCTIONS = frozenset((*BY_SHAPE, *LIKE, *INTEGERS, *IN_PLACE, *INITIALIZERS, *FROM_VALUES, *WITHOUT_GENERATOR))
