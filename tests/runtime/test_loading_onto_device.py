"""Loading onto a device: the same pipeline as stock diffusers, component by component."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.quantized_weights.replace_layers import list_formats
from anyaccel.recipes import recipes
from anyaccel.runtime.weight_files import moving
from anyaccel.upstream.diffusers_internals import read_dtype_argument
from tests.conftest import NEEDS_RECIPES
from tests.quantized_weights.quantizers import MODELS

pytestmark = [NEEDS_RECIPES, pytest.mark.filterwarnings("ignore::FutureWarning")]
LIBRARY: Any = diffusers
DTYPE = read_dtype_argument()


def save(name: str, folder: Path, **options: Any) -> Path:
    pipe: Any = recipes()[name].make()
    pipe.save_pretrained(folder, **options)
    return folder


def read_tensors(pipe: Any) -> dict[str, torch.Tensor]:
    models = {name: model for name, model in pipe.components.items() if isinstance(model, torch.nn.Module)}
    found: dict[str, torch.Tensor] = {}
    for name, model in models.items():
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        found |= {f"{name}.{key}": tensor for key, tensor in named}
    return found


def read_config(pipe: Any) -> dict[str, Any]:
    return {name: value for name, value in pipe.config.items() if name != "_name_or_path"}


def assert_same(ours: Any, stock: Any, device: str) -> None:
    assert read_config(ours) == read_config(stock)
    expected = read_tensors(stock)
    tensors = read_tensors(ours)
    assert list(tensors) == list(expected)
    for name, tensor in tensors.items():
        assert tensor.device.type == device, name
        assert (tensor.dtype, tensor.stride()) == (expected[name].dtype, expected[name].stride()), name
        assert tensor.requires_grad == expected[name].requires_grad, name
        assert torch.equal(tensor.cpu(), expected[name].cpu()), name
    for name, component in stock.components.items():
        assert type(ours.components[name]) is type(component)


@pytest.mark.parametrize("device", ["npu", "cpu"])
@pytest.mark.parametrize("name", ["stable-diffusion", "stable-diffusion-xl", "flux", "wan", "stable-diffusion-3",
                                  "sana", "pixart-alpha"])  # fmt: skip
def test_same_as_stock(name: str, device: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path)

    def use(_: VirtualAccelerator) -> None:
        stock = LIBRARY.DiffusionPipeline.from_pretrained(folder, **{DTYPE: torch.bfloat16})
        pipe = anyaccel.DiffusionPipeline.from_pretrained(folder, device=device, dtype="bfloat16")
        assert pipe.plan.device.startswith(device)
        if device != "cpu":  # this device stores int64 as int32
            stock = anyaccel.place(stock, device)
        assert_same(pipe, stock, device)

    run_forked("npu", use)


def test_components_move_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each component is on the device before the next one is loaded."""
    folder = save("stable-diffusion-xl", tmp_path)
    devices: list[str] = []
    move = moving.ComponentMover.move

    def record(self: Any, name: str, component: Any, *args: Any) -> None:
        move(self, name, component, *args)
        if isinstance(component, torch.nn.Module):
            devices.append(next(component.parameters()).device.type)

    monkeypatch.setattr(moving.ComponentMover, "move", record)

    def use(_: VirtualAccelerator) -> list[str]:
        anyaccel.DiffusionPipeline.from_pretrained(folder, device="npu", dtype="bfloat16")
        return devices

    assert run_forked("npu", use) == ["npu"] * 4


def test_components_that_do_not_fit_stay_on_the_host(tmp_path: Path) -> None:
    folder = save("stable-diffusion", tmp_path)

    def use(_: VirtualAccelerator) -> None:
        pipe = anyaccel.DiffusionPipeline.from_pretrained(folder, device="npu", dtype="bfloat16")
        assert pipe.plan.memory_in_use.value.residence != "resident"
        assert {tensor.device.type for tensor in read_tensors(pipe).values()} == {"cpu"}

    run_forked("npu", use, memory="256KiB")


def test_options_of_the_placement(tmp_path: Path) -> None:
    folder = save("stable-diffusion", tmp_path)
    scheduler = LIBRARY.EulerDiscreteScheduler()

    def use(_: VirtualAccelerator) -> None:
        pipe = anyaccel.DiffusionPipeline.from_pretrained(
            folder, device="npu", memory="component", scheduler=scheduler, safety_checker=None
        )
        assert pipe.plan.memory_in_use.value.residence == "component"
        assert pipe.scheduler is scheduler
        assert pipe.safety_checker is None
        assert pipe.dtype == torch.bfloat16 if pipe.plan.dtype.value == "bfloat16" else torch.float16

    run_forked("npu", use)


def test_denoisers_are_quantized_before_they_are_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device never holds the whole weights in their dtype."""
    MODELS["FLUX"].make().save_pretrained(tmp_path)
    found: list[tuple[str, str, bool]] = []
    move = moving.ComponentMover.move

    def record(self: Any, name: str, component: Any, *args: Any) -> None:
        move(self, name, component, *args)
        if isinstance(component, torch.nn.Module):
            found.append((name, next(component.parameters()).device.type, bool(list_formats(component))))

    monkeypatch.setattr(moving.ComponentMover, "move", record)

    def use(_: VirtualAccelerator) -> None:
        anyaccel.reset_peak_memory("npu")
        pipe = anyaccel.DiffusionPipeline.from_pretrained(tmp_path, device="npu", dtype="bfloat16", weights="int8")
        assert {name: (device, quantized) for name, device, quantized in found} == {
            "transformer": ("npu", True), "text_encoder": ("cpu", False), "text_encoder_2": ("cpu", False),
            "vae": ("cpu", False),
        }  # fmt: skip
        # Rounding to whole blocks of memory.
        assert anyaccel.max_memory("npu") <= 1.05 * anyaccel.memory("npu").used_bytes
        expected = anyaccel.place(
            anyaccel.DiffusionPipeline.from_pretrained(tmp_path, dtype="bfloat16"), "npu", weights="int8"
        )
        assert_same(pipe, expected, "npu")
        assert pipe.plan.weights == expected.plan.weights

    run_forked("npu", use)


def test_a_pipeline_on_the_device_can_be_quantized(tmp_path: Path) -> None:
    folder = save("flux", tmp_path)

    def use(_: VirtualAccelerator) -> None:
        pipe = anyaccel.DiffusionPipeline.from_pretrained(folder, device="npu", dtype="bfloat16")
        expected = anyaccel.DiffusionPipeline.from_pretrained(folder, device="npu", dtype="bfloat16", weights="nf4")
        used = anyaccel.memory("npu").used_bytes
        assert_same(pipe.to("npu", weights="nf4"), expected, "npu")
        assert anyaccel.memory("npu").used_bytes < used

    run_forked("npu", use)
