"""The hooks into diffusers' pipeline classes: they are called, installed once and removable."""

from typing import Any

import diffusers
import pytest
import torch

from anyaccel.recipes import recipes
from anyaccel.runtime.pipeline import _HOOKS
from anyaccel.upstream import diffusers_hooks
from anyaccel.upstream.diffusers_hooks import PipelineHooks, install_pipeline_hooks, list_calls, remove_pipeline_hooks
from tests.conftest import NEEDS_RECIPES

pytestmark = NEEDS_RECIPES
LIBRARY: Any = diffusers


@pytest.fixture
def events() -> Any:
    """Install hooks that record their calls; afterwards, install anyaccel's hooks if they were installed."""
    installed = bool(diffusers_hooks._ORIGINALS)
    remove_pipeline_hooks()
    recorded: list[Any] = []

    def from_pipe(original: Any, cls: Any, pipeline: Any, options: dict[str, Any]) -> Any:
        recorded.append(("from_pipe", cls.__name__))
        return original(cls, pipeline, **options)

    hooks = PipelineHooks(
        on_components=lambda pipe, components: recorded.append((type(pipe).__name__, sorted(components))),
        from_pipe=from_pipe,
        on_progress_bar=lambda: recorded.extend(sorted(keywords) for _, keywords in list_calls()),
    )
    install_pipeline_hooks(hooks)
    install_pipeline_hooks(hooks)
    yield recorded
    remove_pipeline_hooks()
    if installed:
        install_pipeline_hooks(_HOOKS)


def test_hooks_are_called_once(events: list[Any]) -> None:
    pipe: Any = recipes()["ddpm"].make()
    pipe.set_progress_bar_config(disable=True)
    assert events == [("DDPMPipeline", ["scheduler", "unet"])]
    LIBRARY.DDPMPipeline.from_pipe(pipe)
    assert events[1:] == [("from_pipe", "DDPMPipeline"), ("DDPMPipeline", ["scheduler", "unet"])]


def test_auto_pipelines_that_cannot_be_imported(events: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As with diffusers 0.35 and transformers 5."""
    remove_pipeline_hooks()
    find = type(LIBRARY).__getattr__

    def fail(module: Any, name: str) -> Any:
        if name.startswith("AutoPipeline"):
            raise RuntimeError(f"Failed to import {name}")
        return find(module, name)

    monkeypatch.setattr(type(LIBRARY), "__getattr__", fail)
    for task in ("Text2Image", "Image2Image", "Inpainting"):
        monkeypatch.delitem(vars(LIBRARY), f"AutoPipelineFor{task}", raising=False)
    hooks = PipelineHooks(lambda pipe, components: events.append(sorted(components)), lambda *_: None, lambda: None)
    install_pipeline_hooks(hooks)
    recipes()["ddpm"].make()
    assert events == [["scheduler", "unet"]]


def test_running_calls_and_their_keywords(events: list[Any]) -> None:
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.set_progress_bar_config(disable=True)
    events.clear()
    pipe("a fox", num_inference_steps=1, height=16, width=16, output_type="latent", seed=3, unknown=1)
    assert events == [["seed", "unknown"]]


def test_removed_hooks_leave_the_original_methods(events: list[Any]) -> None:
    owners = (LIBRARY.DiffusionPipeline, LIBRARY.ModularPipeline, LIBRARY.AutoPipelineForText2Image)
    replaced = [vars(owner).get("from_pipe") or vars(owner)["register_components"] for owner in owners]
    assert all(hasattr(method, "__wrapped__") for method in replaced)
    remove_pipeline_hooks()
    restored = [vars(owner).get("from_pipe") or vars(owner)["register_components"] for owner in owners]
    assert not any(old is new for old, new in zip(replaced, restored, strict=True))
    events.clear()
    LIBRARY.DDPMPipeline(unet=torch.nn.Linear(1, 1), scheduler=LIBRARY.DDPMScheduler())
    assert events == []


def test_a_method_that_was_replaced_since_is_kept(events: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def replacement(self: Any) -> None: ...

    monkeypatch.setattr(LIBRARY.DiffusionPipeline, "progress_bar", replacement)
    remove_pipeline_hooks()
    assert vars(LIBRARY.DiffusionPipeline)["progress_bar"] is replacement
