"""Keyword arguments that a pipeline accepts through `**kwargs` but never reads."""

import functools
from typing import Any

import diffusers
import pytest
import torch

from anyaccel.recipes import recipes
from anyaccel.runtime.keyword_use import find_unused_keywords, list_parameters
from tests.conftest import NEEDS_RECIPES

LIBRARY: Any = diffusers


class Base:
    @torch.no_grad()
    def __call__(self, prompt: str, **kwargs: Any) -> Any:
        if "old" in kwargs and "other" not in kwargs:
            return kwargs["named"]
        return kwargs.pop("callback", None)


class Forwards(Base):
    def __call__(self, image: str, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().__call__(**kwargs)


class PassesOn(Base):
    def __call__(self, **kwargs: Any) -> Any:  # type: ignore[override]
        return dict(kwargs)


class Wrapped(Base):
    @functools.wraps(Base.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().__call__(*args, **{name: value for name, value in kwargs.items() if name != "xyz"})


class Strict:
    def __call__(self, prompt: str) -> None: ...


@pytest.mark.parametrize(
    ("kind", "unused"),
    [
        (Base, ["image", "xyz"]),
        (Forwards, ["xyz"]),
        (PassesOn, []),
        (Wrapped, []),
        (Strict, []),
        (object, []),
    ],
)
def test_unused_keywords(kind: type, unused: list[str]) -> None:
    assert find_unused_keywords(kind, ["prompt", "image", "old", "other", "named", "callback", "xyz"]) == unused


def test_parameters_include_those_of_base_classes() -> None:
    assert list_parameters(Forwards) == ["image", "prompt"]


@NEEDS_RECIPES
def test_diffusers_pipelines() -> None:
    for name in ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "KandinskyV22Pipeline"):
        assert find_unused_keywords(getattr(LIBRARY, name), ["prompt_embeds", "callback", "callback_steps", "x"]) in (
            ["x"],
            ["prompt_embeds", "x"],
        )
    assert find_unused_keywords(LIBRARY.PixArtAlphaPipeline, ["mask_feature", "x"]) == ["x"]
    assert find_unused_keywords(LIBRARY.ModularPipeline, ["prompt", "x"]) == []


@NEEDS_RECIPES
def test_no_recipe_passes_an_unused_argument() -> None:
    for recipe in recipes().values():
        kind = getattr(diffusers, recipe.pipeline, None)
        if kind is not None:
            assert find_unused_keywords(kind, recipe.call()) == [], recipe.name
