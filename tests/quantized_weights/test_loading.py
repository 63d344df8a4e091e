"""Loading of folders with bitsandbytes weights on a machine without a GPU."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import diffusers as typed_diffusers
import numpy
import pytest
import torch

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import MissingLibraryError
from anyaccel.recipes import run
from anyaccel.upstream.diffusers_quantizers import allow_bitsandbytes_on_cpu
from tests.conftest import NEEDS_RECIPES
from tests.quantized_weights.quantizers import RECIPE

pytestmark = [
    NEEDS_RECIPES,
    pytest.mark.skipif(torch.cuda.is_available(), reason="diffusers loads bitsandbytes weights to the GPU"),
]
diffusers: Any = typed_diffusers


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flux")
    pipe: Any = RECIPE.make()
    pipe.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("options", [{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"load_in_8bit": True}])
def test_saved_bitsandbytes_weights_are_loaded_and_placed(options: dict[str, Any], saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    pipe: Any = RECIPE.make()
    with allow_bitsandbytes_on_cpu():
        pipe.transformer = diffusers.FluxTransformer2DModel.from_pretrained(
            saved,
            subfolder="transformer",
            quantization_config=diffusers.BitsAndBytesConfig(**options),
            torch_dtype=torch.float32,
        )
    pipe.save_pretrained(tmp_path)
    expected = run(RECIPE, pipe)

    def use(accelerator: VirtualAccelerator) -> tuple[Any, str]:
        loaded = anyaccel.DiffusionPipeline.from_pretrained(tmp_path, dtype="float32").to("virtual:mps")
        return run(RECIPE, loaded), str(loaded.plan.dequantized)

    image, decision = run_forked("mps", use)
    assert decision == f"transformer → {'nf4' if 'load_in_4bit' in options else 'int8'}"
    # bitsandbytes dequantizes rows that are shorter than a block wrongly on the CPU, and rounds 8-bit inputs.
    numpy.testing.assert_allclose(image, expected, atol=1.0)
    assert numpy.abs(image - run(RECIPE, RECIPE.make())).max() < 0.3


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_a_missing_library_is_reported(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "model"))
    file = folder / "transformer" / "config.json"
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))
    with pytest.raises(MissingLibraryError, match="quantized with bitsandbytes") as caught:
        anyaccel.DiffusionPipeline.from_pretrained(folder)
    assert caught.value.hint == "pip install bitsandbytes"
    assert isinstance(caught.value, ImportError)


def test_the_quantizers_of_diffusers_are_restored() -> None:
    from diffusers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    before = dict(AUTO_QUANTIZER_MAPPING)
    with allow_bitsandbytes_on_cpu():
        assert before != AUTO_QUANTIZER_MAPPING
    assert before == AUTO_QUANTIZER_MAPPING
