"""What anyaccel relies on in accelerate, asked of the installed accelerate."""

from __future__ import annotations

import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

from anyaccel.upstream.accelerate_internals import HOOK_ATTRIBUTES, find_hook, has_hook


def test_a_hook_is_found_and_leaves_nothing_else_behind() -> None:
    layer, hook = torch.nn.Linear(2, 2), ModelHook()
    before = set(vars(layer))
    assert find_hook(layer) is None
    assert not has_hook(vars(layer))
    add_hook_to_module(layer, hook)
    assert find_hook(layer) is hook
    assert has_hook(vars(layer))
    assert set(vars(layer)) - before == {*HOOK_ATTRIBUTES, "forward"}
    remove_hook_from_module(layer)
    assert find_hook(layer) is None
    assert not has_hook(vars(layer))
