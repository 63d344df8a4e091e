"""The hook into the loading of components: called once for each, in order, and only in its block and thread."""

import threading
from pathlib import Path
from typing import Any

import diffusers
import pytest

from anyaccel.recipes import recipes
from anyaccel.upstream.diffusers_loading import calling_after_each_component
from tests.conftest import NEEDS_RECIPES

pytestmark = [NEEDS_RECIPES, pytest.mark.filterwarnings("ignore::FutureWarning")]
LIBRARY: Any = diffusers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pipe: Any = recipes()["ddpm"].make()
    pipe.save_pretrained(tmp_path)
    return tmp_path


def test_called_after_each_component(folder: Path) -> None:
    calls: list[Any] = []
    before = LIBRARY.pipelines.pipeline_utils.load_sub_model
    with calling_after_each_component(lambda *arguments: calls.append(arguments)):
        pipe = LIBRARY.DiffusionPipeline.from_pretrained(folder)
    assert {name: component for name, component, _, _ in calls} == pipe.components
    assert {(Path(path), variant) for _, _, path, variant in calls} == {(folder, None)}
    assert LIBRARY.pipelines.pipeline_utils.load_sub_model is before


def test_not_called_for_components_of_the_user_and_in_other_threads(folder: Path) -> None:
    calls: list[str] = []
    other: Any = recipes()["ddpm"].make()
    with calling_after_each_component(lambda name, *_: calls.append(name)):
        LIBRARY.DiffusionPipeline.from_pretrained(folder, unet=other.unet)
        assert calls == ["scheduler"]
        thread = threading.Thread(target=LIBRARY.DiffusionPipeline.from_pretrained, args=(folder,))
        thread.start()
        thread.join()
    assert calls == ["scheduler"]


def test_the_base_class_ignores_optional_components(tmp_path: Path) -> None:
    """`_find_class` in runtime/loading.py can go when this fails."""
    pipe: Any = recipes()["wan"].make()
    pipe.save_pretrained(tmp_path)
    loaded = LIBRARY.DiffusionPipeline.from_pretrained(tmp_path, transformer=pipe.transformer)
    assert loaded.transformer is not pipe.transformer
    assert LIBRARY.WanPipeline.from_pretrained(tmp_path, transformer=pipe.transformer).transformer is pipe.transformer
