"""Pipelines with offloaded weights can be saved, copied, adapted and changed like any other pipeline."""

import copy
import gc
import operator
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.processes.forked_call import call_in_fork
from anyaccel.recipes import recipes, run
from anyaccel.runtime.pipeline import place
from anyaccel.runtime.placement import oom_history
from tests.runtime.placement.sweeps import TOLERANCE, silence_output
from tests.runtime.speed.small_pipelines import make_small

pytestmark = pytest.mark.usefixtures("pipelines_imported")

NAME = "stable-diffusion"
OFFLOADED = [
    ("mps", "phase"),
    pytest.param("hpu", "layer", marks=pytest.mark.slow),
    pytest.param("mps", "layer", marks=pytest.mark.slow),
    pytest.param("hpu", "component", marks=pytest.mark.slow),
]


def make() -> Any:
    return make_small(NAME)


def generate(pipe: Any) -> Any:
    return run(recipes()[NAME], pipe)


def difference(first: Any, second: Any) -> float:
    return float(numpy.abs(first - second).max())


@pytest.mark.parametrize(("device", "residence"), OFFLOADED)
def test_an_offloaded_pipeline_supports_all_operations(device: str, residence: str, tmp_path: Path) -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        silence_output()
        pipe = place(make(), device, dtype="float32", memory=residence)
        before = generate(pipe)

        pipe.save_pretrained(tmp_path)
        library: Any = diffusers
        loaded = library.StableDiffusionPipeline.from_pretrained(tmp_path, safety_checker=None)
        assert difference(generate(loaded), before) < TOLERANCE
        assert difference(generate(pipe), before) < TOLERANCE, "saving must not change the pipeline"

        used = anyaccel.memory(device).used_bytes

        def fail(*args: Any) -> Any:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pipe(**recipes()[NAME].call(), callback_on_step_end=fail)
        gc.collect()
        assert anyaccel.memory(device).used_bytes == used, "an interrupted call must free its weights"

        other = make().unet
        with torch.no_grad():
            other.conv_out.weight.mul_(2)
        pipe.unet = other
        changed = generate(pipe)
        assert difference(changed, before) > TOLERANCE, "the new model must be used"
        assert difference(generate(place(pipe, "cpu")), changed) < TOLERANCE
        assert all(parameter.requires_grad for parameter in pipe.unet.parameters())

    run_forked(device, use, timeout_s=300)


def multiply_data(pipe: Any) -> None:
    pipe.unet.conv_in.weight.data.mul_(1.5)


def multiply_in_place(pipe: Any) -> None:
    with torch.no_grad():
        pipe.vae.decoder.conv_out.weight.mul_(0.5)


def replace_parameter(pipe: Any) -> None:
    layer = pipe.unet.conv_in
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 2)


def assign_state(pipe: Any) -> None:
    pipe.unet.load_state_dict({name: value * 1.1 for name, value in pipe.unet.state_dict().items()}, assign=True)


EDITS = (multiply_data, multiply_in_place, replace_parameter, assign_state)
MODES = [
    ("cpu", "phase"),
    ("mps", "phase"),
    pytest.param("mps", "layer", marks=pytest.mark.long),
    pytest.param("hpu", "component", marks=pytest.mark.slow),  # the code of "phase", without files
    pytest.param("cpu", "layer", marks=pytest.mark.slow),
    pytest.param("hpu", "layer", marks=pytest.mark.slow),
    pytest.param("hpu", "phase", marks=pytest.mark.slow),
]


def run_placed(device: str, use: Callable[[], None]) -> None:
    def run_quietly(accelerator: Any = None) -> None:
        silence_output()
        use()

    call_in_fork(run_quietly) if device == "cpu" else run_forked(device, run_quietly, timeout_s=300)


@pytest.mark.parametrize(("device", "residence"), MODES)
def test_edits_between_calls_and_in_callbacks_take_effect(device: str, residence: str) -> None:
    def use() -> None:
        pipe, stock = place(make(), device, dtype="float32", memory=residence), make()
        before = generate(pipe)
        parameters = list(pipe.unet.parameters())
        pipe.unet.conv_out.weight.tag = "mine"
        assert difference(generate(pipe), generate(stock)) < TOLERANCE
        assert all(map(operator.is_, parameters, pipe.unet.parameters())), "the parameters stay the same objects"
        assert pipe.unet.conv_out.weight.tag == "mine"
        for edit in EDITS:
            edit(pipe)
            edit(stock)
            after = generate(pipe)
            assert difference(after, before) > 1e-2, f"{edit.__name__} had no effect"
            assert difference(after, generate(stock)) < TOLERANCE, edit.__name__
            before = after

        def change(pipe: Any, step: int, *args: Any) -> dict[str, Any]:
            if step == 0:
                for edit in EDITS:
                    edit(pipe)
            return {}

        for target in (pipe, stock):
            target(**recipes()[NAME].call(), callback_on_step_end=change)
        assert difference(generate(pipe), before) > 1e-2
        assert difference(generate(pipe), generate(stock)) < TOLERANCE, "edits in a callback"

    run_placed(device, use)


@pytest.mark.parametrize(("device", "residence"), MODES)
def test_copies_have_their_own_weights(device: str, residence: str, tmp_path: Path) -> None:
    def use() -> None:
        pipe = place(make(), device, dtype="float32", memory=residence)
        before = generate(pipe)
        shared = copy.copy(pipe)
        assert difference(generate(shared), before) < TOLERANCE
        assert shared.unet is pipe.unet
        assert shared.plan.device == pipe.plan.device
        assert shared.plan.memory_in_use.value.residence == residence
        pipe.unet.save_pretrained(tmp_path)
        copies = [copy.deepcopy(pipe.unet), pickle.loads(pickle.dumps(pipe.unet))]
        library: Any = diffusers
        copies.append(library.UNet2DConditionModel.from_pretrained(tmp_path))
        copied = pickle.loads(pickle.dumps(pipe))
        for model in (pipe.unet, *copies):
            assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
        multiply_data(pipe)
        assert difference(generate(pipe), before) > 1e-2
        assert difference(generate(copied), before) < TOLERANCE
        for model in copies:
            stock = make()
            stock.unet = model
            assert difference(generate(stock), before) < TOLERANCE

    run_placed(device, use)


@pytest.mark.parametrize(("device", "residence"), [mode for mode in MODES if mode != ("cpu", "phase")])
def test_a_patched_forward_is_used_until_it_is_deleted(device: str, residence: str) -> None:
    def use() -> None:
        pipe = place(make(), device, dtype="float32", memory=residence)
        before = generate(pipe)
        calls: list[str] = []
        for module in (pipe.unet, pipe.unet.conv_in):
            beneath = module.forward

            def wrap(*args: Any, beneath: Any = beneath, **kwargs: Any) -> Any:
                calls.append("wrap")
                return beneath(*args, **kwargs)

            def replace(self: Any, *args: Any, **kwargs: Any) -> Any:
                calls.append("replace")
                return type(self).forward(self, *args, **kwargs)

            # A layer is patched only with `wrap`: with memory="layer", `replace` would skip its hook.
            for patch in (wrap, types.MethodType(replace, module)) if module is pipe.unet else (wrap,):
                module.forward = patch
                for _ in range(2):
                    calls.clear()
                    assert difference(generate(pipe), before) < TOLERANCE
                    assert set(calls) == {patch.__name__}
                del module.forward
                calls.clear()
                assert difference(generate(pipe), before) < TOLERANCE
                assert not calls
        pipe.unet.conv_in.forward = wrap
        pipe.to("cpu", memory="resident")
        assert difference(generate(pipe), before) < TOLERANCE
        assert calls, "the patch must be kept when the memory mode changes"

    run_placed(device, use)


def test_weights_on_disk_remain_while_another_pipeline_uses_them() -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        silence_output()
        pipe = place(make(), "mps", dtype="float32", memory="phase")
        before = generate(pipe)
        other = anyaccel.DiffusionPipeline.from_pipe(pipe)
        del pipe
        gc.collect()
        assert difference(generate(other), before) < TOLERANCE

    run_forked("mps", use, timeout_s=300)


@pytest.mark.parametrize("residence", ["phase", "layer"])
def test_weights_on_disk_work_in_inference_mode(residence: str) -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        silence_output()
        pipe = place(make(), "mps", dtype="float32", memory=residence)
        with torch.inference_mode():
            inside = generate(pipe)  # regression: "Inference tensors do not track version counter"
        assert difference(generate(pipe), inside) < TOLERANCE

    run_forked("mps", use, timeout_s=300)


@pytest.mark.parametrize(("device", "residence"), [OFFLOADED[0], *OFFLOADED[2:]])
def test_an_adapter_is_loaded_into_an_offloaded_pipeline(device: str, residence: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=["to_q"], init_lora_weights=False)

    def use(accelerator: VirtualAccelerator) -> None:
        silence_output()
        adapted = make()
        adapted.unet.add_adapter(config)
        weights = {f"unet.{key}": value for key, value in peft.get_peft_model_state_dict(adapted.unet).items()}
        pipe = place(make(), device, dtype="float32", memory=residence)
        before = generate(pipe)
        pipe.load_lora_weights(weights)
        assert difference(generate(pipe), before) > TOLERANCE
        assert difference(generate(pipe), generate(adapted)) < TOLERANCE
        pipe.unet.fuse_lora()
        adapted.unet.fuse_lora()
        assert difference(generate(pipe), generate(adapted)) < TOLERANCE

    run_forked(device, use, timeout_s=300)


@pytest.mark.parametrize("content", ['{"key": "k", "capacity_bytes": 1e400}', "[" * 100_000, "[]", ""])
def test_a_damaged_outcome_file_is_ignored(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYACCEL_CACHE", str(tmp_path))
    path = oom_history._path("k")
    path.parent.mkdir(parents=True)
    rule = '"residence": "resident", "way": {}, "images_per_call": null'
    path.write_text(content.replace("}", f", {rule}}}"))
    assert oom_history.load_outcome("k", 1) is None


class Brighten(ModelHook):  # type: ignore[misc]
    """A hook of the user."""

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        return output * 1.2


class Table(torch.nn.Module):
    """A layer of the user with a plain tensor that moves with the layer."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer, self.table = layer, torch.linspace(0, 1, 4)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.table = fn(self.table)
        return self

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(sample) + self.table[None, :, None, None]
        return output


@pytest.mark.parametrize(("device", "residence"), [("cpu", "layer"), ("neuron", "component")])
def test_hooks_and_layers_of_the_user_are_kept(device: str, residence: str) -> None:
    def use() -> None:
        images = []
        for is_placed in (False, True):
            pipe = make()
            add_hook_to_module(pipe.unet.up_blocks[0], Brighten())
            add_hook_to_module(pipe.vae, Brighten())
            if residence == "component":
                pipe.unet.conv_out = Table(pipe.unet.conv_out)
            if is_placed:
                pipe = place(pipe, device, dtype="float32", memory=residence)
            images += [generate(pipe), generate(pipe)]
            if is_placed:
                pipe.to("cpu", memory="resident")
                images.append(generate(pipe))
        stock = images[0]
        assert all(difference(image, stock) < TOLERANCE for image in images[1:])

    run_placed(device, use)
