"""Checks every entry of accelerate_internals.py against the installed accelerate."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

from anyaccel.recipes import recipes
from anyaccel.upstream.accelerate_internals import (
    HOOK_ATTRIBUTES,
    find_hook,
    find_hooked_forward,
    has_hook,
    set_hook,
)


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


def test_an_autoencoder_runs_a_hook_that_does_not_replace_forward() -> None:
    class Hook(ModelHook):  # type: ignore[misc]
        calls = 0

        def pre_forward(self, module: torch.nn.Module, *args: object, **kwargs: object) -> tuple[object, object]:
            self.calls += 1
            return args, kwargs

    pipe: Any = recipes()["stable-diffusion"].make()
    hook = Hook()
    set_hook(pipe.vae, hook)
    assert "forward" not in vars(pipe.vae)
    pipe.vae.decode(torch.zeros(1, 4, 2, 2))
    assert hook.calls == 1
    remove_hook_from_module(pipe.vae)
    assert find_hook(pipe.vae) is None
