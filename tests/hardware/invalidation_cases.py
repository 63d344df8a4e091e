"""Changes to models and to torch's global state that a captured graph or compiled code must not miss.

A change is a context manager that takes a pipeline. It applies the change and undoes it at the end.
The same change is applied to a placed pipeline and to a stock pipeline.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

Change = Callable[[Any], AbstractContextManager[None]]


@dataclass(frozen=True)
class Case:
    """A change, the recipe that it is applied to, and what is expected of it."""

    change: Change
    recipe: str = "stable-diffusion"
    visible: bool = True
    """Whether the change alters the image by more than rounding."""
    drops: bool = False
    """Whether captured graphs must be dropped. If the image changes, comparing it is enough."""
    tolerance: float = 1e-3
    """The largest difference between the placed and the stock image, as a share of the image's range."""
    call: dict[str, Any] = field(default_factory=dict)
    """Arguments of all calls, which replace those of the recipe."""
    compile: bool = False
    """Whether the change is also tested with compiled models."""


CASES: dict[str, Case] = {}


def case(**options: Any) -> Callable[[Callable[[Any], Iterator[Any]]], Change]:
    """Register a generator function as a change, which is undone after its `yield`."""

    def register(function: Callable[[Any], Iterator[Any]]) -> Change:
        change = contextmanager(function)
        CASES[function.__name__] = Case(change, **options)
        return change

    return register


def find_denoiser(pipe: Any) -> Any:
    """Return the UNet or transformer of a pipeline."""
    return pipe.unet if hasattr(pipe, "unet") else pipe.transformer


def find_attention(model: Any) -> Any:
    """Return a cross-attention layer of a model."""
    return next(layer for name, layer in model.named_modules() if name.endswith("attn2"))


_ARGUMENTS: dict[str, Any] = {}
_LATEST_CALLS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@contextmanager
def arguments_changed(pipe: Any, **arguments: Any) -> Iterator[None]:
    """Change the arguments of the calls inside the `with` block."""
    with mock.patch.dict(_ARGUMENTS, arguments):
        yield


def generate(pipe: Any, recipe: Any, **arguments: Any) -> Any:
    """Run a pipeline with the arguments of a recipe and return its first output as a float32 tensor."""
    _LATEST_CALLS[pipe] = (recipe, arguments)
    call = {**recipe.call(), **arguments, **_ARGUMENTS}
    call = {name: value.to(pipe.device) if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    torch.manual_seed(0)  # dropout draws from the global generators
    return torch.as_tensor(pipe(**call, return_dict=False)[0]).float()


def generate_again(pipe: Any) -> None:
    """Repeat the latest call twice, so that a changed model is captured again."""
    recipe, arguments = _LATEST_CALLS[pipe]
    for _ in range(2):
        generate(pipe, recipe, **arguments)
