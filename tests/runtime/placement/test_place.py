"""`pipe.to(…)`: the device, the environment variables of the vendor, and the plan."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import anyaccel
from anyaccel.backends.device import OpenDevice
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import DeviceUnavailableError, UsageError
from anyaccel.recipes import recipes, run
from anyaccel.runtime.placement import place
from tests.conftest import NEEDS_RECIPES

pytestmark = NEEDS_RECIPES


def make(device: Any = None, **options: Any) -> Any:
    pipe = recipes()["stable-diffusion"].make()
    return pipe if device is None else anyaccel.place(pipe, device, **options)


def test_to_accepts_every_spelling_of_a_device() -> None:
    def use(accelerator: VirtualAccelerator) -> list[str]:
        import torch_neuronx  # type: ignore[import-not-found]

        assert torch_neuronx
        current = torch.get_device_module("neuron").current_device()
        spellings = ["neuron", "neuron:1", torch.device("neuron", 1), 1, "auto", "virtual:neuron", current]
        spellings += ["virtual:neuron:1", "trainium:1", anyaccel.open_device("neuron:1")]
        pipe = make("cpu", dtype="fp32")
        return [pipe.to(spelling).plan.device for spelling in spellings] + [pipe.to("cpu").plan.device]

    devices = run_forked("neuron", use, count=2)
    first, second = "neuron:0", "neuron:1"
    assert devices == [first, second, second, second, first, first, first, second, second, second, "cpu:0"]


def test_a_number_after_a_virtual_device_is_an_index() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[str, str]:
        with pytest.raises(DeviceUnavailableError, match=r"neuron:4 is not available: .* has only 4") as caught:
            make("virtual:neuron:4")
        return make("virtual:neuron:3").plan.device, caught.value.hint

    assert run_forked("neuron", use, count=4) == ("neuron:3", "use neuron:3 or lower")
    with pytest.raises(UsageError, match=r"index 3 in .* is out of range: the device count is 1") as caught:
        make("virtual:neuron:3")
    assert caught.value.hint == "use virtual:neuron,count=3 to create 3 devices, then select the last one with neuron:2"


def read_dtypes(pipe: Any) -> dict[str, str]:
    names = ("unet", "vae", "text_encoder")
    return {name: str(getattr(pipe, name).dtype).removeprefix("torch.") for name in names}


def test_models_loaded_in_different_dtypes_keep_them(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    for dtypes in ({"unet": torch.bfloat16}, {"text_encoder": torch.bfloat16}):
        expected = {"unet": "float32", "vae": "float32", "text_encoder": "float32", next(iter(dtypes)): "bfloat16"}
        load = {**dtypes, "default": torch.float32}
        pipe = anyaccel.DiffusionPipeline.from_pretrained(tmp_path, dtype=load).to("cpu")
        assert read_dtypes(pipe) == expected
        assert run_forked("neuron", lambda _, pipe=pipe: read_dtypes(pipe.to("neuron"))) == expected  # type: ignore[misc]
        assert set(read_dtypes(pipe.to("cpu", dtype="float32")).values()) == {"float32"}
    by_hand = make()
    by_hand.vae.to(torch.bfloat16)
    assert read_dtypes(anyaccel.place(by_hand, "cpu")) == {
        "unet": "float32",
        "vae": "bfloat16",
        "text_encoder": "float32",
    }
    assert "different dtypes" in str(by_hand.plan)


def test_generate_opens_its_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []

    def record(spec: Any) -> OpenDevice:
        opened.append(spec)
        return anyaccel.open_device(spec)

    monkeypatch.setattr(place, "open_device", record)
    anyaccel.generate("a red apple", device="cpu", seed=7, num_inference_steps=1)
    assert [str(spec) for spec in opened] == ["cpu"]


def test_the_plan_of_a_virtual_device_says_virtual() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[bool, str]:
        pipe = make("hpu")
        return pipe.plan.virtual, str(pipe.plan)

    is_virtual, printed = run_forked("hpu", use)
    assert is_virtual
    assert printed.splitlines()[0] == "StableDiffusionPipeline on hpu:0: Intel Gaudi (HPU) (virtual)"
    for word in ("bfloat16", "eager", "cpu"):
        assert word in printed


@pytest.mark.parametrize("options", [{}, {"hpu_migration": False}, {"sdp_on_bf16": False}, {"dtype": "fp32"}])
def test_gaudi_environment_variables(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """`PT_HPU_*` are set for the process; GPU migration and bfloat16 attention can be disabled."""
    for name in ("PT_HPU_GPU_MIGRATION", "PT_HPU_MAX_COMPOUND_OP_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def use(accelerator: VirtualAccelerator) -> tuple[Any, Any, bool]:
        enabled: list[bool] = []
        torch._C._set_math_sdp_allow_fp16_bf16_reduction = enabled.append  # type: ignore[assignment]
        pipe = make("hpu", **options)
        run(recipes()["stable-diffusion"], pipe)
        migration, size = (os.environ.get(f"PT_HPU_{name}") for name in ("GPU_MIGRATION", "MAX_COMPOUND_OP_SIZE"))
        assert pipe.plan.bf16_attention.value == bool(enabled)
        return migration, size, bool(enabled)

    no_migration = options.get("hpu_migration") is False
    in_bf16 = options.get("sdp_on_bf16", True) and "dtype" not in options
    assert run_forked("hpu", use) == (None if no_migration else "1", "1", in_bf16)


@pytest.mark.parametrize(("mode", "value"), [(None, None), ("eager", "0"), ("lazy", "1")])
def test_gaudi_modes(mode: str | None, value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PT_HPU_LAZY_MODE", raising=False)

    def use(accelerator: VirtualAccelerator) -> tuple[str, Any, list[str]]:
        import habana_frameworks.torch as vendor  # type: ignore[import-not-found]

        captured: list[str] = []

        def capture(module: Any) -> Any:
            captured.append(type(module).__name__)
            return module

        vendor.hpu.wrap_in_hpu_graph = capture
        pipe = make("hpu", dtype="fp32", mode=mode)
        run(recipes()["stable-diffusion"], pipe)
        return pipe.plan.mode.value, os.environ.get("PT_HPU_LAZY_MODE"), captured

    graphs = ["UNet2DConditionModel"] if mode == "lazy" else []
    assert run_forked("hpu", use) == (mode or "eager", value, graphs)


def test_the_mode_cannot_change_after_the_vendor_module_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")

    def use(accelerator: VirtualAccelerator) -> None:
        make("hpu", mode="lazy")

    with pytest.raises(anyaccel.AnyaccelError, match="was already imported with PT_HPU_LAZY_MODE=0"):
        run_forked("hpu", use)


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        ("mps", {}, "mps is not available"),
        ("nonsense", {}, "unknown device 'nonsense'"),
        (3.5, {}, "unknown device '3.5'"),
        ("cpu", {"dtype": "fp99"}, "unknown dtype 'fp99'"),
        ("cpu", {"attention_slice": 1}, "did you mean attention_slicing"),
        ("cpu", {"attention_slicing": "some"}, "attention_slicing must be"),
        ("cpu", {"images_per_call": 0}, "must be a positive integer"),
        ("cpu", {"mode": "lazy"}, "supports only mode='eager'"),
        ("cpu", {"scheduler": "moon"}, "scheduler must be"),
        ("virtual:nothing", {}, "nothing"),
    ],
)
def test_a_rejected_placement_leaves_the_pipeline_usable(device: Any, options: dict[str, Any], message: str) -> None:
    recipe = recipes()["stable-diffusion"]
    pipe = make()
    expected = run(recipe, pipe)
    with pytest.raises(anyaccel.AnyaccelError, match=message):
        anyaccel.place(pipe, device, **options)
    assert abs(expected - run(recipe, pipe)).max() < 1e-5


@pytest.mark.long
@pytest.mark.parametrize(
    ("device", "method"),
    [
        ("neuron", "enable_model_cpu_offload"),
        ("mps", "enable_sequential_cpu_offload"),
        pytest.param("mps", "enable_model_cpu_offload", marks=pytest.mark.slow),
        pytest.param("neuron", "enable_sequential_cpu_offload", marks=pytest.mark.slow),
    ],
)
def test_the_offload_methods_of_diffusers(device: str, method: str) -> None:
    recipe = recipes()["stable-diffusion"]
    expected = run(recipe, recipe.make())

    def use(accelerator: VirtualAccelerator) -> tuple[str, list[float], list[Any]]:
        pipe = make("cpu", dtype="fp32")
        getattr(pipe, method)(device=device)
        differences = [float(abs(expected - run(recipe, pipe)).max()) for _ in range(2)]
        rows = [row for row in accelerator.ledger.rows() if row.effect in ("error", "wrong")]
        return pipe.plan.device, differences, rows

    planned_device, differences, rows = run_forked(device, use, strict=True)
    assert planned_device == f"{device}:0"
    assert max(differences) < 1e-3
    assert rows == []


def test_a_pipeline_moves_between_device_and_cpu_repeatedly() -> None:
    recipe = recipes()["stable-diffusion"]
    expected = run(recipe, recipe.make())

    def use(accelerator: VirtualAccelerator) -> list[float]:
        pipe, differences = make("neuron", dtype="fp32"), []
        for device in ("neuron", "cpu", "neuron", "cpu"):
            pipe.to(device)
            differences.append(float(abs(expected - run(recipe, pipe)).max()))
        return differences

    assert max(run_forked("neuron", use)) < 1e-3
