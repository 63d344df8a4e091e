"""Methods of pipelines that read or change weights, which may be offloaded."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

from anyaccel.backends.device_type_checks import is_host
from anyaccel.quantized_weights.dequantized_linear import listing_weights
from anyaccel.runtime.introspection import find_models
from anyaccel.runtime.placement.oom_retry import weights_on_cpu
from anyaccel.runtime.placement.quantized_layers import check_not_dequantized
from anyaccel.runtime.placement_state import find_placement
from anyaccel.runtime.speed.quantize import check_not_quantized
from anyaccel.runtime.weight_files.adapter_files import checking_adapter_files, reads_adapter_files
from anyaccel.runtime.workarounds.function_modes import make_pipeline_function_mode

__all__ = ["WEIGHT_METHODS", "with_weights"]

# Methods of diffusers pipelines that read or change weights, so offloaded weights are restored first.
WEIGHT_METHODS = (
    "save_pretrained",
    *(f"{verb}_{what}" for verb in ("load", "unload") for what in ("lora_weights", "ip_adapter", "textual_inversion")),
    *(f"{verb}_{what}" for verb in ("fuse", "unfuse") for what in ("lora", "qkv_projections")),
)

_NEEDS_PLAIN_WEIGHTS = ("save_pretrained", "fuse_lora", "fuse_qkv_projections")


def with_weights(kind: Any, name: str) -> Any:
    """Wrap a method that reads or changes weights, so offloaded weights are on the CPU during the call.

    New layers are initialized with random numbers of the CPU, as in a call. The wrapper raises
    `UsageError` if a model is quantized, and `ModelFileError` for a damaged or unsafe file.
    """

    @functools.wraps(getattr(kind, name))
    def call_with_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_not_quantized(self, name)
        if name in _NEEDS_PLAIN_WEIGHTS:
            check_not_dequantized(self, name)
        placement = find_placement(self)
        with ExitStack() as stack:
            stack.enter_context(weights_on_cpu(self))
            if name != "save_pretrained" and placement is not None and not is_host(placement.device):
                stack.enter_context(make_pipeline_function_mode(placement.plan, placement.device))
            if name == "load_lora_weights":
                for model in find_models(self).values():
                    stack.enter_context(listing_weights(model))
            if reads_adapter_files(name):
                method = getattr(kind, name)
                stack.enter_context(checking_adapter_files(method, (self, *args), kwargs))
            # Looked up at every call, because users and tests patch it.
            return getattr(kind, name)(self, *args, **kwargs)

    return call_with_weights
