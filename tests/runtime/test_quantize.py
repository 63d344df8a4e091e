"""Products in 8 bits: which layers, what is refused afterwards, and a word where it cannot be done.

That a picture is made so is tried on the device itself, by `python -m benchmarks.speed cuda`.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anyaccel.errors import UsageError
from anyaccel.planning.decision import Decision
from anyaccel.recipes import recipes, run
from anyaccel.runtime.pipeline import place
from anyaccel.runtime.placement import find_placement
from anyaccel.runtime.quantize import gains, has_torchao, is_quantized


@pytest.mark.parametrize(
    ("name", "inside", "outside", "expected"),
    [
        ("transformer_blocks.0.ff.net.0.proj", 3072, 12288, True),
        ("blocks.0.attn.to_q", 1280, 1280, False),
        ("transformer_blocks.0.norm1.linear", 3072, 18432, False),
        ("time_text_embed.timestep_embedder.linear_2", 3072, 3072, False),
        ("single_transformer_blocks.0.proj_out", 15360, 3072, True),
        ("blocks.0.to_q", 3072, 3075, False),
    ],
)
def test_which_layers_gain(name: str, inside: int, outside: int, expected: bool) -> None:
    assert gains(torch.nn.Linear(inside, outside, device="meta"), name) is expected
    assert not gains(torch.nn.Conv2d(4, 4, 3), name)


@pytest.fixture
def pipe() -> Any:
    return place(recipes()["stable-diffusion"].make(), "cpu", dtype="float32")


@pytest.mark.skipif(has_torchao(), reason="torchao is there, and says other words")
def test_where_it_cannot_be_done_the_plan_says_so(pipe: Any) -> None:
    placement = find_placement(pipe)
    assert placement is not None
    placement.plan = replace(placement.plan, quantized=Decision("float8", "for the test"))
    run(recipes()["stable-diffusion"], pipe)
    assert pipe.plan.quantized.value == ""
    assert "torchao" in pipe.plan.quantized.reason
    assert not is_quantized(pipe.unet)
    assert importlib.util.find_spec("torchao") is None


@pytest.mark.parametrize("what", ["save", "lora", "dtype"])
def test_what_needs_the_weights_as_they_were_is_refused(pipe: Any, what: str, tmp_path: Path) -> None:
    vars(pipe.unet)["_anyaccel_quantized"] = "float8"
    asked = {
        "save": lambda: pipe.save_pretrained(tmp_path),
        "lora": lambda: pipe.load_lora_weights(tmp_path),
        "dtype": lambda: pipe.to("cpu", dtype="bfloat16"),
    }
    with pytest.raises(UsageError, match="needs the weights of unet as they were") as caught:
        asked[what]()
    assert "load the pipeline again" in (caught.value.hint or "")
