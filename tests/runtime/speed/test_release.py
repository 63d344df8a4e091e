"""`del pipe` frees the models of a placed pipeline at once, wherever it frees those of the stock pipeline."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import anyaccel
from anyaccel.recipes import recipes, run
from anyaccel.runtime.speed import compile as compile_module

RECIPES = (
    "stable-diffusion", "flux", "stable-diffusion-xl", "wan", "sana", "stable-diffusion-3", "kandinsky-2-2", "ltx",
    "hunyuan-dit", "pixart-sigma", "z-image", "qwen-image", "controlnet",
)  # fmt: skip


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def find_kept_models(name: str, options: dict[str, Any] | None) -> set[str]:
    """Return the models that are alive after a pipeline was used and deleted; without options, a stock pipeline."""
    recipe = recipes()[name]
    pipe: Any = recipe.make()
    gc.collect()  # objects that creating the pipeline left
    if options is not None:
        pipe = anyaccel.place(pipe, "cpu", **options)
    run(recipe, pipe)
    models = {key: weakref.ref(model) for key, model in pipe.components.items() if isinstance(model, torch.nn.Module)}
    del pipe
    return {key for key, model in models.items() if model() is not None}


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("name", ["dit", *(pytest.param(name, marks=pytest.mark.slow) for name in RECIPES)])
def test_models_are_freed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without Inductor, which would take minutes: Dynamo is what keeps references to models.
    backend = torch._dynamo.lookup_backend("aot_eager")
    monkeypatch.setattr(compile_module, "_find_backend", lambda *args, **options: backend)
    torch._dynamo.reset()
    stock = find_kept_models(name, None)  # diffusers' `cache_context` keeps some models in a reference cycle
    assert find_kept_models(name, {}) <= stock
    assert find_kept_models(name, {"compile": True}) <= stock
