"""Code of the user runs as often as in diffusers: not in memory traces, which run a pipeline once more."""

import copy
import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import diffusers
import diffusers.modular_pipelines
import numpy
import pytest
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.clip import modeling_clip

import anyaccel
from anyaccel.planning.kernel_workspace import Workspace
from anyaccel.recipes import recipes, run
from anyaccel.runtime.library_code import find_user_code_in_call, find_user_code_in_model, is_library_code
from anyaccel.runtime.placement import memory_plan
from anyaccel.tracing.meta_clone import clone_pipeline
from anyaccel.tracing.pipeline_trace import PipelineTrace
from tests.conftest import NEEDS_RECIPES

pytestmark = [NEEDS_RECIPES, pytest.mark.usefixtures("pipelines_imported")]


class NumpyNoise(diffusers.StableDiffusionPipeline):
    """A pipeline that draws its noise with NumPy, and counts."""

    def prepare_latents(  # type: ignore[no-untyped-def]
        self, batch, channels, height, width, dtype, device, generator, latents=None
    ):
        self.history = [*getattr(self, "history", []), random.random()]
        scale = self.vae_scale_factor  # type: ignore[attr-defined]
        return torch.from_numpy(numpy.random.randn(batch, channels, height // scale, width // scale)).to(device, dtype)


class CountingScheduler(diffusers.DDIMScheduler):
    """A scheduler that counts its steps."""

    steps = 0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        type(self).steps += 1
        return super().step(*args, **kwargs)  # type: ignore[misc]


class CountingProcessor(AttnProcessor2_0):
    """An attention processor of the user."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


class Tokenizer:
    """A tokenizer of the user."""


class Mode(TorchFunctionMode):
    """A function mode of the user."""


def _patch_class(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def run_original(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    patch.setattr(owner, name, run_original)


def _decorate(pipe: Any) -> None:
    pipe.encode_prompt = torch.no_grad()(lambda *args, **kwargs: None)


def _replace_scheduler(pipe: Any, kind: Any) -> Any:
    pipe.scheduler = kind.from_config(pipe.scheduler.config)
    return pipe.scheduler


Edit = Callable[[Any, pytest.MonkeyPatch], Any]
EDITS: dict[str, Edit] = {
    "StableDiffusionPipeline.encode_prompt": lambda pipe, patch: setattr(pipe, "encode_prompt", lambda: None),
    "StableDiffusionPipeline.encode_prompt ": lambda pipe, patch: _decorate(pipe),
    "AutoencoderKL.decode": lambda pipe, patch: setattr(pipe.vae, "decode", functools.partial(lambda z: z)),
    "DDIMScheduler.step": lambda pipe, patch: setattr(
        _replace_scheduler(pipe, diffusers.DDIMScheduler), "step", lambda: None
    ),
    "StableDiffusionPipeline.tokenizer": lambda pipe, patch: setattr(pipe, "tokenizer", Tokenizer()),
    "Attention.processor": lambda pipe, patch: pipe.unet.set_attn_processor(CountingProcessor()),
    "StableDiffusionPipeline.scheduler": lambda pipe, patch: _replace_scheduler(pipe, CountingScheduler),
    "a patched StableDiffusionPipeline.encode_prompt": lambda pipe, patch: _patch_class(
        patch, diffusers.StableDiffusionPipeline, "encode_prompt"
    ),
    "a patched DiffusionPipeline.progress_bar": lambda pipe, patch: patch.setattr(
        diffusers.DiffusionPipeline, "progress_bar", functools.partialmethod(lambda self, *args: None)
    ),
    "a patched Attention.forward": lambda pipe, patch: _patch_class(patch, Attention, "forward"),
    "a patched Tensor.add": lambda pipe, patch: patch.setattr(torch.Tensor, "add", lambda *args: None, raising=False),
    "a patched torch.cat": lambda pipe, patch: _patch_class(patch, torch, "cat"),
    "a patched torch.nn.functional.silu": lambda pipe, patch: patch.setattr(functional, "silu", mock.MagicMock()),
    "a patched diffusers.models.embeddings.get_timestep_embedding": lambda pipe, patch: _patch_class(
        patch, diffusers.models.embeddings, "get_timestep_embedding"
    ),
    "a patched transformers.models.clip.modeling_clip.eager_attention_forward": lambda pipe, patch: _patch_class(
        patch, modeling_clip, "eager_attention_forward"
    ),
    "an attention function": lambda pipe, patch: patch.setitem(ALL_ATTENTION_FUNCTIONS, "mine", lambda *args: None),
    "Mode": lambda pipe, patch: Mode(),
    "FlopCounterMode": lambda pipe, patch: FlopCounterMode(display=False),
}


def make() -> Any:
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def stock() -> Any:
    return make()


@pytest.mark.parametrize("expected", EDITS)
def test_user_code_is_found(stock: Any, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = copy.deepcopy(stock)
    assert find_user_code_in_call(pipe, recipes()["stable-diffusion"].call()) == ""
    mode = EDITS[expected](pipe, monkeypatch)
    if isinstance(mode, Mode | FlopCounterMode):
        with mode:
            assert find_user_code_in_call(pipe, {}) in (expected, "_FlopCounterMode")
    else:
        assert find_user_code_in_call(pipe, {}) == expected.strip()


class Pretender:
    """An object of the user that raises if its `__class__` is read."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise RuntimeError("this property must not run")


class PartialOfTheUser(functools.partial[Any]):
    """A kind of partial function of the user."""


@pytest.mark.parametrize(
    "value",
    [
        lambda: None, Tokenizer, Tokenizer(), PartialOfTheUser(len), functools.partial(lambda: None),
        property(torch.Tensor.size, lambda self, value: None), classmethod(lambda cls: None), mock.MagicMock(),
        functools.cache(lambda: None), torch.no_grad()(lambda: None),
    ],
)  # fmt: skip
def test_values_of_the_user_are_not_library_code(value: Any) -> None:
    assert not is_library_code(value)


@pytest.mark.parametrize(
    "value",
    [
        1, None, [], torch.ones(1), torch, torch.cat, torch.Tensor, torch.Tensor.add, torch.nn.Linear.forward,
        functools.partial(torch.cat, dim=1), torch.no_grad()(torch.nn.Linear.forward), [].append, len,
    ],
)  # fmt: skip
def test_values_of_libraries_are_library_code(value: Any) -> None:
    assert is_library_code(value)


def test_properties_of_objects_of_the_user_do_not_run() -> None:
    assert not is_library_code(Pretender())


def test_functions_that_wrap_one_another_are_searched_once() -> None:
    first, second = torch.no_grad()(torch.nn.Linear.forward), torch.no_grad()(torch.nn.Linear.forward)
    vars(first)["__wrapped__"], vars(second)["__wrapped__"] = second, first
    assert is_library_code(first)


def test_user_code_in_a_model_is_found(stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unet = copy.deepcopy(stock.unet)
    assert find_user_code_in_model(unet) == ""
    _patch_class(monkeypatch, diffusers.models.embeddings, "get_timestep_embedding")
    assert find_user_code_in_model(unet) == "a patched diffusers.models.embeddings.get_timestep_embedding"
    monkeypatch.undo()
    _patch_class(monkeypatch, Attention, "forward")
    assert find_user_code_in_model(unet) == "a patched Attention.forward"
    monkeypatch.undo()
    unet.conv_in._conv_forward = lambda *args: None
    assert find_user_code_in_model(unet) == "a replaced _conv_forward of Conv2d"
    del unet.conv_in._conv_forward
    unet.set_attn_processor(CountingProcessor())
    assert find_user_code_in_model(unet) == "CountingProcessor"


def test_user_code_in_arguments_is_found(stock: Any) -> None:
    library = {"guidance_scale": 2, "sigmas": [1.0], "cross_attention_kwargs": {"scale": 1.0, "x": torch.ones(1)}}
    assert find_user_code_in_call(stock, library) == ""
    assert find_user_code_in_call(stock, {"prompt": "a", "on_done": lambda: None}) == "the argument on_done"
    assert find_user_code_in_call(stock, {"cross_attention_kwargs": {"store": [Tokenizer()]}}) == (
        "the argument cross_attention_kwargs"
    )


def test_a_global_hook_is_user_code(stock: Any) -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        assert find_user_code_in_call(stock, {}) == "a global hook"
    finally:
        handle.remove()


def test_a_pipeline_class_of_the_user_is_not_traced() -> None:
    results = []
    kind: Any = NumpyNoise
    for is_placed in (False, True):
        pipe: Any = kind(**make().components, requires_safety_checker=False)
        if is_placed:
            pipe = anyaccel.place(pipe, "cpu", dtype="float32", memory="phase")
        pipe.set_progress_bar_config(disable=True)
        numpy.random.seed(3)
        random.seed(3)
        images = [run(recipes()["stable-diffusion"], pipe) for _ in range(2)]
        results.append((images, pipe.history, numpy.random.randn(3)))
    (images, history, drawn), (placed_images, placed_history, placed_drawn) = results
    numpy.testing.assert_array_equal(images, placed_images)
    assert history == placed_history
    assert (drawn == placed_drawn).all()
    reason = pipe.plan.memory_in_use.reason
    assert (
        "cannot be predicted, because NumpyNoise is not part of a known library and would run more than once" in reason
    )
    assert pipe.plan.report.forecast is None


def test_a_pipeline_of_diffusers_is_traced_without_callbacks_and_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    run_trace = PipelineTrace.run

    def record(self: PipelineTrace, pipe: Any, arguments: Any, *others: Any) -> Any:
        traced.append(arguments)
        return run_trace(self, pipe, arguments, *others)

    monkeypatch.setattr(PipelineTrace, "run", record)
    recipe = recipes()["stable-cascade-combined"]
    pipe: Any = anyaccel.place(recipe.make(), "cpu", dtype="float32", memory="phase")
    steps: list[int] = []

    def count(pipe: Any, step: int, timestep: Any, values: Any) -> dict[str, Any]:
        steps.append(step)
        return {}

    pipe(**{**recipe.call(), "prior_num_inference_steps": 2, "prior_callback_on_step_end": count})
    assert steps == [0, 1]
    assert pipe.plan.report.forecast is not None
    assert traced
    assert not [name for name in traced[0] if "callback" in name or "generator" in name]


def test_random_states_are_restored() -> None:
    def draw() -> list[float]:
        return [random.random(), numpy.random.rand(), torch.rand(1).item()]

    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()

    class Pipe(SimpleNamespace):
        def __call__(self) -> list[float]:
            return draw()

    first = PipelineTrace().run(Pipe(components={}), {}, Workspace())
    assert draw() == first
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])


def test_lists_of_the_pipeline_are_not_shared_with_its_copy(stock: Any) -> None:
    pipe = copy.copy(stock)
    pipe.history, pipe.table = [1], {"a": 1}
    clone = clone_pipeline(pipe, type(pipe), PipelineTrace())
    clone.history.append(2)
    clone.table["b"] = 2
    assert (pipe.history, pipe.table) == ([1], {"a": 1})


def test_a_call_that_fits_easily_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search takes as long as many calls of a tiny pipeline."""
    search = mock.Mock(return_value="")
    monkeypatch.setattr(memory_plan, "find_user_code_in_call", search)
    pipe = anyaccel.place(make(), "cpu", dtype="float32")
    run(recipes()["stable-diffusion"], pipe)
    search.assert_not_called()


MODULAR: Any = diffusers.modular_pipelines


class AddNoise(MODULAR.ModularPipelineBlocks):  # type: ignore[misc]
    """A block of the user that draws from a generator of its own."""

    model_name = "stable-diffusion-xl"
    description = "adds noise before decoding"

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.calls = torch.Generator().manual_seed(5), 0

    @property
    def inputs(self) -> list[Any]:
        return [MODULAR.InputParam("latents")]

    @property
    def intermediate_outputs(self) -> list[Any]:
        return [MODULAR.OutputParam("latents")]

    def __call__(self, components: Any, state: Any) -> Any:
        self.calls += 1
        block = self.get_block_state(state)
        block.latents = block.latents + 0.3 * torch.randn(block.latents.shape, generator=self.generator)
        self.set_block_state(state, block)
        return components, state


def make_modular(*, custom: bool) -> Any:
    blocks = MODULAR.StableDiffusionXLAutoBlocks()
    if custom:
        blocks.sub_blocks.insert("noise", AddNoise(), len(blocks.sub_blocks) - 1)
    pipe = blocks.init_pipeline()
    source: Any = recipes()["stable-diffusion-xl"].make()
    parts = source.components
    pipe.update_components(**{name: part for name, part in parts.items() if part is not None and hasattr(pipe, name)})
    return pipe


@pytest.mark.parametrize("custom", [True, False])
def test_blocks_of_a_modular_pipeline_run_once(custom: bool, capsys: pytest.CaptureFixture[str]) -> None:
    images, bars, calls = [], [], []
    for is_placed in (False, True):
        pipe = make_modular(custom=custom)
        if is_placed:
            anyaccel.place(pipe, "cpu", dtype="float32", memory="phase")
        capsys.readouterr()
        images.append(
            pipe(
                prompt="a fox", height=16, width=16, num_inference_steps=2, generator=torch.Generator().manual_seed(0),
                output_type="np", output="images",
            )
        )  # fmt: skip
        bars.append(capsys.readouterr().err.count("0/2"))  # tqdm shows the other counts once or twice
        calls.append(pipe.blocks.sub_blocks["noise"].calls if custom else 0)
    numpy.testing.assert_array_equal(images[1], images[0])
    assert calls[0] == calls[1] == custom
    assert bars == [1, 1]
