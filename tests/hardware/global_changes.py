"""Changes of torch modes, global settings and patched code."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from diffusers.models.attention_processor import AttnProcessor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.hardware.invalidation_cases import case

# Torch's global state


class ScaleLinear(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output * 1.5 if func is functional.linear else output


class ScaleConvolutions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output * 1.5 if func is torch.ops.aten.convolution.default else output


@case(compile=True)
def function_mode(pipe: Any) -> Iterator[None]:
    with ScaleLinear():
        yield


@case(compile=True)
def dispatch_mode(pipe: Any) -> Iterator[None]:
    with ScaleConvolutions():  # type: ignore[no-untyped-call]
        yield


@case(tolerance=5e-2)
def autocast(pipe: Any) -> Iterator[None]:
    with torch.autocast(pipe.device.type, dtype=torch.bfloat16):
        yield


@case(visible=False)
def inference_mode(pipe: Any) -> Iterator[None]:
    with torch.inference_mode():
        yield


@case(visible=False)
def gradients_enabled(pipe: Any) -> Iterator[None]:
    with torch.enable_grad():
        yield


@case(visible=False, drops=True)
def attention_kernel(pipe: Any) -> Iterator[None]:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield


@case(visible=False, drops=True)
def deterministic_algorithms(pipe: Any) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@contextmanager
def setting(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Change a setting in `torch.backends`, whose properties `mock.patch` cannot restore."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, before)


@case(visible=False, drops=True)
def tf32_in_matmul(pipe: Any) -> Iterator[None]:
    with setting(torch.backends.cuda.matmul, "allow_tf32", True):
        yield


@case(visible=False, drops=True)
def tf32_in_convolutions(pipe: Any) -> Iterator[None]:
    with setting(torch.backends.cudnn, "allow_tf32", True):
        yield


@case(visible=False, drops=True)
def tf32_with_the_new_settings(pipe: Any) -> Iterator[None]:
    backends: Any = torch.backends
    with (
        setting(backends.cuda.matmul, "fp32_precision", "tf32"),
        setting(backends.cudnn.conv, "fp32_precision", "tf32"),
    ):
        yield


@case(visible=False, drops=True)
def cudnn_disabled(pipe: Any) -> Iterator[None]:
    with setting(torch.backends.cudnn, "enabled", False):
        yield


# Patched code


def patch(target: str, factor: float = 1.5) -> AbstractContextManager[Any]:
    """Replace a function by one that scales its result, with the name and the module of the original."""
    plain = pkgutil.resolve_name(target)

    @functools.wraps(plain)
    def patched(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor

    return mock.patch(target, patched)


@case(compile=True)
def attention_function_patched(pipe: Any) -> Iterator[None]:
    with patch("torch.nn.functional.scaled_dot_product_attention"):
        yield


@case()
def linear_function_patched(pipe: Any) -> Iterator[None]:
    with patch("torch.nn.functional.linear"):
        yield


@case()
def torch_function_patched(pipe: Any) -> Iterator[None]:
    with patch("torch.cat"):
        yield


@case()
def tensor_method_patched(pipe: Any) -> Iterator[None]:
    with patch("torch.Tensor.contiguous"):
        yield


@case(compile=True)
def forward_of_a_class_patched(pipe: Any) -> Iterator[None]:
    with patch("diffusers.models.resnet.ResnetBlock2D.forward"):
        yield


@case()
def method_of_a_class_patched(pipe: Any) -> Iterator[None]:
    with patch("diffusers.models.attention_processor.Attention.head_to_batch_dim"), processors_without_sdpa(pipe):
        yield


@contextmanager
def processors_without_sdpa(pipe: Any) -> Iterator[None]:
    """Use attention processors that call more methods of the attention layer."""
    before = pipe.unet.attn_processors
    pipe.unet.set_attn_processor(AttnProcessor())  # type: ignore[no-untyped-call]
    yield
    pipe.unet.set_attn_processor(before)


@case()
def helper_function_patched(pipe: Any) -> Iterator[None]:
    with patch("diffusers.models.embeddings.get_timestep_embedding"):
        yield


@case()
def module_global_replaced(pipe: Any) -> Iterator[None]:
    """`F` in the module of the attention processors."""
    fake = mock.Mock(wraps=functional)
    fake.scaled_dot_product_attention = lambda *args, **kwargs: (
        1.5 * functional.scaled_dot_product_attention(*args, **kwargs)
    )
    with mock.patch("diffusers.models.attention_processor.F", fake):
        yield
