"""Attention slicing: when it applies and why."""

from __future__ import annotations

import pytest

from anyaccel.planning import PlacementOptions
from anyaccel.planning.attention import AttentionRule, choose_attention
from tests.planning.sheets import NAMES, quirk, real_sheet, size_limit, without_limits


def test_attention_is_unchanged_without_a_known_limit() -> None:
    chosen = choose_attention(without_limits(), PlacementOptions(), 2)
    assert chosen.value == AttentionRule()
    assert "no limit" in chosen.reason
    assert str(chosen) == "unchanged"


def test_smallest_limit_applies_with_a_margin_and_bytes_depend_on_the_dtype() -> None:
    sheet = without_limits(largest_tensor=(size_limit(4000), size_limit(6000, "bytes", "tensor")))
    assert choose_attention(sheet, PlacementOptions(), 2).value.max_scores == 3000 // 2
    assert choose_attention(sheet, PlacementOptions(), 4).value.max_scores == 1500 // 2
    assert (
        choose_attention(without_limits(largest_tensor=(size_limit(4000),)), PlacementOptions(), 4).value.max_scores
        == 2000
    )


def test_limit_with_an_open_condition_is_ignored() -> None:
    sheet = without_limits(largest_tensor=(size_limit(100, only_if=("macos<14",)),))
    assert choose_attention(sheet, PlacementOptions(), 2).value.max_scores is None
    resolved = sheet.on(versions={"macos": "13.0"})
    assert choose_attention(resolved, PlacementOptions(), 2).value.max_scores == 50


@pytest.mark.parametrize(
    ("heads", "text"), [("auto", "half of the heads"), ("max", "one head at"), (1, "one head at"), (3, "3 heads")]
)
def test_requested_slicing_is_applied(heads: str | int, text: str) -> None:
    chosen = choose_attention(without_limits(), PlacementOptions(attention_slicing=heads), 2)
    assert chosen.value.heads == heads
    assert chosen.reason.startswith(f"attention_slicing={heads!r} was requested")
    assert text in str(chosen)


def test_inputs_are_made_contiguous_only_if_the_quirk_applies() -> None:
    sheet = without_limits(quirks=(quirk("non_contiguous_attention"),))
    assert choose_attention(sheet, PlacementOptions(), 2).value.contiguous
    assert "contiguous" in str(choose_attention(sheet, PlacementOptions(), 2))
    conditional = without_limits(quirks=(quirk("non_contiguous_attention", only_if=("torch<2.12",)),))
    assert not choose_attention(conditional, PlacementOptions(), 2).value.contiguous


def test_built_in_sheets() -> None:
    rules = {name: choose_attention(real_sheet(name), PlacementOptions(), 2).value for name in NAMES}
    assert rules["mps"] == AttentionRule(max_scores=2**30)
    assert rules["cpu"] == rules["neuron"] == AttentionRule()
    old = choose_attention(real_sheet("mps").on(), PlacementOptions(), 2).value
    assert old.max_scores == 2**30
