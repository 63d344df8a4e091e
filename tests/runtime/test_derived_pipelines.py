"""Pipelines that diffusers creates from placed components are placed, and `seed=` is never ignored."""

import copy
import gc
import threading
import warnings
from pathlib import Path
from typing import Any

import diffusers
import numpy
import pytest
import torch

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import UsageError, VirtualDeviceError
from anyaccel.processes.forked_call import call_in_fork
from anyaccel.recipes import recipes
from tests.conftest import NEEDS_RECIPES

pytestmark = NEEDS_RECIPES
LIBRARY: Any = diffusers
CALL: dict[str, Any] = {"num_inference_steps": 2, "height": 16, "width": 16, "output_type": "np"}


def make(recipe: str = "stable-diffusion") -> Any:
    pipe: Any = recipes()[recipe].make()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run(pipe: Any, **arguments: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe("a fox", **{"seed": 3, **CALL, **arguments}).images


@pytest.fixture(scope="module")
def placed() -> Any:
    return anyaccel.place(make(), "cpu", dtype="float32")


@pytest.fixture(scope="module")
def expected(placed: Any) -> Any:
    return run(placed)


@pytest.mark.parametrize(
    "derive",
    [
        lambda pipe: LIBRARY.StableDiffusionPipeline.from_pipe(pipe),
        lambda pipe: LIBRARY.AutoPipelineForText2Image.from_pipe(pipe),
        lambda pipe: LIBRARY.StableDiffusionPipeline(**pipe.components),
        lambda pipe: LIBRARY.StableDiffusionPipeline.from_pipe(LIBRARY.StableDiffusionImg2ImgPipeline.from_pipe(pipe)),
    ],
)
def test_derived_pipelines_are_placed(placed: Any, expected: Any, derive: Any) -> None:
    pipe = derive(placed)
    assert isinstance(pipe, LIBRARY.StableDiffusionPipeline)
    assert (pipe.plan.device, pipe.plan.dtype.value) == ("cpu:0", "float32")
    assert pipe.unet is placed.unet
    assert numpy.allclose(run(pipe), expected, atol=1e-4)
    assert numpy.allclose(run(placed), expected, atol=1e-4)


@pytest.mark.parametrize("task", ["Image2Image", "Inpainting"])
def test_auto_pipelines_of_other_tasks(placed: Any, task: str) -> None:
    pipe = getattr(LIBRARY, f"AutoPipelineFor{task}").from_pipe(placed)
    images = numpy.zeros((2, 1, 16, 16, 3), dtype=numpy.float32)
    arguments = {"image": images[0], "num_inference_steps": 4, "output_type": "np", "seed": 5}
    if task == "Inpainting":
        arguments |= {"mask_image": images[1, ..., :1] + 1, "height": 16, "width": 16}
    pipe.set_progress_bar_config(disable=True)
    assert numpy.array_equal(pipe("a fox", **arguments).images, pipe("a fox", **arguments).images)


def test_a_deep_copy_is_not_placed(placed: Any) -> None:
    copies = {name: copy.deepcopy(component) for name, component in placed.components.items()}
    assert type(LIBRARY.StableDiffusionPipeline(**copies)) is LIBRARY.StableDiffusionPipeline
    derived = LIBRARY.StableDiffusionPipeline(**placed.components)
    assert numpy.allclose(run(copy.deepcopy(derived)), run(placed), atol=1e-4)


def test_components_of_a_deleted_pipeline(expected: Any) -> None:
    source = anyaccel.place(make(), "cpu", dtype="float32")
    components = source.components
    del source
    gc.collect()
    assert numpy.allclose(run(LIBRARY.StableDiffusionPipeline(**components)), expected, atol=1e-4)


def test_from_pipe_casts_only_on_request() -> None:
    source = anyaccel.place(make(), "cpu", dtype="bf16")
    derived = LIBRARY.StableDiffusionImg2ImgPipeline.from_pipe(source)
    assert (source.unet.dtype, derived.plan.dtype.value) == (torch.bfloat16, "bfloat16")
    derived = LIBRARY.StableDiffusionImg2ImgPipeline.from_pipe(source, dtype=torch.float32)
    assert (source.unet.dtype, derived.plan.dtype.value) == (torch.float32, "float32")
    run(source)
    assert source.plan.dtype.value == "float32"


def test_other_components_are_placed_with_a_placed_one(tmp_path: Path) -> None:
    source = anyaccel.place(make(), "cpu", dtype="bf16")
    make().save_pretrained(tmp_path)
    pipe = LIBRARY.StableDiffusionPipeline.from_pretrained(
        tmp_path, text_encoder=source.text_encoder, dtype=torch.bfloat16
    )
    assert pipe.plan.device == "cpu:0"
    assert pipe.unet.dtype == torch.bfloat16  # as loaded
    assert numpy.array_equal(run(pipe), run(pipe))


def test_a_user_class_that_runs_code_after_registering(placed: Any) -> None:
    class Custom(LIBRARY.StableDiffusionPipeline):  # type: ignore[misc]
        def __init__(self, base: Any) -> None:
            parts = dict(base.components)
            super().__init__(**parts, requires_safety_checker=False)
            self.factor = type(self).__name__

    pipe = Custom(placed)
    assert pipe.factor == "Custom"
    assert isinstance(pipe, anyaccel.DiffusionPipeline)


def test_seed_for_a_pipeline_that_is_not_placed(placed: Any) -> None:
    plain = make()
    with pytest.raises(UsageError, match="seed=3 has no effect"):
        run(plain)
    assert run(plain, seed=None, generator=torch.Generator().manual_seed(3)).shape == (1, 16, 16, 3)

    class UsesSeed(LIBRARY.StableDiffusionPipeline):  # type: ignore[misc]
        def __call__(self, prompt: Any, **kwargs: Any) -> Any:
            generator = torch.Generator().manual_seed(kwargs.pop("seed"))
            return super().__call__(prompt, generator=generator, **kwargs)

    assert numpy.array_equal(run(UsesSeed(**make().components)), run(UsesSeed(**make().components)))


def test_unknown_arguments_cause_a_warning(placed: Any) -> None:
    message = "'num_steps' is not an argument of StableDiffusionPipeline and has no effect; did you mean num_inference"
    with pytest.warns(UserWarning, match=message) as caught:
        run(placed, num_steps=3)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)  # the deprecated callback, which is used
        run(placed, callback=lambda *_: None, callback_steps=1)


def test_patches_after_placing_take_effect(placed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIBRARY.StableDiffusionPipeline, "load_lora_weights", lambda self, name: f"patched {name}")
    assert placed.load_lora_weights("style") == "patched style"
    monkeypatch.setattr(LIBRARY.StableDiffusionPipeline, "encode_prompt", lambda self, *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(placed)
    monkeypatch.setattr(LIBRARY.StableDiffusionPipeline, "__call__", lambda self, *_, **__: "patched")
    assert placed("a fox") == "patched"


def test_moving_in_a_callback(placed: Any, expected: Any) -> None:
    errors: list[str] = []

    def move(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pipe.to("cpu")
        pipe.to(torch.float32)
        attempts = [
            lambda: pipe.to(torch.float16),
            lambda: pipe.to("cpu", memory="phase"),
            pipe.enable_model_cpu_offload,
            lambda: run(pipe),
        ]
        for attempt in attempts:
            try:
                attempt()
            except UsageError as error:
                errors.append(error.message)
        return tensors

    assert numpy.allclose(run(placed, callback_on_step_end=move), expected, atol=1e-4)
    assert [message.split(" while ")[0] for message in errors[:4]] == [
        "the pipeline cannot be placed",
        "the pipeline cannot be placed",
        "enable_model_cpu_offload cannot be called",
        "seed cannot be used",
    ]


def test_to_in_another_thread_waits_for_the_call() -> None:
    pipe = anyaccel.place(make(), "cpu", dtype="float32")
    dtypes: list[torch.dtype] = []
    mover = threading.Thread(target=lambda: pipe.to(torch.bfloat16))

    def start(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 0:
            mover.start()
        mover.join(0.05)
        dtypes.append(pipe.unet.dtype)
        return tensors

    run(pipe, callback_on_step_end=start)
    mover.join()
    assert set(dtypes) == {torch.float32}
    assert pipe.unet.dtype == torch.bfloat16


def test_parts_of_a_combined_pipeline_are_not_placed() -> None:
    source = anyaccel.place(make("kandinsky-2-2-combined"), "cpu", dtype="float32")
    pipe = LIBRARY.KandinskyV22CombinedPipeline(**source.components)
    assert pipe.plan.device == "cpu:0"
    assert type(pipe.prior_pipe) is LIBRARY.KandinskyV22PriorPipeline


def test_modular_pipelines() -> None:
    source = anyaccel.place(make("stable-diffusion-xl"), "cpu", dtype="float32")
    pipe = LIBRARY.StableDiffusionXLAutoBlocks().init_pipeline()
    names = {spec.name for spec in pipe.blocks.expected_components}
    parts = {name: part for name, part in source.components.items() if name in names and part is not None}
    pipe.update_components(**parts)
    assert pipe.plan.device == "cpu:0"


def test_memory_modes_and_devices() -> None:
    def use(accelerator: VirtualAccelerator) -> list[Any]:
        kind = LIBRARY.StableDiffusionPipeline
        source = anyaccel.place(make(), "hpu:0", dtype="fp32")
        expected, results = run(source), []
        derived = kind.from_pipe(source)
        for device in ("cpu", "hpu:1"):  # the derived pipeline follows
            source.to(device)
            results += [numpy.allclose(run(derived), expected, atol=1e-4), derived.plan.device]
        other = anyaccel.place(make(), "hpu:0", dtype="fp32", memory="phase")
        mixed = kind(**{**source.components, "vae": other.vae})
        try:
            run(mixed)
        except UsageError as error:
            results.append(error.message)
        results.append(numpy.allclose(run(mixed.to("hpu:1")), expected, atol=1e-4))
        offloaded = anyaccel.place(make(), "hpu:0", dtype="fp32", memory="phase")
        sibling = kind(**offloaded.components)
        for pipe in (sibling, offloaded, sibling):
            results.append(numpy.allclose(run(pipe), expected, atol=1e-4))
        return results

    assert run_forked("hpu", use, count=2) == [
        True,
        "cpu:0",
        True,
        "hpu:1",
        "the components are placed on different devices: vae on hpu:0, text_encoder on hpu:1, unet on hpu:1",
        *[True] * 4,
    ]


def test_auto_and_options_after_naming_a_virtual_device() -> None:
    def use() -> list[Any]:
        before = anyaccel.open_device("auto").sheet.name
        results: list[Any] = [anyaccel.place(make(), "virtual:hpu:1,count=2").plan.device]
        results.append(anyaccel.open_device("auto").sheet.name == before)
        for text in ("virtual:hpu,count=2", "virtual:hpu:0"):
            results.append(anyaccel.place(make(), text).plan.device)
        for text in ("virtual:hpu,count=8", "virtual:hpu,strict", "virtual:gaudi2", "virtual:hpu,memory=1GiB"):
            with pytest.raises(VirtualDeviceError, match="already has virtual hpu devices"):
                anyaccel.place(make(), text)
        with pytest.raises(anyaccel.AnyaccelError, match="hpu:3 is not available"):
            anyaccel.place(make(), "virtual:hpu:3")
        return results

    results = call_in_fork(use)
    assert results[:2] == ["hpu:1", True]
    assert [text.partition(":")[0] for text in results[2:]] == ["hpu", "hpu"]
