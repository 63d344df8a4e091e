"""Flex attention as `scaled_dot_product_attention` with a dense mask.

torch accepts flex attention only on some devices, and cannot trace it on virtual ones.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from anyaccel.backends.device_type_checks import is_host
from anyaccel.emulator.torch_patch_registry import apply_patch, remove_patches
from anyaccel.upstream.torch_internals import supports_flex_attention

__all__ = ["use_dense_masks"]

Tensor = torch.Tensor

_NAME = "torch.nn.attention.flex_attention.flex_attention"
_lock = threading.Lock()
_blocks: list[None] = []


@contextmanager
def use_dense_masks(device: torch.device) -> Iterator[None]:
    """Replace flex attention inside the `with` block if the device lacks it, also in other threads."""
    # Blocks may overlap. A model that uses it has imported its module.
    if _NAME.rpartition(".")[0] not in sys.modules or _has_kernel(torch.empty(0, device=device)):
        yield
        return
    with _lock:
        _blocks.append(None)
        apply_patch(_NAME, lambda original: functools.partial(_attend, original), "dense masks")
    try:
        yield
    finally:
        with _lock:
            _blocks.pop()
            if not _blocks:
                remove_patches("dense masks")


def _attend(
    original: Any, query: Tensor, key: Tensor, value: Tensor, score_mod: Any = None, block_mask: Any = None, **more: Any
) -> Any:
    is_dense = score_mod is None and not more.get("return_lse") and not more.get("return_aux")
    if is_host(query.device) or not is_dense or torch.compiler.is_compiling() or _has_kernel(query):
        return original(query, key, value, score_mod, block_mask, **more)
    options: dict[str, Any] = {"scale": more.get("scale"), "enable_gqa": bool(more.get("enable_gqa"))}
    if block_mask is None:
        return scaled_dot_product_attention(query, key, value, **options)
    mask = _make_dense_mask(block_mask, query, key)
    has_keys = mask.any(-1, keepdim=True)
    # The output of a query without keys is 0, which scaled_dot_product_attention would return as NaN.
    return scaled_dot_product_attention(query, key, value, mask | ~has_keys, **options) * has_keys


def _has_kernel(query: Tensor) -> bool:
    """Return whether flex attention accepts a tensor: one on a device that torch has a kernel for, and not virtual."""
    return type(query) is Tensor and supports_flex_attention(query)


def _make_dense_mask(block_mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """Return a boolean mask with one element per query and key."""
    from torch.nn.attention.flex_attention import create_mask

    queries, keys = query.shape[-2], key.shape[-2]
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    mask: Tensor = create_mask(block_mask.mask_mod, batch, heads, queries, keys, device=str(query.device))
    blocks: Tensor = block_mask.to_dense().bool().to(query.device)
    for dim, size in zip((-2, -1), block_mask.BLOCK_SIZE, strict=True):
        blocks = blocks.repeat_interleave(size, dim)
    return mask.logical_and(blocks[..., :queries, :keys])
