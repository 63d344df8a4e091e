"""Sliced attention, which needs memory for fewer attention scores and returns the same result."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from anyaccel.planning.attention import AttentionRule

__all__ = ["attend_in_slices", "make_handlers"]

# Limits on MPS that slicing avoids (the planner chooses `AttentionRule` from the device sheet):
#   about 2**31 scores and more corrupt the image silently: https://github.com/Comfy-Org/ComfyUI/issues/14837;
#   attention over more than eight queries holds all scores in float32, up to torch 2.13:
#   https://github.com/pytorch/pytorch/pull/178545.
# diffusers' own `enable_attention_slicing` is not an option: it replaces the attention processors, and its `baddbmm`
# returns NaN on MPS (see uninitialized_memory.py).

Tensor = torch.Tensor


def make_handlers(rule: AttentionRule) -> dict[Any, Any]:
    """Return a handler for `scaled_dot_product_attention` that slices attention as `rule` requires."""

    def attend(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _attend(rule, *args, **kwargs)

    return {scaled_dot_product_attention: attend}


def _attend(
    rule: AttentionRule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if rule.contiguous:
        # MPS returns wrong values for permuted inputs: https://github.com/pytorch/pytorch/issues/181133 (torch < 2.12).
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    rows = math.prod(query.shape[:-2])
    heads = _count_heads_per_slice(rule, query.shape[-3] if query.dim() > 2 else 1)
    scores = rows * query.shape[-2] * key.shape[-2]
    fits = rule.max_scores is None or scores <= rule.max_scores
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale}
    if not scores or (fits and (heads is None or rows <= heads)):
        gqa_option = {"enable_gqa": True} if enable_gqa else {}
        return scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal, **options, **gqa_option)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    return attend_in_slices(query, key, value, attn_mask, heads or rows, rule.max_scores, causal=is_causal, **options)


def _count_heads_per_slice(rule: AttentionRule, heads: int) -> int | None:
    """Return the number of heads per slice: half of them for "auto", one for "max", None for all heads."""
    if rule.heads is None or isinstance(rule.heads, int):
        return rule.heads
    return max(1, heads // 2) if rule.heads == "auto" else 1


def attend_in_slices(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    rows_per_slice: int,
    max_scores: int | None,
    *,
    causal: bool = False,
    **options: Any,
) -> Tensor:
    """Compute attention in slices of rows (batch × heads) and queries, to reduce memory use."""
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    queries, keys = query.shape[-2], key.shape[-2]
    query, key, value = (_flatten(tensor, lead) for tensor in (query, key, value))
    if max_scores is not None:
        rows_per_slice = max(1, min(rows_per_slice, max_scores // (queries * keys)))
        queries_per_slice = max(1, min(queries, max_scores // (rows_per_slice * keys)))
    else:
        queries_per_slice = queries
    row_outputs = []
    for first_row in range(0, query.shape[0], rows_per_slice):
        row_slice = slice(first_row, first_row + rows_per_slice)
        query_outputs = []
        for first_query in range(0, queries, queries_per_slice):
            query_slice = slice(first_query, first_query + queries_per_slice)
            mask_slice = _slice_mask(mask, lead, row_slice, query_slice)
            if causal:
                mask_slice = _add_causal_mask(mask_slice, query, query_slice, keys)
            query_outputs.append(
                scaled_dot_product_attention(
                    query[row_slice, query_slice], key[row_slice], value[row_slice], mask_slice, **options
                )
            )
        row_outputs.append(query_outputs[0] if len(query_outputs) == 1 else torch.cat(query_outputs, dim=-2))
    joined = row_outputs[0] if len(row_outputs) == 1 else torch.cat(row_outputs)
    return joined.reshape(*lead, queries, value.shape[-1])


def _flatten(tensor: Tensor, lead: torch.Size) -> Tensor:
    return tensor.expand(*lead, *tensor.shape[-2:]).reshape(math.prod(lead), *tensor.shape[-2:])


# Both functions below build only the slice of a mask: a full mask is as large as the scores that slicing avoids.


def _add_causal_mask(mask: Tensor | None, query: Tensor, query_slice: slice, keys: int) -> Tensor:
    """Return the causal mask for a slice of queries, combined with the caller's mask."""
    count = min(query_slice.stop, query.shape[-2]) - query_slice.start
    causal = torch.ones(count, keys, dtype=torch.bool, device=query.device).tril(query_slice.start)
    if mask is None:
        return causal
    return mask & causal if mask.dtype is torch.bool else mask.masked_fill(~causal, float("-inf"))


def _slice_mask(mask: Tensor | None, lead: torch.Size, row_slice: slice, query_slice: slice) -> Tensor | None:
    """Return the slice of a mask for the given rows and queries."""
    if mask is None:
        return None
    if mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask[..., query_slice, :]
    if mask.dim() <= 2:
        return mask
    expanded = mask.expand(*lead, *mask.shape[-2:])
    return torch.stack([expanded[index] for index in _unravel_rows(lead, row_slice)])


def _unravel_rows(lead: torch.Size, row_slice: slice) -> Iterator[tuple[int, ...]]:
    """Yield the multi-dimensional index of each row in a slice of flattened rows."""
    for row in range(row_slice.start, min(row_slice.stop, math.prod(lead))):
        index, remaining = [], row
        for length in reversed(lead):
            index.append(remaining % length)
            remaining //= length
        yield tuple(reversed(index))
