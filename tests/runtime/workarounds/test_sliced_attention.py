"""Attention in slices gives what whole attention gives, and no call holds more scores than the device takes."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

import anyaccel
from anyaccel.backends.claim import SizeLimit
from anyaccel.backends.device import register_virtual
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.planning import PlacementOptions
from anyaccel.planning.attention import AttentionRule, choose_attention
from anyaccel.recipes import recipes, run
from anyaccel.runtime.workarounds.function_modes import ModelFunctionMode
from anyaccel.runtime.workarounds.sliced_attention import make_handlers
from tests.conftest import NEEDS_RECIPES


class Recorder(TorchFunctionMode):
    """Notes the rows (batch by heads) and the scores of every attention call that reaches torch."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []
        self.scores: list[int] = []
        self.contiguous: list[bool] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            names = ("query", "key", "value")
            query, key, value = [args[place] if place < len(args) else kwargs[name] for place, name in enumerate(names)]
            self.rows.append(math.prod(query.shape[:-2]))
            self.scores.append(self.rows[-1] * query.shape[-2] * key.shape[-2])
            self.contiguous.append(all(part.is_contiguous() for part in (query, key, value)))
        return func(*args, **kwargs)


def attend(rule: AttentionRule, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Recorder]:
    """One attention call inside the seam, and what became of it."""
    with Recorder() as recorder, ModelFunctionMode(make_handlers(rule)):
        return scaled_dot_product_attention(*args, **kwargs), recorder


SMALL = st.integers(1, 4)
MASKS = ("none", "whole", "queries", "keys", "heads", "batch", "clone_scalars", "causal")


@st.composite
def problems(draw: st.DrawFn) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None, dict[str, Any]]:
    """Query, key, value, mask and options: 3, 4 or 5 dimensions, masks of every broadcast shape, grouped heads."""
    lead = draw(st.sampled_from([1, 2, 3]).flatmap(lambda count: st.tuples(*[SMALL] * count)))
    queries, keys, width = draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(SMALL)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    group = draw(st.sampled_from([1, 2])) if len(lead) >= 2 else 1
    query = normal(*lead[:-1], lead[-1] * group, queries, width)
    key, value = normal(*lead, keys, width), normal(*lead, keys, draw(SMALL))
    kind = draw(st.sampled_from(MASKS))
    options: dict[str, Any] = {"enable_gqa": True} if group > 1 else {}
    if draw(st.booleans()):
        options["scale"] = 0.3
    if kind in ("none", "causal"):
        return (query, key, value), None, options | {"is_causal": kind == "causal"}
    whole = (*query.shape[:-2], queries, keys)
    shape = {
        "whole": whole,
        "queries": (queries, keys),
        "keys": (1, keys),
        "heads": (*([1] * (len(lead) - 1)), *whole[-3:]),
        "batch": (*whole[:-3], 1, *whole[-2:]),
        "clone_scalars": whole,
    }[kind]
    mask = normal(*shape)
    if kind != "clone_scalars":
        mask = mask > 0
        mask[..., 0] = True  # a query that sees nothing gives no number
    return (query, key, value), mask, options


@settings(max_examples=250, derandomize=True, deadline=None, database=None)
@given(problems(), st.sampled_from([None, 1, 2, 3, "auto", "max"]), st.sampled_from([None, 1, 5, 12, 40, 200]))
def test_slices_give_what_whole_attention_gives(
    problem: tuple[tuple[torch.Tensor, ...], torch.Tensor | None, dict[str, Any]],
    heads: str | int | None,
    most: int | None,
) -> None:
    (query, key, value), mask, options = problem
    expected = scaled_dot_product_attention(query, key, value, mask, **options)
    found, seen = attend(AttentionRule(most, heads, contiguous=True), query, key, value, mask, **options)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    keys = key.shape[-2]
    if most is not None:
        assert max(seen.scores) <= max(most, keys), "no call holds more, down to one query of one head"
    if heads is not None:
        at_once = {"auto": max(1, query.shape[-3] // 2), "max": 1}.get(str(heads), heads)
        assert max(seen.rows) <= int(at_once)


def test_a_call_that_fits_is_left_whole() -> None:
    parts = [torch.randn(2, 4, 8, 3) for _ in range(3)]
    _, seen = attend(AttentionRule(most_scores=2 * 4 * 8 * 8), *parts)
    assert seen.rows == [8]
    _, seen = attend(AttentionRule(most_scores=2 * 4 * 8 * 8 - 1), *parts)
    assert seen.rows == [7, 1]


def test_query_key_and_value_are_laid_out_anew_where_the_rule_says_so() -> None:
    parts = [torch.randn(2, 8, 4, 3).transpose(1, 2) for _ in range(3)]
    expected = scaled_dot_product_attention(parts[0], parts[1], parts[2])
    found, seen = attend(AttentionRule(contiguous=True), *parts)
    assert seen.contiguous == [True]
    torch.testing.assert_close(found, expected)
    assert attend(AttentionRule(heads=8), *parts)[1].contiguous == [False]


@pytest.mark.parametrize("shape", [(3, 4), (0, 2, 5, 4), (2, 2, 0, 4)])
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    """No heads at all, no images, no queries."""
    query, other = torch.randn(shape), torch.randn(*shape[:-2], 6, 4)
    expected = scaled_dot_product_attention(query, other, other)
    found, _ = attend(AttentionRule(most_scores=3, heads=1), query, other, other)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("numbers", [False, True])
def test_a_mask_beside_causal_counts_too(numbers: bool) -> None:
    """As on the CPU; torch's own slow path refuses both together."""
    parts = [torch.randn(1, 2, 4, 3) for _ in range(3)]
    mask = torch.tensor([[True] * 4, [True, False, True, True], [True, True, False, True], [True] * 4])
    given_mask = torch.zeros(4, 4).masked_fill(~mask, float("-inf")) if numbers else mask
    expected = scaled_dot_product_attention(parts[0], parts[1], parts[2], mask.tril())
    found, seen = attend(AttentionRule(most_scores=8), *parts, given_mask, is_causal=True)
    assert len(seen.rows) > 2
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_scores_past_two_to_the_32_are_sliced_by_the_plan_of_mps(causal: bool) -> None:
    """Shapes alone, on the meta device: one head of a picture of 2048 pixels, and eight of 1024."""
    rule = choose_attention(
        anyaccel.sheet("mps").on(versions={"macos": "15.0", "torch": "2.13"}), PlacementOptions(), 2
    ).value
    assert rule.most_scores == 2**30
    for heads, length in ((1, 2**16 + 8), (8, 2**14 * 2)):
        parts = [torch.empty(1, heads, length, 8, device="meta", dtype=torch.float16) for _ in range(3)]
        assert heads * length * length > 2**32
        largest = LargestTensor()
        with largest:
            found, seen = attend(rule, *parts, is_causal=causal)
        assert found.shape == parts[0].shape
        assert max(seen.scores) <= 2**30
        assert sum(seen.scores) == heads * length * length
        assert largest.seen <= 2**30, "the mask is cut too"


class LargestTensor(TorchFunctionMode):
    """The most elements of any tensor that a function gives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.seen = max(self.seen, result.numel())
        return result


def lower_the_limit(accelerator: VirtualAccelerator, scores: int) -> None:
    """A device like this one that gets fewer attention scores wrong already."""
    limits = tuple(
        replace(limit, amount=scores) if isinstance(limit, SizeLimit) and limit.of == "attention_scores" else limit
        for limit in accelerator.sheet.largest_tensor
    )
    sheet = replace(accelerator.sheet, largest_tensor=limits)
    accelerator.restart(sheet, accelerator.capacity_bytes, accelerator.strict)
    register_virtual(sheet, accelerator.count)


PIPELINES = ("stable-diffusion", "stable-diffusion-xl", "flux", "stable-diffusion-3")


def find_faults(accelerator: VirtualAccelerator) -> list[str]:
    return [f"{row.effect}: {row.limit} at {row.file}:{row.line}" for row in accelerator.ledger.rows()
            if row.effect in ("wrong", "error")]  # fmt: skip


@pytest.mark.long
@NEEDS_RECIPES
def test_the_plan_slices_where_the_device_would_get_it_wrong() -> None:
    """With a limit that the tiny models pass in plain diffusers: right and within the limit when placed."""

    def use(accelerator: VirtualAccelerator) -> dict[str, tuple[int, list[str], float, int]]:
        warnings.simplefilter("ignore")
        seen = {}
        lower_the_limit(accelerator, 600)
        for name in PIPELINES:
            pipe: Any = recipes()[name].make()
            with Recorder() as before:
                expected = run(recipes()[name], pipe)
            placed = anyaccel.place(pipe, accelerator.name, dtype=torch.float32)
            accelerator.ledger.clear()
            with Recorder() as recorder:
                found = run(recipes()[name], placed)
            difference = float(abs(found - expected).max())
            seen[name] = max(before.scores), find_faults(accelerator), difference, max(recorder.scores)
        return seen

    for name, (before, faults, difference, most) in run_forked("mps", use, strict=True).items():
        assert before > 600, f"{name} does not reach the limit, and so shows nothing"
        assert faults == [], name
        assert difference < 1e-4, name
        assert most <= 300, name


@NEEDS_RECIPES
def test_slicing_that_is_asked_for_reaches_every_attention_and_reads_nothing_unwritten() -> None:
    """`max` is one head at a time, in the text encoders and the autoencoder too; off again, it is as before."""

    def use(accelerator: VirtualAccelerator) -> dict[str, list[tuple[list[str], float, int, int]]]:
        warnings.simplefilter("ignore")
        seen = {}
        for name in PIPELINES:
            pipe: Any = recipes()[name].make()
            expected = run(recipes()[name], pipe)
            placed = anyaccel.place(pipe, accelerator.name, dtype=torch.float32)
            results = []
            for size in ("max", None):
                placed.enable_attention_slicing(size)
                accelerator.ledger.clear()
                with Recorder() as recorder:
                    found = run(recipes()[name], placed)
                faults, difference = find_faults(accelerator), float(abs(found - expected).max())
                results.append((faults, difference, max(recorder.rows), len(recorder.rows)))
            seen[name] = results
        return seen

    for name, (one, whole) in run_forked("mps", use, strict=True).items():
        for faults, difference, _, _ in (one, whole):
            assert faults == [], name
            assert difference < 1e-4, name
        assert one[2] == 1, name
        assert whole[2] > 3, name
        assert one[3] > whole[3], name


@NEEDS_RECIPES
def test_diffusers_own_slicing_would_read_what_was_never_written() -> None:
    """What the portable pipeline's slicing is in place of: one NaN that lay in memory turns the picture black."""

    def use(accelerator: VirtualAccelerator) -> tuple[list[str], list[str]]:
        warnings.simplefilter("ignore")
        pipe: Any = recipes()["stable-diffusion"].make()
        pipe.enable_attention_slicing(1)
        pipe.to(accelerator.device())
        with pytest.raises(anyaccel.AnyaccelError, match="not finite"):
            run(recipes()["stable-diffusion"], pipe)
        plain = find_faults(accelerator)
        accelerator.ledger.clear()
        placed = anyaccel.place(pipe, accelerator.name, dtype=torch.float32)
        assert run(recipes()["stable-diffusion"], placed).std() > 0
        return plain, find_faults(accelerator)

    plain, placed = run_forked("mps", use)
    assert any("baddbmm" in fault for fault in plain)
    assert placed == [], "a model that diffusers sliced before it was placed is right too"
