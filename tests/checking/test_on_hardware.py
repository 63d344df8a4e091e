"""`anyaccel check --real`: a model with silently wrong outputs on a device is reported."""

from typing import Any

import pytest
import torch

from anyaccel.checking.on_hardware import HardwareReport, check_on_hardware, describe_hardware_report
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.recipes import recipes
from tests.conftest import NEEDS_RECIPES

pytestmark = NEEDS_RECIPES


def check_with(change: Any) -> HardwareReport:
    """Check Stable Diffusion on a virtual device that changes the output of the last UNet convolution."""

    def use(accelerator: VirtualAccelerator) -> HardwareReport:
        pipe: Any = recipes()["stable-diffusion"].make()

        def hook(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output if output.device.type == "cpu" else change(output)

        pipe.unet.conv_out.register_forward_hook(hook)
        return check_on_hardware(pipe, "hpu", dtype="float32", num_inference_steps=3, height=16, width=16)

    return run_forked("hpu", use)


def test_an_unchanged_model_is_right() -> None:
    report = check_with(lambda output: output)
    assert report.right
    assert report.virtual
    document = report.as_dict()
    assert (document["subject"], document["allowed"]) == (report.target, report.tolerance), "the JSON keys are stable"
    assert {"alone", "along"} <= set(document["parts"][0])
    assert {result.name: result.calls for result in report.components} == {
        "text_encoder": 2,
        "unet": 4,
        "vae.decode": 1,
    }
    assert all(result.isolated_error is not None and result.isolated_error < 1e-4 for result in report.components)


def test_half_precision_gets_the_noise_of_float32() -> None:
    """On x86_64, torch draws different values in half precision from the same generator."""

    def use(accelerator: VirtualAccelerator) -> HardwareReport:
        pipe: Any = recipes()["stable-diffusion"].make()
        return check_on_hardware(pipe, "hpu", dtype="bfloat16", num_inference_steps=3, height=16, width=16)

    report = run_forked("hpu", use)
    assert report.right
    assert report.psnr_db is not None
    assert report.psnr_db > 30
    unet = next(result for result in report.components if result.name == "unet")
    assert max(error for error in unet.accumulated_error if error is not None) < 0.3


def test_only_the_wrong_model_is_reported() -> None:
    report = check_with(lambda output: output * 1.05)
    assert not report.right
    assert [result.name for result in report.components if result.wrong] == ["unet"]
    unet = next(result for result in report.components if result.name == "unet")
    assert unet.isolated_error == pytest.approx(0.05, rel=0.01)
    assert unet.accumulated_error[0] is not None
    decode = next(result for result in report.components if result.name == "vae.decode")
    assert decode.isolated_error is not None
    assert decode.isolated_error < 1e-4  # correct for the CPU's latents
    assert any("unet is the first component that is wrong" in line for line in describe_hardware_report(report))


def test_nan_is_wrong() -> None:
    report = check_with(lambda output: output * float("nan"))
    assert not report.right
    assert report.max_difference is None
    assert not next(result for result in report.components if result.name == "unet").finite
