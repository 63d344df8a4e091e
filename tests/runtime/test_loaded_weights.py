"""Loading onto a device gives the weights of stock diffusers, bit for bit, from every kind of file."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.recipes import recipes
from anyaccel.upstream.diffusers_internals import read_dtype_argument
from tests.conftest import NEEDS_RECIPES
from tests.runtime.ldm_checkpoint import write_checkpoint
from tests.runtime.test_loading_onto_device import assert_same, save

pytestmark = [NEEDS_RECIPES, pytest.mark.filterwarnings("ignore::FutureWarning")]
LIBRARY: Any = diffusers
DTYPE = read_dtype_argument()


def assert_same_weights(folder: Path, dtype: Any, **options: Any) -> Any:
    """Load a folder onto a virtual device and compare it with stock diffusers; return a weight of the UNet."""

    def use(_: VirtualAccelerator) -> Any:
        stock = LIBRARY.DiffusionPipeline.from_pretrained(folder, **{DTYPE: dtype}, **options)
        pipe = anyaccel.DiffusionPipeline.from_pretrained(folder, device="npu", dtype=dtype, **options)
        # Buffers with integers are int32 on devices that store them so.
        stock = anyaccel.place(stock, "npu", keep_dtypes=True)
        assert_same(pipe, stock, "npu")
        return pipe.unet.conv_in.weight.detach().cpu()

    return run_forked("npu", use)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_shards(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save("stable-diffusion", tmp_path, max_shard_size="100KB")
    assert len(list((folder / "unet").glob("*-of-*.safetensors"))) > 1
    assert_same_weights(folder, dtype)


@pytest.mark.parametrize("sharded", [False, True])
def test_variant(sharded: bool, tmp_path: Path) -> None:
    """The folder has other weights without the variant."""
    save("stable-diffusion", tmp_path)
    other: Any = recipes()["stable-diffusion"].make()
    with torch.no_grad():
        for model in (other.unet, other.vae, other.text_encoder):
            for parameter in model.half().parameters():
                parameter.mul_(2)
    other.save_pretrained(tmp_path, variant="fp16", **({"max_shard_size": "100KB"} if sharded else {}))
    expected = other.unet.conv_in.weight
    assert torch.equal(assert_same_weights(tmp_path, torch.float16, variant="fp16"), expected)
    assert not torch.equal(assert_same_weights(tmp_path, torch.float16), expected)


def save_mixed(folder: Path) -> None:
    """Write a pipeline whose components and layers have different dtypes."""
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.unet.to(torch.float16)
    pipe.unet.conv_out.to(torch.float32)
    pipe.text_encoder.to(torch.bfloat16)
    pipe.save_pretrained(folder)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float32, {"vae": torch.float32, "default": torch.bfloat16}],
    ids=["bfloat16", "float32", "by component"],
)
def test_mixed_dtypes(dtype: Any, tmp_path: Path) -> None:
    save_mixed(tmp_path)
    assert_same_weights(tmp_path, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_single_file(dtype: torch.dtype, tmp_path: Path) -> None:
    pipe: Any = recipes()["stable-diffusion"].make()
    folder, file = tmp_path / "model", tmp_path / "model.safetensors"
    pipe.save_pretrained(folder)
    with torch.no_grad():
        pipe.unet.conv_in.weight.mul_(2)
    write_checkpoint(pipe, file)
    options = {"config": str(folder), "safety_checker": None}
    stock = LIBRARY.StableDiffusionPipeline.from_single_file(str(file), **{DTYPE: dtype}, **options)
    assert torch.equal(stock.unet.conv_in.weight, pipe.unet.conv_in.weight.to(dtype))

    def use(_: VirtualAccelerator) -> None:
        loaded = anyaccel.DiffusionPipeline.from_single_file(file, device="npu", dtype=dtype, **options)
        assert_same(loaded, anyaccel.place(stock, "npu", keep_dtypes=True), "npu")

    run_forked("npu", use)
