"""Checks every entry of diffusers_internals.py against the installed diffusers. A failure names the entry to update."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.hooks.context_parallel import EquipartitionSharder
from diffusers.hooks.layerwise_casting import apply_layerwise_casting_hook
from diffusers.models.modeling_utils import ModelMixin

from anyaccel.library_logging import EXPERIMENTAL_ADVICE, FLOAT32_ADVICE, SAFETY_ADVICE
from anyaccel.processes.forked_call import call_in_fork
from anyaccel.recipes import recipes, run
from anyaccel.upstream import diffusers_internals as internals

CLASSES: Any = diffusers
PIPELINES = (
    "StableDiffusionPipeline",
    "StableDiffusionXLPipeline",
    "StableDiffusion3Pipeline",
    "FluxPipeline",
    "PixArtSigmaPipeline",
    "WanPipeline",
)


class Model(ModelMixin, ConfigMixin):  # type: ignore[misc]
    _keep_in_fp32_modules = ("norm",)  # type: ignore[assignment]

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.norm, self.cast = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)


@contextmanager
def capture_logs(name: str) -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    filters, logger.filters = logger.filters, []  # those of earlier tests
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.filters = filters


def source_of_call(name: str) -> str:
    return inspect.getsource(inspect.unwrap(getattr(CLASSES, name).__call__))


def test_check_inputs_raises_for_a_wrong_argument() -> None:
    with pytest.raises(ValueError, match="divisible by 8") as caught:
        CLASSES.StableDiffusionPipeline.check_inputs(SimpleNamespace(), "a prompt", height=7, width=8, callback_steps=1)
    assert internals.is_argument_error(caught.value)
    with pytest.raises(ValueError, match="another") as caught:
        raise ValueError("another")
    assert not internals.is_argument_error(caught.value)


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_have_check_inputs(name: str) -> None:
    assert "self.check_inputs(" in source_of_call(name)


@pytest.mark.parametrize("name", PIPELINES)
def test_denoising_loops_iterate_over_t(name: str) -> None:
    assert "for i, t in enumerate(timesteps)" in source_of_call(name)


def test_find_denoising_step_in_a_running_pipeline() -> None:
    recipe = recipes()["stable-diffusion"]
    pipe: Any = recipe.make()
    seen: list[int | None] = []
    forward = pipe.unet.forward

    def record_step(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe()
        while frame.f_code.co_name != "__call__" or frame.f_locals.get("self") is not pipe:
            assert frame.f_back is not None
            frame = frame.f_back
        seen.append(internals.find_denoising_step(frame))
        return forward(*args, **kwargs)

    pipe.unet.forward = record_step
    run(recipe, pipe)
    assert seen == list(range(len(seen)))
    assert len(seen) > 1
    assert internals.find_denoising_step(sys._getframe()) is None


def test_casts_warn_about_float32_modules() -> None:
    model, (logger, text) = Model(), FLOAT32_ADVICE
    with capture_logs(logger) as messages:
        model.to(torch.float16)
    assert any(text in message for message in messages), messages
    assert internals.read_float32_modules(model) == ("norm",)
    assert internals.read_float32_modules(CLASSES.WanTransformer3DModel)


def test_parallelism_warns_and_calls_resolve_parallel_config() -> None:
    model, config = Model(), CLASSES.ContextParallelConfig(ulysses_degree=2)
    logger, text = EXPERIMENTAL_ADVICE
    with capture_logs(logger) as messages, pytest.raises(RuntimeError, match=r"torch\.distributed must be"):
        model.enable_parallelism(config=config)
    assert any(text in message for message in messages), messages


def resolve() -> tuple[bool, str, str]:
    from torch.distributed.device_mesh import init_device_mesh

    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    model, config = Model(), internals.make_tensor_parallel_config(1, mesh)
    with internals.use_mesh(model, mesh, torch.device("cpu")):
        resolved: Any = model._resolve_parallel_config(config)
    assert "_resolve_parallel_config" not in vars(model)
    return model._parallel_config is resolved, str(config._device), type(config).__name__


def test_use_mesh_on_the_cpu() -> None:
    assert call_in_fork(resolve) == (True, "cpu", "TensorParallelConfig")


def test_allow_uneven_shares() -> None:
    context = CLASSES.ContextParallelConfig(ulysses_degree=2)
    assert context.ulysses_anything is False
    parallel = diffusers.models._modeling_parallel.ParallelConfig(context_parallel_config=context)
    internals.allow_uneven_shares(SimpleNamespace(_parallel_config=parallel))
    assert context.ulysses_anything is True


def test_indivisible_sequence_raises_an_assertion_error() -> None:
    mesh: Any = SimpleNamespace(size=lambda: 2)
    with pytest.raises(AssertionError) as caught:
        EquipartitionSharder.shard(torch.zeros(1, 3), 1, mesh)
    assert internals.is_uneven_share(caught.value)
    assert not internals.is_uneven_share(AssertionError("another"))


def test_models_declare_repeated_blocks_and_parallel_plans() -> None:
    cls = CLASSES.FluxTransformer2DModel
    assert "FluxTransformerBlock" in internals.read_repeated_blocks(cls)
    assert internals.read_parallel_plan(cls, "context")
    assert any("*" in layer for layer in internals.read_parallel_plan(cls, "tensor"))
    assert internals.read_parallel_plan(CLASSES.UNet2DConditionModel, "context") == {}
    assert "cuda" in internals.read_tensor_parallel_devices()


def test_dtype_argument_is_not_deprecated() -> None:
    name = internals.read_dtype_argument()
    assert f"{name}" in ("dtype", "torch_dtype")
    assert (
        f'"{name}"' in inspect.getsource(diffusers.DiffusionPipeline.from_pretrained)
        or name in inspect.signature(diffusers.DiffusionPipeline.from_pretrained).parameters
    )


def test_casts_components_for_pipelines_but_not_auto_classes() -> None:
    assert internals.casts_components(CLASSES.DiffusionPipeline)
    assert not internals.casts_components(CLASSES.AutoPipelineForText2Image)
    assert "float32" in inspect.getsource(CLASSES.DiffusionPipeline.from_pipe)


def test_hooks_are_in_the_registry_attribute() -> None:
    from diffusers.hooks.hooks import HookRegistry, ModelHook

    make_hook: Any = ModelHook
    layer = torch.nn.Linear(2, 2)
    HookRegistry.check_if_exists_or_initialize(layer).register_hook(make_hook(), "test")
    assert isinstance(getattr(layer, internals.HOOK_ATTRIBUTE), HookRegistry)
    assert internals.has_hook(vars(layer))
    assert internals.list_hooks(vars(layer)) == ("test",)
    assert internals.is_hook_forward(layer.forward)
    assert internals.read_module(getattr(layer, internals.HOOK_ATTRIBUTE)) is layer
    empty = torch.nn.Linear(2, 2)
    assert not internals.has_hook(vars(empty))
    assert not internals.is_hook_forward(empty.forward)
    HookRegistry.check_if_exists_or_initialize(empty)
    assert not internals.has_hook(vars(empty)), "an empty registry does not count"
    assert internals.list_hooks(vars(empty)) == ()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    CLASSES.hooks.apply_layerwise_casting(model, torch.float16, torch.float32)
    assert set(internals.list_hooks(vars(model[0]))) <= set(internals.STATELESS_HOOKS) != set()
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.remove_all_hooks()
    assert getattr(pipe, internals.PIPELINE_HOOKS) == []
    assert internals.read_offload_order(pipe) == ("text_encoder", "image_encoder", "unet", "vae")


def test_pipelines_use_execution_device() -> None:
    assert isinstance(inspect.getattr_static(CLASSES.DiffusionPipeline, "_execution_device"), property)
    assert "self._execution_device" in source_of_call("StableDiffusionPipeline")


class SkippingModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))  # gives the model its own group
        self.run, self.skipped = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.run(values) * self.scale
        return result


def test_group_offloading_hook_names_and_warning() -> None:
    from diffusers.hooks import group_offloading
    from diffusers.hooks.hooks import HookRegistry

    model, cpu = SkippingModel(), torch.device("cpu")
    group_offloading.apply_group_offloading(model, cpu, offload_type="leaf_level")
    registry = getattr(model.run, internals.HOOK_ATTRIBUTE)
    assert list(registry.hooks) == [internals.GROUP_OFFLOADING]
    group = registry.get_hook(internals.GROUP_OFFLOADING).group
    assert callable(group.offload_)
    assert group.offload_device == cpu
    tracker, prefetch = internals.PREFETCH_HOOKS
    assert (tracker, prefetch) == (
        group_offloading._LAYER_EXECUTION_TRACKER,
        group_offloading._LAZY_PREFETCH_GROUP_OFFLOADING,
    )
    make_hook: Any = group_offloading.LazyPrefetchGroupOffloadingHook
    HookRegistry.check_if_exists_or_initialize(model).register_hook(make_hook(), prefetch)
    assert tracker in registry.hooks
    with capture_logs(group_offloading.__name__) as messages:
        model(torch.zeros(1, 2))
    assert [message.startswith(internals.SKIPPED_LAYERS) for message in messages] == [True]


@pytest.mark.parametrize(
    "name", ["StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"]
)
def test_pipelines_warn_about_a_missing_safety_checker(name: str) -> None:
    pipe: Any = recipes()["stable-diffusion"].make()
    cls = getattr(CLASSES, name)
    logger, text = next(advice for advice in SAFETY_ADVICE if advice[0] == cls.__module__)
    with capture_logs(logger) as messages:
        cls(**{**pipe.components, "safety_checker": None}, requires_safety_checker=True)
    assert any(text in message for message in messages), messages


def test_classes_declare_offloading_exceptions() -> None:
    assert internals.read_never_offloaded(CLASSES.StableDiffusionPipeline) == ("safety_checker",)
    assert internals.read_never_offloaded(SimpleNamespace()) == ()


def test_read_optional_components() -> None:
    optional = internals.read_optional_components(CLASSES.StableDiffusionPipeline)
    assert "safety_checker" in optional
    assert "text_encoder" not in optional
    assert not internals.supports_group_offloading(CLASSES.AutoencoderOobleck)
    assert internals.supports_group_offloading(CLASSES.UNet2DConditionModel)
    assert internals.supports_group_offloading(torch.nn.Linear(2, 2))


def test_calls_store_the_number_of_steps() -> None:
    recipe = recipes()["stable-diffusion"]
    pipe: Any = recipe.make()
    assert internals.read_step_count(pipe) is None
    run(recipe, pipe)
    assert internals.read_step_count(pipe) == len(pipe.scheduler.timesteps)


def test_use_progress_bars_replaces_the_loading_bar(tmp_path: Path) -> None:
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.save_pretrained(tmp_path)
    seen: list[tuple[str, list[str]]] = []

    def make_bar(items: Any, **options: Any) -> Any:
        items = list(items)
        seen.append((options["desc"], [name for name, _ in items]))
        return items

    before = diffusers.utils.logging.tqdm
    with internals.use_progress_bars(make_bar):
        CLASSES.DiffusionPipeline.from_pretrained(tmp_path)
    assert diffusers.utils.logging.tqdm is before
    assert [text.startswith(internals.COMPONENTS_BAR) for text, _ in seen] == [True]
    assert "unet" in seen[0][1]


def test_read_alpha_sigma() -> None:
    scales = internals.read_alpha_sigma(CLASSES.DPMSolverMultistepScheduler(), 2.0)
    assert scales == pytest.approx((1 / 5**0.5, 2 / 5**0.5))
    assert internals.read_alpha_sigma(CLASSES.DDIMScheduler(), 2.0) is None


def test_unpack_latents() -> None:
    pipe = SimpleNamespace(_unpack_latents=CLASSES.FluxPipeline._unpack_latents, vae_scale_factor=8)
    packed = CLASSES.FluxPipeline._pack_latents(torch.arange(64.0).view(1, 4, 4, 4), 1, 4, 4, 4)
    assert internals.unpack_latents(pipe, packed, 32, 32).flatten().tolist() == list(range(64))
    assert internals.unpack_latents(SimpleNamespace(), packed, 32, 32) is packed


def test_find_renamed_class() -> None:
    old_class = CLASSES.Transformer2DModel
    assert internals.find_renamed_class({"norm_type": "ada_norm_zero"}, old_class) is CLASSES.DiTTransformer2DModel
    assert internals.find_renamed_class({"norm_type": "layer_norm"}, old_class) is old_class


def test_layerwise_casting_stops() -> None:
    layer = torch.nn.Linear(2, 2)
    assert internals.stop_layerwise_casting(layer) is None
    apply_layerwise_casting_hook(layer, torch.float8_e4m3fn, torch.float32, non_blocking=False)
    layer(torch.ones(1, 2))
    assert layer.weight.dtype is torch.float8_e4m3fn
    assert internals.stop_layerwise_casting(layer) is torch.float32
    layer.to(torch.bfloat16)
    assert layer(torch.ones(1, 2, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert layer.weight.dtype is torch.bfloat16
