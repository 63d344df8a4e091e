"""Sliced attention: the same result as unsliced attention, with a limited number of scores per call."""

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
    """Records the rows (batch by heads) and scores of every attention call that reaches torch."""

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
            query, key, value = [
                args[position] if position < len(args) else kwargs[name] for position, name in enumerate(names)
            ]
            self.rows.append(math.prod(query.shape[:-2]))
            self.scores.append(self.rows[-1] * query.shape[-2] * key.shape[-2])
            self.contiguous.append(all(tensor.is_contiguous() for tensor in (query, key, value)))
        return func(*args, **kwargs)


def attend(rule: AttentionRule, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Recorder]:
    """Run one attention call under a rule; return the result and the recorded calls."""
    with Recorder() as recorder, ModelFunctionMode(make_handlers(rule)):
        return scaled_dot_product_attention(*args, **kwargs), recorder


SMALL = st.integers(1, 4)
MASKS = ("none", "full", "queries", "keys", "heads", "batch", "float", "causal")


@st.composite
def problems(draw: st.DrawFn) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None, dict[str, Any]]:
    """Generate query, key, value, mask and options: 3 to 5 dimensions, all mask shapes, grouped heads."""
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
    full = (*query.shape[:-2], queries, keys)
    shape = {
        "full": full,
        "queries": (queries, keys),
        "keys": (1, keys),
        "heads": (*([1] * (len(lead) - 1)), *full[-3:]),
        "batch": (*full[:-3], 1, *full[-2:]),
        "float": full,
    }[kind]
    mask = normal(*shape)
    if kind != "float":
        mask = mask > 0
        mask[..., 0] = True  # a query that sees no key gives NaN
    return (query, key, value), mask, options


@settings(max_examples=250, derandomize=True, deadline=None, database=None)
@given(problems(), st.sampled_from([None, 1, 2, 3, "auto", "max"]), st.sampled_from([None, 1, 5, 12, 40, 200]))
def test_sliced_attention_matches_unsliced_attention(
    problem: tuple[tuple[torch.Tensor, ...], torch.Tensor | None, dict[str, Any]],
    heads: str | int | None,
    max_scores: int | None,
) -> None:
    (query, key, value), mask, options = problem
    expected = scaled_dot_product_attention(query, key, value, mask, **options)
    actual, seen = attend(AttentionRule(max_scores, heads, contiguous=True), query, key, value, mask, **options)
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    keys = key.shape[-2]
    if max_scores is not None:
        assert max(seen.scores) <= max(max_scores, keys), "down to one query of one head"
    if heads is not None:
        at_once = {"auto": max(1, query.shape[-3] // 2), "max": 1}.get(str(heads), heads)
        assert max(seen.rows) <= int(at_once)


def test_attention_within_the_limit_is_not_sliced() -> None:
    inputs = [torch.randn(2, 4, 8, 3) for _ in range(3)]
    _, seen = attend(AttentionRule(max_scores=2 * 4 * 8 * 8), *inputs)
    assert seen.rows == [8]
    _, seen = attend(AttentionRule(max_scores=2 * 4 * 8 * 8 - 1), *inputs)
    assert seen.rows == [7, 1]


def test_contiguous_rule_copies_query_key_and_value() -> None:
    inputs = [torch.randn(2, 8, 4, 3).transpose(1, 2) for _ in range(3)]
    expected = scaled_dot_product_attention(inputs[0], inputs[1], inputs[2])
    actual, seen = attend(AttentionRule(contiguous=True), *inputs)
    assert seen.contiguous == [True]
    torch.testing.assert_close(actual, expected)
    assert attend(AttentionRule(heads=8), *inputs)[1].contiguous == [False]


@pytest.mark.parametrize("shape", [(3, 4), (0, 2, 5, 4), (2, 2, 0, 4)])
def test_missing_heads_images_and_queries(shape: tuple[int, ...]) -> None:
    """No head dimension, an empty batch, and no queries."""
    query, other = torch.randn(shape), torch.randn(*shape[:-2], 6, 4)
    expected = scaled_dot_product_attention(query, other, other)
    actual, _ = attend(AttentionRule(max_scores=3, heads=1), query, other, other)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("float_mask", [False, True])
def test_mask_and_causal_are_combined(float_mask: bool) -> None:
    """Torch itself rejects a mask together with is_causal in its math kernel."""
    inputs = [torch.randn(1, 2, 4, 3) for _ in range(3)]
    mask = torch.tensor([[True] * 4, [True, False, True, True], [True, True, False, True], [True] * 4])
    mask_argument = torch.zeros(4, 4).masked_fill(~mask, float("-inf")) if float_mask else mask
    expected = scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], mask.tril())
    actual, seen = attend(AttentionRule(max_scores=8), *inputs, mask_argument, is_causal=True)
    assert len(seen.rows) > 2
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_mps_plan_slices_more_than_2_32_scores(causal: bool) -> None:
    """On the meta device: one head of an image of 2048 pixels, and eight heads of 1024."""
    rule = choose_attention(
        anyaccel.sheet("mps").on(versions={"macos": "15.0", "torch": "2.13"}), PlacementOptions(), 2
    ).value
    assert rule.max_scores == 2**30
    for heads, length in ((1, 2**16 + 8), (8, 2**14 * 2)):
        inputs = [torch.empty(1, heads, length, 8, device="meta", dtype=torch.float16) for _ in range(3)]
        assert heads * length * length > 2**32
        largest = LargestTensor()
        with largest:
            actual, seen = attend(rule, *inputs, is_causal=causal)
        assert actual.shape == inputs[0].shape
        assert max(seen.scores) <= 2**30
        assert sum(seen.scores) == heads * length * length
        assert largest.seen <= 2**30, "the mask is sliced too"


class LargestTensor(TorchFunctionMode):
    """Records the number of elements of the largest result."""

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


def lower_limit(accelerator: VirtualAccelerator, scores: int) -> None:
    """Lower the number of attention scores from which the device returns wrong results."""
    limits = tuple(
        replace(limit, amount=scores) if isinstance(limit, SizeLimit) and limit.of == "attention_scores" else limit
        for limit in accelerator.sheet.largest_tensor
    )
    sheet = replace(accelerator.sheet, largest_tensor=limits)
    accelerator.restart(sheet, accelerator.capacity_bytes, accelerator.strict)
    register_virtual(sheet, accelerator.count)


PIPELINES = (
    ("stable-diffusion", "flux"),
    pytest.param(("stable-diffusion-xl", "stable-diffusion-3"), marks=pytest.mark.slow),
)


def find_faults(accelerator: VirtualAccelerator) -> list[str]:
    return [f"{row.effect}: {row.limit} at {row.file}:{row.line}" for row in accelerator.ledger.rows()
            if row.effect in ("wrong", "error")]  # fmt: skip


@pytest.mark.long
@NEEDS_RECIPES
@pytest.mark.parametrize("names", PIPELINES, ids=", ".join)
def test_plan_slices_attention_that_would_be_wrong(names: tuple[str, ...]) -> None:
    """With a limit that the tiny models exceed in plain diffusers."""

    def use(accelerator: VirtualAccelerator) -> dict[str, tuple[int, list[str], float, int]]:
        warnings.simplefilter("ignore")
        seen = {}
        lower_limit(accelerator, 600)
        for name in names:
            pipe: Any = recipes()[name].make()
            with Recorder() as before:
                expected = run(recipes()[name], pipe)
            placed = anyaccel.place(pipe, accelerator.name, dtype=torch.float32)
            accelerator.ledger.clear()
            with Recorder() as recorder:
                actual = run(recipes()[name], placed)
            difference = float(abs(actual - expected).max())
            seen[name] = max(before.scores), find_faults(accelerator), difference, max(recorder.scores)
        return seen

    for name, (before, faults, difference, max_scores) in run_forked("mps", use, strict=True).items():
        assert before > 600, f"{name} does not reach the limit"
        assert faults == [], name
        assert difference < 1e-4, name
        assert max_scores <= 300, name


@NEEDS_RECIPES
@pytest.mark.parametrize("names", PIPELINES, ids=", ".join)
def test_requested_slicing_applies_to_every_attention(names: tuple[str, ...]) -> None:
    """Run one head at a time with "max", also in text encoders and the autoencoder; it can be disabled again."""

    def use(accelerator: VirtualAccelerator) -> dict[str, list[tuple[list[str], float, int, int]]]:
        warnings.simplefilter("ignore")
        seen = {}
        for name in names:
            pipe: Any = recipes()[name].make()
            expected = run(recipes()[name], pipe)
            placed = anyaccel.place(pipe, accelerator.name, dtype=torch.float32)
            results = []
            for size in ("max", None):
                placed.enable_attention_slicing(size)
                accelerator.ledger.clear()
                with Recorder() as recorder:
                    actual = run(recipes()[name], placed)
                faults, difference = find_faults(accelerator), float(abs(actual - expected).max())
                results.append((faults, difference, max(recorder.rows), len(recorder.rows)))
            seen[name] = results
        return seen

    for name, (sliced, full) in run_forked("mps", use, strict=True).items():
        for faults, difference, _, _ in (sliced, full):
            assert faults == [], name
            assert difference < 1e-4, name
        assert sliced[2] == 1, name
        assert full[2] > 3, name
        assert sliced[3] > full[3], name


@NEEDS_RECIPES
def test_slicing_of_diffusers_reads_uninitialized_memory() -> None:
    """A NaN in uninitialized memory makes the image black, unless the pipeline is placed."""

    def use(accelerator: VirtualAccelerator) -> tuple[list[str], list[str]]:
        warnings.simplefilter("ignore")
        pipe: Any = recipes()["stable-diffusion"].make()
        pipe.enable_attention_slicing(1)
        pipe.to(accelerator.device())
        with pytest.raises(anyaccel.AnyaccelError, match="NaN or Inf"):
            run(recipes()["stable-diffusion"], pipe)
        plain = find_faults(accelerator)
        accelerator.ledger.clear()
        placed = anyaccel.place(pipe, accelerator.name, dtype=torch.float32)
        assert run(recipes()["stable-diffusion"], placed).std() > 0
        return plain, find_faults(accelerator)

    plain, placed = run_forked("mps", use)
    assert any("baddbmm" in fault for fault in plain)
    assert placed == [], "slicing of diffusers enabled before placement is correct too"
