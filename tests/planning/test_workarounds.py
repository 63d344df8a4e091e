"""What is put right at torch's own function seam."""

from __future__ import annotations

from typing import Any

import pytest

from anyaccel.planning.attention import AttentionRule
from anyaccel.planning.workarounds import choose_workarounds
from tests.planning.sheets import limit, operation_limit, quirk, without_limits

NOTHING = AttentionRule()


def test_a_device_without_a_limit_costs_nothing() -> None:
    chosen = choose_workarounds(without_limits(), (), NOTHING)
    assert chosen.value == ()
    assert "no limit" in chosen.reason


@pytest.mark.parametrize(
    ("name", "changes", "replacements", "attention"),
    [
        ("dtypes", {}, (("float64", "float32"),), NOTHING),
        ("complex_pairs", {}, (("complex64", "pairs"),), NOTHING),
        ("noise", {"random_numbers": limit("error")}, (), NOTHING),
        ("dynamic_shapes", {"data_dependent_shapes": limit("error")}, (), NOTHING),
        ("attention", {}, (), AttentionRule(most_scores=5)),
        ("attention", {}, (), AttentionRule(heads="max")),
        ("clone_scalars", {"quirks": (quirk("host_number_offset_ignored"),)}, (), NOTHING),
        ("zero_empty", {"quirks": (quirk("uninitialised_memory_is_nan"),)}, (), NOTHING),
        ("ignore_beta_zero", {"operations": (operation_limit("wrong", reads_ignored_input=True),)}, (), NOTHING),
    ],
)
def test_each_limit_has_its_repair(
    name: str, changes: dict[str, Any], replacements: tuple[tuple[str, str], ...], attention: AttentionRule
) -> None:
    assert choose_workarounds(without_limits(**changes), replacements, attention).value == (name,)


def test_what_is_slow_or_open_needs_no_repair() -> None:
    sheet = without_limits(
        data_dependent_shapes=limit("slow"),
        quirks=(quirk("host_number_offset_ignored", only_if=("torch>=2.12",)),),
        operations=(operation_limit("wrong"),),
    )
    assert choose_workarounds(sheet, (), NOTHING).value == ()
