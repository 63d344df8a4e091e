"""Plain diffusers pipelines on virtual devices: `to`, `device_map` and offloading. tests/checking runs all recipes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, EulerDiscreteScheduler, UNet2DConditionModel

from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.limit_ledger import LedgerRow
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import LimitError
from anyaccel.recipes import recipes, run
from tests.conftest import NEEDS_RECIPES

pytestmark = NEEDS_RECIPES


@pytest.mark.parametrize("name", ["stable-diffusion-xl", "pixart-alpha", "flux-2-klein"])
def test_pipelines_validated_on_neuron_have_no_errors(name: str) -> None:
    """The pull request that added Neuron to diffusers ran these three on hardware."""

    def use(accelerator: VirtualAccelerator) -> list[LedgerRow]:
        recipe = recipes()[name]
        pipe: Any = recipe.make()
        pipe.to(accelerator.device())
        run(recipe, pipe)
        return accelerator.ledger.rows("error")

    assert run_forked("neuron", use) == []


def embed_in_float64(device: torch.device) -> torch.Tensor:
    """Compute an embedding in float64, as older diffusers did on every device."""
    exponents = torch.arange(0, 8, 2, dtype=torch.float64, device=device) / 8
    return (1.0 / 10000**exponents).float()


def draw_on_device(device: torch.device) -> torch.Tensor:
    """Draw noise on the device, as an older `randn_tensor` did without a generator."""
    return torch.randn((1, 4, 8, 8), device=device, dtype=torch.bfloat16)


def look_up_timestep(device: torch.device) -> torch.Tensor:
    """Run a scheduler step with timesteps on the device and no begin index."""
    make: Any = EulerDiscreteScheduler
    scheduler = make()
    scheduler.set_timesteps(2, device=device)
    sample = torch.ones(1, 4, 8, 8).to(device)
    stepped: torch.Tensor = scheduler.step(sample, scheduler.timesteps[0], sample).prev_sample
    return stepped


@pytest.mark.parametrize(
    ("program", "limit"),
    [
        (embed_in_float64, "dtypes.float64"),
        (draw_on_device, "random_numbers"),
        (look_up_timestep, "data_dependent_shapes"),
    ],
)
def test_code_that_failed_on_neuron_fails_on_the_virtual_device(program: object, limit: str) -> None:
    assert callable(program)

    def use(accelerator: VirtualAccelerator) -> set[str]:
        program(accelerator.device())
        return {row.limit for row in accelerator.ledger.rows("error")}

    assert limit in run_forked("neuron", use)
    with pytest.raises(LimitError, match=limit):
        run_forked("neuron", use, strict=True)


def test_diffusers_gaudi_code_path_runs() -> None:
    """`.to("hpu")` sets PT_HPU_GPU_MIGRATION, imports habana_frameworks.torch and checks the device."""

    def use(accelerator: VirtualAccelerator) -> tuple[str, str, str]:
        import os

        import habana_frameworks.torch as vendor  # type: ignore[import-not-found]

        recipe = recipes()["flux"]
        pipe: Any = recipe.make()
        pipe.to("hpu")
        run(recipe, pipe)
        return (
            os.environ["PT_HPU_GPU_MIGRATION"],
            os.environ["PT_HPU_MAX_COMPOUND_OP_SIZE"],
            vendor.hpu.get_device_name(),
        )

    assert run_forked("hpu", use) == ("1", "1", "virtual Intel Gaudi (HPU)")


@pytest.mark.parametrize("device", ["hpu", "neuron"])
def test_diffusers_device_map_and_offloading(device: str, tmp_path: Path) -> None:
    """Loading with `device_map`, model offloading and sequential offloading."""

    def use(accelerator: VirtualAccelerator) -> tuple[str, list[float]]:
        recipe = recipes()["stable-diffusion"]
        pipe: Any = recipe.make()
        expected = run(recipe, pipe)
        pipe.save_pretrained(tmp_path)
        load: Any = DiffusionPipeline.from_pretrained
        load_unet: Any = UNet2DConditionModel.from_pretrained
        unet = load_unet(tmp_path / "unet", device_map={"": accelerator.name})
        loaded = load(tmp_path, unet=unet, safety_checker=None)
        offloaded = [load(tmp_path, safety_checker=None) for _ in range(2)]
        offloaded[0].enable_model_cpu_offload(device=accelerator.name)
        offloaded[1].enable_sequential_cpu_offload(device=accelerator.name)
        loaded.to(accelerator.device())
        images = [run(recipe, pipe) for pipe in (loaded, *offloaded)]
        return str(unet.device), [float(abs(image - expected).max()) for image in images]

    unet_device, differences = run_forked(device, use)
    assert unet_device == f"{device}:0"
    assert max(differences) < 1e-4
