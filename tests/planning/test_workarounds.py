"""Choice of the workarounds inside models."""

from __future__ import annotations

from typing import Any

import pytest

from anyaccel.planning.attention import AttentionRule
from anyaccel.planning.workarounds import choose_workarounds
from tests.planning.sheets import limit, operation_limit, quirk, without_limits

UNCHANGED = AttentionRule()


def test_device_without_limits_needs_no_workaround() -> None:
    chosen = choose_workarounds(without_limits(), (), UNCHANGED)
    assert chosen.value == ()
    assert "no device limit" in chosen.reason


@pytest.mark.parametrize(
    ("name", "changes", "replacements", "attention"),
    [
        ("dtypes", {}, (("float64", "float32"),), UNCHANGED),
        ("complex_pairs", {}, (("complex64", "pairs"),), UNCHANGED),
        ("noise", {"random_numbers": limit("error")}, (), UNCHANGED),
        ("dynamic_shapes", {"data_dependent_shapes": limit("error")}, (), UNCHANGED),
        ("attention", {}, (), AttentionRule(max_scores=5)),
        ("attention", {}, (), AttentionRule(heads="max")),
        ("clone_scalars", {"quirks": (quirk("host_number_offset_ignored"),)}, (), UNCHANGED),
        ("zero_empty", {"quirks": (quirk("uninitialised_memory_is_nan"),)}, (), UNCHANGED),
        ("ignore_beta_zero", {"operations": (operation_limit("wrong", reads_ignored_input=True),)}, (), UNCHANGED),
    ],
)
def test_each_limit_has_its_workaround(
    name: str, changes: dict[str, Any], replacements: tuple[tuple[str, str], ...], attention: AttentionRule
) -> None:
    assert choose_workarounds(without_limits(**changes), replacements, attention).value == (name,)


def test_slow_or_conditional_limits_need_no_workaround() -> None:
    sheet = without_limits(
        data_dependent_shapes=limit("slow"),
        quirks=(quirk("host_number_offset_ignored", only_if=("torch>=2.12",)),),
        operations=(operation_limit("wrong"),),
    )
    assert choose_workarounds(sheet, (), UNCHANGED).value == ()
