"""How large an attention call may be."""

from __future__ import annotations

import pytest

from anyaccel.planning import PlacementOptions
from anyaccel.planning.attention import AttentionRule, choose_attention
from tests.planning.sheets import NAMES, quirk, real_sheet, size_limit, without_limits


def test_where_no_limit_is_known_nothing_is_done() -> None:
    chosen = choose_attention(without_limits(), PlacementOptions(), 2)
    assert chosen.value == AttentionRule()
    assert "no limit" in chosen.reason
    assert str(chosen) == "as it is"


def test_the_smallest_limit_counts_with_a_margin_and_bytes_by_the_type() -> None:
    sheet = without_limits(largest_tensor=(size_limit(4000), size_limit(6000, "bytes", "tensor")))
    assert choose_attention(sheet, PlacementOptions(), 2).value.most_scores == 3000 // 2
    assert choose_attention(sheet, PlacementOptions(), 4).value.most_scores == 1500 // 2
    assert (
        choose_attention(without_limits(largest_tensor=(size_limit(4000),)), PlacementOptions(), 4).value.most_scores
        == 2000
    )


def test_a_limit_with_an_open_condition_is_none() -> None:
    sheet = without_limits(largest_tensor=(size_limit(100, only_if=("macos<14",)),))
    assert choose_attention(sheet, PlacementOptions(), 2).value.most_scores is None
    settled = sheet.on(versions={"macos": "13.0"})
    assert choose_attention(settled, PlacementOptions(), 2).value.most_scores == 50


@pytest.mark.parametrize("asked", ["auto", "max", 3])
def test_what_is_asked_for_is_done(asked: str | int) -> None:
    chosen = choose_attention(without_limits(), PlacementOptions(attention_slicing=asked), 2)
    assert chosen.value.heads == asked
    assert chosen.reason.startswith("slicing was asked for")
    assert str(asked) in str(chosen)


def test_permuted_tensors_are_laid_out_anew_only_where_the_quirk_holds() -> None:
    sheet = without_limits(quirks=(quirk("non_contiguous_attention"),))
    assert choose_attention(sheet, PlacementOptions(), 2).value.contiguous
    assert "contiguous" in str(choose_attention(sheet, PlacementOptions(), 2))
    open_question = without_limits(quirks=(quirk("non_contiguous_attention", only_if=("torch<2.12",)),))
    assert not choose_attention(open_question, PlacementOptions(), 2).value.contiguous


def test_the_sheets() -> None:
    rules = {name: choose_attention(real_sheet(name), PlacementOptions(), 2).value for name in NAMES}
    assert rules["mps"] == AttentionRule(most_scores=2**30)
    assert rules["cpu"] == rules["neuron"] == AttentionRule()
    old = choose_attention(real_sheet("mps").on(), PlacementOptions(), 2).value
    assert old.most_scores == 2**30
