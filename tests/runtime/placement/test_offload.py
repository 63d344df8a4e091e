"""Pipelines with offloaded weights can be saved, adapted and changed, and no change is lost silently."""

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import numpy
import pytest
import torch

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import UsageError
from anyaccel.recipes import recipes, run
from anyaccel.runtime.pipeline import place
from anyaccel.runtime.placement import oom_history
from anyaccel.runtime.placement.temp_weights import make_weights_folder, remove_weights_folder
from tests.runtime.placement.sweeps import TOLERANCE, silence_output

NAME = "stable-diffusion"
OFFLOADED = [
    ("mps", "phase"),
    pytest.param("hpu", "layer", marks=pytest.mark.slow),
    pytest.param("mps", "layer", marks=pytest.mark.slow),
    pytest.param("hpu", "component", marks=pytest.mark.slow),
]


def make() -> Any:
    return recipes()[NAME].make()


def generate(pipe: Any) -> Any:
    return run(recipes()[NAME], pipe)


def difference(first: Any, second: Any) -> float:
    return float(numpy.abs(first - second).max())


@pytest.mark.parametrize(("device", "residence"), OFFLOADED)
def test_an_offloaded_pipeline_supports_all_operations(device: str, residence: str, tmp_path: Path) -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        silence_output()
        pipe = place(recipes()[NAME].make(), device, dtype="float32", memory=residence)
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


def test_a_lost_change_in_a_callback_raises() -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        silence_output()
        pipe = place(make(), "mps", dtype="float32", memory="phase")
        before = generate(pipe)

        def change(pipe: Any, *args: Any) -> dict[str, Any]:
            with torch.no_grad():
                pipe.vae.decoder.conv_out.bias.add_(0.2)  # not loaded yet
            return {}

        with pytest.raises(UsageError, match="weights of vae were changed"):
            pipe(**recipes()[NAME].call(), callback_on_step_end=change)
        assert difference(generate(pipe.to("cpu", memory="resident")), before) < TOLERANCE

    run_forked("mps", use, timeout_s=300)


def test_a_change_through_data_in_a_callback_is_kept() -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        silence_output()
        pipe, stock = place(make(), "mps", dtype="float32", memory="phase"), make()
        before = generate(pipe)

        def change(pipe: Any, step: int, *args: Any) -> dict[str, Any]:
            if step == 0:
                pipe.unet.conv_out.bias.data.add_(0.5)  # does not increment the version counter
            return {}

        for target in (pipe, stock):
            target(**recipes()[NAME].call(), callback_on_step_end=change)
        after = generate(pipe)
        assert difference(after, before) > 1e-2
        assert difference(after, generate(stock)) < TOLERANCE

    run_forked("mps", use, timeout_s=300)


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


def test_weights_on_disk_work_in_inference_mode() -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        silence_output()
        pipe = place(make(), "mps", dtype="float32", memory="phase")
        with torch.inference_mode():
            inside = generate(pipe)  # regression: "Inference tensors do not track version counter"
        assert difference(generate(pipe), inside) < TOLERANCE

    run_forked("mps", use, timeout_s=300)


@pytest.mark.parametrize(("device", "residence"), [OFFLOADED[0], OFFLOADED[2]])
def test_a_lost_change_raises(device: str, residence: str) -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        silence_output()
        pipe = place(recipes()[NAME].make(), device, dtype="float32", memory=residence)
        before = generate(pipe)
        with torch.no_grad():
            pipe.unet.conv_in.weight.mul_(0)
        with pytest.raises(UsageError, match="weights of unet were changed"):
            generate(pipe)
        pipe.to("cpu", memory="resident")
        assert difference(generate(pipe), before) < TOLERANCE, "the original weights must be restored"
        with torch.no_grad():
            pipe.unet.conv_in.weight.mul_(0)
        changed = generate(pipe)
        assert difference(changed, before) > TOLERANCE
        assert difference(generate(place(pipe, device, memory=residence)), changed) < TOLERANCE

    run_forked(device, use, timeout_s=300)


@pytest.mark.parametrize(("device", "residence"), [OFFLOADED[0], *OFFLOADED[2:]])
def test_an_adapter_is_loaded_into_an_offloaded_pipeline(device: str, residence: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=["to_q"], init_lora_weights=False)

    def use(accelerator: VirtualAccelerator) -> None:
        silence_output()
        adapted = make()
        adapted.unet.add_adapter(config)
        weights = {f"unet.{key}": value for key, value in peft.get_peft_model_state_dict(adapted.unet).items()}
        pipe = place(recipes()[NAME].make(), device, dtype="float32", memory=residence)
        before = generate(pipe)
        pipe.load_lora_weights(weights)
        assert difference(generate(pipe), before) > TOLERANCE
        assert difference(generate(pipe), generate(adapted)) < TOLERANCE
        if residence == "phase":  # added to the model directly, without its weights
            pipe = place(recipes()[NAME].make(), device, dtype="float32", memory=residence)
            pipe.unet.add_adapter(config)
            with pytest.raises(UsageError, match="weights of unet were changed"):
                generate(pipe)

    run_forked(device, use, timeout_s=300)


def test_the_folder_of_a_killed_process_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os; from anyaccel.runtime.placement.temp_weights import *; make_weights_folder(); os._exit(9)"
    subprocess.run([sys.executable, "-c", code], env={"TMPDIR": str(tmp_path)}, check=False)
    left = next(tmp_path.iterdir())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first, lock = make_weights_folder()
    assert not left.exists()
    second, other = make_weights_folder()
    assert first.exists(), "a folder in use must not be removed"
    remove_weights_folder(first, lock)
    remove_weights_folder(second, other)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("content", ['{"key": "k", "capacity_bytes": 1e400}', "[" * 100_000, "[]", ""])
def test_a_damaged_outcome_file_is_ignored(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYACCEL_CACHE", str(tmp_path))
    path = oom_history._path("k")
    path.parent.mkdir(parents=True)
    rule = '"residence": "resident", "way": {}, "images_per_call": null'
    path.write_text(content.replace("}", f", {rule}}}"))
    assert oom_history.load_outcome("k", 1) is None
