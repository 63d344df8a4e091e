"""Attention in slices: no call holds more scores than the device takes, and the result is the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from anyaccel.planning.attention import AttentionRule

__all__ = ["attend_in_slices", "make_handlers"]

Tensor = torch.Tensor


def make_handlers(rule: AttentionRule) -> dict[Any, Any]:
    """The handler for `scaled_dot_product_attention`, which every attention of diffusers and transformers ends in."""

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
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    rows = math.prod(query.shape[:-2])
    heads = _read_heads(rule, query.shape[-3] if query.dim() > 2 else 1)
    scores = rows * query.shape[-2] * key.shape[-2]
    fits = rule.most_scores is None or scores <= rule.most_scores
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale}
    if not scores or (fits and (heads is None or rows <= heads)):
        more = {"enable_gqa": True} if enable_gqa else {}
        return scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal, **options, **more)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    return attend_in_slices(query, key, value, attn_mask, heads or rows, rule.most_scores, causal=is_causal, **options)


def _read_heads(rule: AttentionRule, heads: int) -> int | None:
    """How many heads attend at once: all (None), half of them, one, or as many as was asked for."""
    if rule.heads is None or isinstance(rule.heads, int):
        return rule.heads
    return max(1, heads // 2) if rule.heads == "auto" else 1


def attend_in_slices(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    rows_at_once: int,
    most_scores: int | None,
    *,
    causal: bool = False,
    **options: Any,
) -> Tensor:
    """Attention over some rows (batch × heads) and some queries at a time."""
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    queries, keys = query.shape[-2], key.shape[-2]
    query, key, value = (_flatten(part, lead) for part in (query, key, value))
    if most_scores is not None:
        rows_at_once = max(1, min(rows_at_once, most_scores // (queries * keys)))
        queries_at_once = max(1, min(queries, most_scores // (rows_at_once * keys)))
    else:
        queries_at_once = queries
    parts = []
    for first in range(0, query.shape[0], rows_at_once):
        rows = slice(first, first + rows_at_once)
        columns = []
        for start in range(0, queries, queries_at_once):
            some = slice(start, start + queries_at_once)
            cut = _cut(mask, lead, rows, some)
            if causal:
                cut = _see_what_was_before(cut, query, some, keys)
            columns.append(scaled_dot_product_attention(query[rows, some], key[rows], value[rows], cut, **options))
        parts.append(columns[0] if len(columns) == 1 else torch.cat(columns, dim=-2))
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined.reshape(*lead, queries, value.shape[-1])


def _flatten(part: Tensor, lead: torch.Size) -> Tensor:
    return part.expand(*lead, *part.shape[-2:]).reshape(math.prod(lead), *part.shape[-2:])


def _see_what_was_before(cut: Tensor | None, query: Tensor, some: slice, keys: int) -> Tensor:
    """The mask of some queries that see no key after themselves; one over all queries is never made whole."""
    count = min(some.stop, query.shape[-2]) - some.start
    before = torch.ones(count, keys, dtype=torch.bool, device=query.device).tril(some.start)
    if cut is None:
        return before
    return cut & before if cut.dtype is torch.bool else cut.masked_fill(~before, float("-inf"))


def _cut(mask: Tensor | None, lead: torch.Size, rows: slice, some: slice) -> Tensor | None:
    """The part of the mask for some rows and queries; a mask over all rows is never made whole."""
    if mask is None:
        return None
    if mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask[..., some, :]
    if mask.dim() <= 2:
        return mask
    wide = mask.expand(*lead, *mask.shape[-2:])
    return torch.stack([wide[place] for place in _places(lead, rows)])


def _places(lead: torch.Size, rows: slice) -> Iterator[tuple[int, ...]]:
    """Where the rows of a flattened tensor lie in the whole one."""
    for row in range(rows.start, min(rows.stop, math.prod(lead))):
        place, rest = [], row
        for length in reversed(lead):
            place.append(rest % length)
            rest //= length
        yield tuple(reversed(place))
