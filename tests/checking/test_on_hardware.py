"""`anyaccel check --real`: a model that is silently wrong on a device is found, and named."""

from typing import Any

import pytest
import torch

from anyaccel.checking.on_hardware import HardwareReport, check_on_hardware, describe_hardware_report
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.recipes import recipes
from tests.conftest import NEEDS_RECIPES

pytestmark = NEEDS_RECIPES


def check_spoilt(spoil: Any) -> HardwareReport:
    """Stable Diffusion on a virtual device whose kernel for the U-Net's last convolution is spoilt."""

    def use(accelerator: VirtualAccelerator) -> HardwareReport:
        pipe: Any = recipes()["stable-diffusion"].make()

        def hook(module: torch.nn.Module, given: Any, made: torch.Tensor) -> torch.Tensor:
            return made if made.device.type == "cpu" else spoil(made)

        pipe.unet.conv_out.register_forward_hook(hook)
        return check_on_hardware(pipe, "hpu", dtype="float32", num_inference_steps=3, height=16, width=16)

    return run_forked("hpu", use)


def test_a_model_that_is_right_is_right() -> None:
    report = check_spoilt(lambda made: made)
    assert report.right
    assert report.virtual
    assert {part.name: part.calls for part in report.parts} == {"text_encoder": 2, "unet": 4, "vae.decode": 1}
    assert all(part.alone is not None and part.alone < 1e-4 for part in report.parts)


def test_the_model_that_is_wrong_is_named_and_those_after_it_are_not() -> None:
    report = check_spoilt(lambda made: made * 1.05)
    assert not report.right
    assert [part.name for part in report.parts if part.wrong] == ["unet"]
    unet = next(part for part in report.parts if part.name == "unet")
    assert unet.alone == pytest.approx(0.05, rel=0.01)
    assert unet.along[0] is not None
    decode = next(part for part in report.parts if part.name == "vae.decode")
    assert decode.alone is not None
    assert decode.alone < 1e-4  # with the CPU's latents it is right
    assert any("unet is the first that is wrong" in line for line in describe_hardware_report(report))


def test_what_is_not_a_number_is_wrong() -> None:
    report = check_spoilt(lambda made: made * float("nan"))
    assert not report.right
    assert report.max_difference is None
    assert not next(part for part in report.parts if part.name == "unet").finite
