"""anyaccel's replacements for diffusers' pipeline classes return pipelines of the diffusers class."""

import copy
import inspect
import itertools
import pickle
from pathlib import Path
from typing import Any

import diffusers
import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import overrides

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.recipes import recipes, run
from tests.conftest import NEEDS_RECIPES

pytestmark = NEEDS_RECIPES
LIBRARY: Any = diffusers
MODES: Any = overrides._get_current_function_mode_stack
CALL: dict[str, Any] = {"num_inference_steps": 2, "height": 16, "width": 16, "output_type": "np"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.save_pretrained(path)
    pipe.save_pretrained(path, variant="fp16")
    return path


def load(folder: Path, **options: Any) -> Any:
    pipe = anyaccel.DiffusionPipeline.from_pretrained(folder, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_a_loaded_pipeline_has_the_diffusers_class(folder: Path) -> None:
    pipe = load(folder)
    assert isinstance(pipe, diffusers.StableDiffusionPipeline)
    assert isinstance(pipe, diffusers.DiffusionPipeline)
    assert isinstance(pipe, anyaccel.DiffusionPipeline)
    assert type(pipe).__name__ == "StableDiffusionPipeline"
    assert inspect.signature(type(pipe).__call__) == inspect.signature(LIBRARY.StableDiffusionPipeline.__call__)
    assert set(pipe.components) == set(LIBRARY.DiffusionPipeline.from_pretrained(folder).components)


def test_diffusers_loads_a_saved_pipeline(folder: Path, tmp_path: Path) -> None:
    pipe = load(folder)
    expected = pipe("a fox", seed=3, **CALL).images
    pipe.save_pretrained(tmp_path)
    plain = LIBRARY.DiffusionPipeline.from_pretrained(tmp_path)
    plain.set_progress_bar_config(disable=True)
    assert type(plain).__mro__[0] is LIBRARY.StableDiffusionPipeline
    images = plain("a fox", generator=torch.Generator().manual_seed(3), **CALL).images
    assert numpy.abs(expected - images).max() < 1e-5


@pytest.mark.parametrize("duplicate", [lambda pipe: pickle.loads(pickle.dumps(pipe)), copy.deepcopy])
def test_a_pipeline_can_be_pickled_and_copied(folder: Path, duplicate: Any) -> None:
    pipe = load(folder)
    expected = pipe("a fox", seed=3, **CALL).images
    other = duplicate(pipe)
    assert type(other) is type(pipe)
    assert other.unet is not pipe.unet
    assert numpy.array_equal(expected, other("a fox", seed=3, **CALL).images)


@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"torch_dtype": torch.bfloat16}, {"dtype": "bf16"}])
def test_every_spelling_of_the_dtype(folder: Path, options: dict[str, Any]) -> None:
    pipe = load(folder, **options)
    assert pipe.dtype == torch.bfloat16
    assert pipe.plan.dtype.value == "bfloat16"


def test_a_dtype_passed_to_from_pretrained_is_used_on_the_device(folder: Path) -> None:
    """The default dtype of the device is bfloat16."""

    def use(accelerator: VirtualAccelerator) -> tuple[str, str]:
        explicit = load(folder, dtype=torch.float32).to("neuron")
        default = load(folder).to("neuron")
        return str(explicit.unet.dtype), str(default.unet.dtype)

    assert run_forked("neuron", use) == ("torch.float32", "torch.bfloat16")


def test_variant_and_safetensors(folder: Path) -> None:
    assert load(folder, variant="fp16", use_safetensors=True).unet.dtype == torch.float32


@pytest.mark.parametrize("task", ["Text2Image", "Image2Image", "Inpainting"])
def test_auto_pipeline_classes(folder: Path, task: str) -> None:
    kind: Any = getattr(anyaccel, f"AutoPipelineFor{task}")
    plain: Any = getattr(diffusers, f"AutoPipelineFor{task}")
    pipe = kind.from_pretrained(folder)
    assert isinstance(pipe, type(plain.from_pretrained(folder)))
    assert isinstance(pipe, anyaccel.DiffusionPipeline)


def test_from_pipe_keeps_device_dtype_and_components(folder: Path) -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[bool, str, str, str]:
        pipe = load(folder).to("mps", dtype="fp16")
        other = anyaccel.AutoPipelineForImage2Image.from_pipe(pipe)
        third = type(pipe).from_pipe(other)
        return other.unet is pipe.unet, other.plan.device, str(pipe.unet.dtype), type(third).__name__

    assert run_forked("mps", use) == (True, "mps:0", "torch.float16", "StableDiffusionPipeline")


def test_a_single_file_without_config_is_rejected(folder: Path) -> None:
    with pytest.raises(anyaccel.AnyaccelError, match="a single-file checkpoint contains only weights"):
        anyaccel.DiffusionPipeline.from_pretrained(folder / "unet" / "diffusion_pytorch_model.safetensors")


def test_optional_components_that_are_passed_are_used(tmp_path: Path) -> None:
    pipe: Any = recipes()["wan"].make()
    pipe.save_pretrained(tmp_path)
    file = next((tmp_path / "transformer").glob("*.safetensors"))
    changed = {name: weight + 1 for name, weight in load_file(file).items()}
    other = tmp_path / "other.safetensors"
    save_file(changed, other)
    assert load(tmp_path, transformer=pipe.transformer).transformer is pipe.transformer
    weights = load(tmp_path, transformer=other).transformer.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in changed.items())


def test_place_returns_the_same_object() -> None:
    recipe = recipes()["flux"]
    pipe = recipe.make()
    expected = run(recipe, pipe)
    placed = anyaccel.place(pipe, "cpu", dtype=torch.float32)
    assert placed is pipe
    assert numpy.abs(expected - run(recipe, placed)).max() < 1e-5


def test_callbacks_and_results(folder: Path) -> None:
    pipe, steps = load(folder), []

    def record(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        steps.append(step)
        return {}

    result = pipe("a fox", seed=[4], callback_on_step_end=record, **CALL)
    assert steps
    assert result.seeds == (4,)
    assert result.plan == pipe.plan
    assert result.plan.report is not pipe.plan.report, "later calls must not change the report of this result"
    assert len(pipe("a fox", return_dict=False, **CALL)) == 2


def make_modular() -> Any:
    pipe = LIBRARY.modular_pipelines.StableDiffusionXLAutoBlocks().init_pipeline()
    standard: Any = recipes()["stable-diffusion-xl"].make()
    specs = pipe._component_specs
    pipe.update_components(**{name: value for name, value in standard.components.items() if name in specs})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_a_modular_pipeline(caplog: pytest.LogCaptureFixture) -> None:
    call = {**CALL, "prompt": "a fox", "output": "images"}
    expected = numpy.asarray(make_modular()(generator=torch.Generator().manual_seed(3), **call))

    def use(accelerator: VirtualAccelerator) -> tuple[bool, list[Any], list[Any], list[Any]]:
        pipe = anyaccel.place(make_modular(), "neuron", dtype=torch.float32)
        rows = accelerator.ledger.rows()
        single = numpy.asarray(pipe(generator=torch.Generator().manual_seed(3), **call))
        bad = [row for row in rows if row.effect in ("error", "wrong")]
        waits = [row for row in rows if row.limit == "host_round_trip" and row.step is not None]
        several = numpy.asarray(pipe(seed=[1, 3], num_images_per_prompt=2, **call))
        return isinstance(pipe, diffusers.ModularPipeline), bad, waits, [single, several[1]]

    is_modular, bad, waits, images = run_forked("neuron", use, strict=True)
    assert is_modular
    assert bad == waits == []
    for image in (images[0][0], images[1]):
        assert numpy.abs(expected[0] - image).max() < 1e-3


class FailedError(Exception):
    """An error of a model or a hook."""


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "neuron"])
def test_an_error_in_a_model_ends_the_call_and_does_not_affect_the_next(folder: Path, device: str) -> None:
    """Errors come from deep in the denoiser, and from a hook of a nested model that runs before the overrides."""

    def use(accelerator: VirtualAccelerator | None = None) -> None:
        pipe = load(folder).to(device)
        expected = pipe("a fox", seed=3, **CALL).images
        models = ((pipe.unet.conv_out, False), (pipe.vae.decoder, True))
        for error, (model, prepend) in itertools.product((KeyboardInterrupt, FailedError), models):

            def fail(*args: Any, error: type[BaseException] = error) -> None:
                raise error

            handle = model.register_forward_pre_hook(fail, prepend=prepend)
            for _ in range(2):
                with pytest.raises(error):
                    pipe("a fox", seed=3, **CALL)
            assert not MODES()
            handle.remove()
            assert numpy.abs(pipe("a fox", seed=3, **CALL).images - expected).max() == 0

    use() if device == "cpu" else run_forked(device, use)


def test_a_subclass_with_any_signature_gets_positional_arguments() -> None:
    kind: Any = LIBRARY.StableDiffusionPipeline

    class AnyArguments(kind):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            assert args[0] in ("a red fox", ["a red fox", "a bird"])
            return super().__call__(*args, **kwargs)

    def generators() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in (1, 2)]

    source: Any = recipes()["stable-diffusion"].make()
    plain = LIBRARY.StableDiffusionPipeline(**source.components)
    pipe = anyaccel.place(AnyArguments(**source.components), "cpu", dtype="float32")
    for each in (plain, pipe):
        each.set_progress_bar_config(disable=True)
    for prompt, extra in (("a red fox", {"generator": generators()[0]}), (["a red fox", "a bird"], {})):
        values = {"generator": generators(), **CALL, **extra}
        sizes = values.pop("height"), values.pop("width")
        fresh = dict(values, generator=generators()[0] if extra else generators())
        expected = plain(prompt, *sizes, **fresh).images
        numpy.testing.assert_array_equal(pipe(prompt, *sizes, **values).images, expected)


def test_placing_does_not_run_the_class_hooks_of_the_user() -> None:
    registered: list[str] = []

    class Registry(type):
        def __new__(cls, name: str, bases: Any, content: Any, *, tag: str, **kwargs: Any) -> Any:
            registered.append(tag)
            return super().__new__(cls, name, bases, content, **kwargs)

        def __init__(cls, name: str, bases: Any, content: Any, **kwargs: Any) -> None:
            super().__init__(name, bases, content)

    class Base(LIBRARY.StableDiffusionPipeline, metaclass=Registry, tag="base"):  # type: ignore[misc]
        def __init_subclass__(cls, *, label: str, **kwargs: Any) -> None:
            registered.append(label)
            super().__init_subclass__(**kwargs)

    class Custom(Base, tag="custom", label="label"):
        pass

    stock: Any = recipes()["stable-diffusion"].make()
    pipe: Any = Custom(**stock.components)
    anyaccel.place(pipe, "cpu", dtype="float32")
    assert registered == ["base", "custom", "label"]
    assert isinstance(pipe, Custom)
