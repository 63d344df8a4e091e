"""Checks every entry of accelerate_internals.py against the installed accelerate."""

from __future__ import annotations

import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

from anyaccel.upstream.accelerate_internals import HOOK_ATTRIBUTES, find_hook, find_hooked_forward, has_hook


def test_find_hook_and_hook_attributes() -> None:
    layer, hook = torch.nn.Linear(2, 2), ModelHook()
    before = set(vars(layer))
    assert find_hook(layer) is None
    assert find_hooked_forward(vars(layer)) is None
    assert not has_hook(vars(layer))
    add_hook_to_module(layer, hook)
    assert find_hook(layer) is hook
    assert find_hooked_forward(vars(layer)).__func__ is torch.nn.Linear.forward
    assert has_hook(vars(layer))
    assert set(vars(layer)) - before == {*HOOK_ATTRIBUTES, "forward"}
    remove_hook_from_module(layer)
    assert find_hook(layer) is None
    assert not has_hook(vars(layer))
