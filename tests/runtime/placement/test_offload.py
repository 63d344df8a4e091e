"""Weights that wait elsewhere while they do not run: they can be saved, adapted, exchanged, and not lost."""

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
from tests.runtime.placement.sweeps import SAME, use_quietly

NAME = "stable-diffusion"
ELSEWHERE = [
    ("mps", "phase"),
    pytest.param("hpu", "layer", marks=pytest.mark.slow),
    pytest.param("mps", "layer", marks=pytest.mark.slow),
    pytest.param("hpu", "component", marks=pytest.mark.slow),
]


def make() -> Any:
    return recipes()[NAME].make()


def picture(pipe: Any) -> Any:
    return run(recipes()[NAME], pipe)


def off(one: Any, other: Any) -> float:
    return float(numpy.abs(one - other).max())


@pytest.mark.parametrize(("device", "residence"), ELSEWHERE)
def test_a_pipeline_whose_weights_are_elsewhere_is_a_pipeline(device: str, residence: str, tmp_path: Path) -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        use_quietly()
        pipe = place(recipes()[NAME].make(), device, dtype="float32", memory=residence)
        before = picture(pipe)

        pipe.save_pretrained(tmp_path)
        library: Any = diffusers
        loaded = library.StableDiffusionPipeline.from_pretrained(tmp_path, safety_checker=None)
        assert off(picture(loaded), before) < SAME
        assert off(picture(pipe), before) < SAME, "the pipeline that was saved"

        used = anyaccel.memory(device).used_bytes

        def fail(*args: Any) -> Any:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pipe(**recipes()[NAME].call(), callback_on_step_end=fail)
        gc.collect()
        assert anyaccel.memory(device).used_bytes == used, "what a call that was cut short fetched went back"

        other = make().unet
        with torch.no_grad():
            other.conv_out.weight.mul_(2)
        pipe.unet = other
        changed = picture(pipe)
        assert off(changed, before) > SAME, "the other model made it"
        assert off(picture(place(pipe, "cpu")), changed) < SAME
        assert all(parameter.requires_grad for parameter in pipe.unet.parameters())

    run_forked(device, use, timeout_s=300)


def test_a_change_in_a_callback_that_would_be_lost_is_refused() -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        use_quietly()
        pipe = place(make(), "mps", dtype="float32", memory="phase")
        before = picture(pipe)

        def change(pipe: Any, *given: Any) -> dict[str, Any]:
            with torch.no_grad():
                pipe.vae.decoder.conv_out.bias.add_(0.2)  # whose turn has not come
            return {}

        with pytest.raises(UsageError, match="weights of vae were changed"):
            pipe(**recipes()[NAME].call(), callback_on_step_end=change)
        assert off(picture(pipe.to("cpu", memory="resident")), before) < SAME

    run_forked("mps", use, timeout_s=300)


def test_weights_that_wait_on_disk_in_inference_mode() -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        use_quietly()
        pipe = place(make(), "mps", dtype="float32", memory="phase")
        with torch.inference_mode():
            inside = picture(pipe)  # raised: inference tensors do not track version counter
        assert off(picture(pipe), inside) < SAME

    run_forked("mps", use, timeout_s=300)


@pytest.mark.parametrize(("device", "residence"), [ELSEWHERE[0], ELSEWHERE[2]])
def test_a_change_that_would_be_lost_is_refused(device: str, residence: str) -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        use_quietly()
        pipe = place(recipes()[NAME].make(), device, dtype="float32", memory=residence)
        before = picture(pipe)
        with torch.no_grad():
            pipe.unet.conv_in.weight.mul_(0)
        with pytest.raises(UsageError, match="weights of unet were changed"):
            picture(pipe)
        pipe.to("cpu", memory="resident")
        assert off(picture(pipe), before) < SAME, "they came back as they were"
        with torch.no_grad():
            pipe.unet.conv_in.weight.mul_(0)
        changed = picture(pipe)
        assert off(changed, before) > SAME
        assert off(picture(place(pipe, device, memory=residence)), changed) < SAME

    run_forked(device, use, timeout_s=300)


@pytest.mark.parametrize(("device", "residence"), [ELSEWHERE[0], *ELSEWHERE[2:]])
def test_an_adapter_is_loaded_where_the_weights_are_elsewhere(device: str, residence: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=["to_q"], init_lora_weights=False)

    def use(accelerator: VirtualAccelerator) -> None:
        use_quietly()
        adapted = make()
        adapted.unet.add_adapter(config)
        weights = {f"unet.{key}": value for key, value in peft.get_peft_model_state_dict(adapted.unet).items()}
        pipe = place(recipes()[NAME].make(), device, dtype="float32", memory=residence)
        before = picture(pipe)
        pipe.load_lora_weights(weights)
        assert off(picture(pipe), before) > SAME
        assert off(picture(pipe), picture(adapted)) < SAME
        if residence == "phase":  # past the pipeline, to a model without weights
            pipe = place(recipes()[NAME].make(), device, dtype="float32", memory=residence)
            pipe.unet.add_adapter(config)
            with pytest.raises(UsageError, match="weights of unet were changed"):
                picture(pipe)

    run_forked(device, use, timeout_s=300)


def test_the_folder_of_a_process_that_was_killed_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os; from anyaccel.runtime.placement.temp_weights import *; make_weights_folder(); os._exit(9)"
    subprocess.run([sys.executable, "-c", code], env={"TMPDIR": str(tmp_path)}, check=False)
    left = next(tmp_path.iterdir())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first, lock = make_weights_folder()
    assert not left.exists()
    second, other = make_weights_folder()
    assert first.exists(), "one that is in use stays"
    remove_weights_folder(first, lock)
    remove_weights_folder(second, other)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("content", ['{"key": "k", "capacity_bytes": 1e400}', "[" * 100_000, "[]", ""])
def test_a_damaged_file_is_no_memory(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYACCEL_CACHE", str(tmp_path))
    path = oom_history._path("k")
    path.parent.mkdir(parents=True)
    kept = '"residence": "resident", "way": {}, "images_per_call": null'
    path.write_text(content.replace("}", f", {kept}}}"))
    assert oom_history.load_outcome("k", 1) is None
