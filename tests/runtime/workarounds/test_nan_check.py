"""NaN check: an image with NaN or Inf is never returned as a success."""

import logging
from typing import Any

import diffusers
import numpy
import pytest
import torch

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import NotFiniteError
from anyaccel.recipes import recipes
from tests.conftest import NEEDS_RECIPES

pytestmark = NEEDS_RECIPES
CALL: dict[str, Any] = {"num_inference_steps": 3, "height": 16, "width": 16, "output_type": "np", "seed": 1}


def make(device: str, dtype: str = "fp16", **options: Any) -> Any:
    pipe = anyaccel.place(recipes()["stable-diffusion"].make(), device, dtype=dtype, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def overflow(pipe: Any) -> None:
    """Make the decoder overflow in float16 but not in float32."""
    with torch.no_grad():
        pipe.vae.decoder.conv_in.weight.mul_(3e4)
        pipe.vae.decoder.conv_in.bias.mul_(3e4)


def test_overflowing_autoencoder_reruns_in_float32() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[Any, ...]:
        pipe = make("neuron")
        overflow(pipe)
        first, second = pipe("a fox", **CALL).images, pipe("a fox", **CALL).images
        return first, second, *vars(pipe.plan.report.float32_models).values(), str(pipe.unet.dtype)

    first, second, dtypes, reason, unet = run_forked("neuron", use)
    assert numpy.isfinite(first).all()
    assert first.std() > 0
    assert numpy.array_equal(first, second)
    assert dtypes == ("vae",)
    assert "vae produced NaN or Inf in float16 (vae.decoder.conv_in at forward pass 1)" in reason
    assert unet == "torch.float16"


def test_error_names_the_first_module_and_the_pass() -> None:
    """A hook makes the second pass return NaN."""

    def use(accelerator: VirtualAccelerator) -> str:
        pipe = make("mps", "fp32")
        passes: list[int] = []

        def spoil(module: Any, args: Any, output: Any) -> Any:
            passes.append(1)
            return output * float("nan") if len(passes) % 4 in (2, 3, 0) else output

        pipe.unet.mid_block.resnets[0].conv1.register_forward_hook(spoil)
        with pytest.raises(NotFiniteError) as caught:
            pipe("a fox", **CALL)
        return str(caught.value)

    message = run_forked("mps", use)
    assert "unet.mid_block.resnets.0.conv1 at forward pass 2" in message
    assert "hint:" in message


def test_pipeline_is_unchanged_after_a_failure() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[Any, Any, str]:
        pipe = make("hpu")
        expected = pipe("a fox", **CALL).images
        weight = pipe.unet.conv_in.weight.detach().clone()
        with torch.no_grad():
            pipe.unet.conv_in.weight.fill_(float("nan"))
        with pytest.raises(NotFiniteError):
            pipe("a fox", **CALL)
        with torch.no_grad():
            pipe.unet.conv_in.weight.copy_(weight)
        return expected, pipe("a fox", **CALL).images, str(pipe.unet.dtype)

    expected, actual, dtype = run_forked("hpu", use)
    assert numpy.array_equal(expected, actual)
    assert dtype == "torch.float16"


def test_generator_of_the_caller_is_rewound_for_the_rerun() -> None:
    """The rerun in float32 starts from the same noise."""
    call = {name: value for name, value in CALL.items() if name != "seed"}

    def use(accelerator: VirtualAccelerator) -> tuple[Any, Any]:
        pipe = make("neuron")
        overflow(pipe)
        rerun = pipe("a fox", generator=torch.Generator().manual_seed(5), **call).images
        return rerun, pipe("a fox", generator=torch.Generator().manual_seed(5), **call).images

    rerun, again = run_forked("neuron", use)
    assert numpy.array_equal(rerun, again)


def test_outputs_are_checked_once_after_the_last_step() -> None:
    def use(accelerator: VirtualAccelerator) -> list[Any]:
        pipe = make("neuron", "fp32")
        accelerator.ledger.clear()
        pipe("a fox", **{**CALL, "output_type": "latent"})
        return [row for row in accelerator.ledger.rows() if row.limit == "host_round_trip"]

    rows = run_forked("neuron", use)
    assert [row.count for row in rows] == [1]
    assert rows[0].step is None


def test_check_can_be_disabled() -> None:
    def use(accelerator: VirtualAccelerator) -> bool:
        pipe = make("neuron", check_finite=False)
        overflow(pipe)
        return bool(numpy.isfinite(pipe("a fox", **CALL).images).all())

    assert not run_forked("neuron", use)


def test_images_replaced_by_the_safety_checker_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    pipe = make("cpu", "fp32")

    def blacken(image: Any, *args: Any) -> tuple[Any, list[bool]]:
        return torch.zeros_like(image), [True] * image.shape[0]

    pipe.run_safety_checker = blacken
    with caplog.at_level(logging.WARNING, logger="anyaccel"):
        result = pipe("a fox", **CALL)
    assert result.blackened == [True]
    assert "the safety checker replaced 1 of 1 images" in caplog.text


@pytest.mark.parametrize("how", ["hook", "callback"])
def test_nan_that_the_user_replaces_is_not_an_error(how: str) -> None:
    pipe = anyaccel.place(recipes()["stable-diffusion"].make(), "cpu", dtype="float32")
    with torch.no_grad():
        pipe.unet.conv_out.bias.fill_(float("nan"))
    steps: list[int] = []

    def repair(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        steps.append(step)
        return {"latents": torch.nan_to_num(tensors["latents"], nan=0.1)}

    arguments = recipes()["stable-diffusion"].call()
    if how == "callback":
        arguments["callback_on_step_end"] = repair
    else:
        pipe.unet.register_forward_hook(lambda module, args, output: (torch.nan_to_num(output[0], nan=0.1),))
    assert numpy.isfinite(pipe(**arguments).images).all()
    assert steps == (list(range(len(pipe.scheduler.timesteps))) if how == "callback" else [])


def test_infinity_that_the_pipeline_writes_into_an_output_is_not_an_error() -> None:
    library: Any = diffusers

    class Masked(library.StableDiffusionPipeline):  # type: ignore[misc]
        runs = 0

        def __call__(self, **kwargs: Any) -> Any:
            Masked.runs += 1
            logits = self.unet(torch.ones(1, 4, 8, 8), 1, torch.ones(1, 7, self.unet.config.cross_attention_dim)).sample
            return logits.masked_fill_(torch.eye(8, dtype=torch.bool), float("-inf")).softmax(-1)

    stock: Any = recipes()["stable-diffusion"].make()
    pipe: Any = Masked(**stock.components)
    expected = pipe()
    placed: Any = anyaccel.place(pipe, "cpu", dtype="float32")
    assert torch.equal(placed(), expected)
    assert Masked.runs == 2
