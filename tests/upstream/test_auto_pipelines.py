"""Checks the entries for auto pipelines, schedulers and prompt cleaning against the installed diffusers."""

import importlib
import re
from typing import Any

import diffusers
import pytest

from anyaccel.runtime.durations import choose_frame_rate
from anyaccel.upstream.auto_pipelines import Task, find_task_class
from anyaccel.upstream.prompt_cleaning import needs_ftfy
from anyaccel.upstream.schedulers import list_compatible_schedulers
from tests.conftest import NEEDS_RECIPES

LIBRARY: Any = diffusers


@pytest.mark.parametrize(
    ("pipeline", "task", "controlnet", "expected"),
    [
        ("StableDiffusionPipeline", "image-to-image", False, "StableDiffusionImg2ImgPipeline"),
        ("StableDiffusionPipeline", "inpainting", True, "StableDiffusionControlNetInpaintPipeline"),
        ("StableDiffusionXLPipeline", "text-to-image", True, "StableDiffusionXLControlNetPipeline"),
        ("FluxPipeline", "image-to-image", False, "FluxImg2ImgPipeline"),
        ("StableAudioPipeline", "inpainting", False, None),
    ],
)
def test_class_for_a_task(pipeline: str, task: Task, controlnet: bool, expected: str | None) -> None:
    found = find_task_class(pipeline, task, controlnet=controlnet)
    assert (None if found is None else found.__name__) == expected


@NEEDS_RECIPES
def test_classes_for_videos() -> None:
    assert find_task_class("LTXPipeline", "image-to-video") is LIBRARY.LTXImageToVideoPipeline
    assert find_task_class("WanPipeline", "video-to-video") is LIBRARY.WanVideoToVideoPipeline


def test_compatible_schedulers() -> None:
    for name in ("EulerDiscreteScheduler", "DDIMScheduler"):
        assert {"LCMScheduler", "DPMSolverMultistepScheduler", name} <= list_compatible_schedulers(name)
        compatible = {kind.__name__ for kind in getattr(LIBRARY, name)().compatibles}
        assert compatible <= list_compatible_schedulers(name)
    assert list_compatible_schedulers("FlowMatchEulerDiscreteScheduler") == {"FlowMatchEulerDiscreteScheduler"}
    assert list_compatible_schedulers("OwnScheduler") == {"OwnScheduler"}


@NEEDS_RECIPES
def test_pipelines_that_need_ftfy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert needs_ftfy(LIBRARY.WanImageToVideoPipeline)
    assert not needs_ftfy(LIBRARY.WanPipeline)
    assert not needs_ftfy(LIBRARY.StableDiffusionPipeline)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert not needs_ftfy(LIBRARY.WanImageToVideoPipeline)


@NEEDS_RECIPES
@pytest.mark.parametrize(
    "name", ["CogVideoXPipeline", "WanPipeline", "HunyuanVideoPipeline", "Kandinsky5T2VPipeline", "HeliosPipeline"]
)
def test_frame_rates_are_those_of_the_documentation(name: str) -> None:

    module: Any = importlib.import_module(getattr(LIBRARY, name).__module__)
    rates = {float(rate) for rate in re.findall(r"export_to_video\([^)]*fps=(\d+)", module.EXAMPLE_DOC_STRING)}
    assert rates == {choose_frame_rate(name, {}, {})[0]}
