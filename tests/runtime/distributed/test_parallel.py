"""One model over two ranks, a process each: the picture of one rank, on the CPU and on virtual devices."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anyaccel import place
from anyaccel.errors import UsageError
from anyaccel.recipes import recipes
from tests.conftest import ROOT

CLOSE = 1e-4
HALF = 2
ON_EVERY_DEVICE = ["flux context", "wan context", "guidance", "no seed"]
MORE = {
    "cpu": [
        "uneven context", "two experts", "auto flux", "auto unet", "tensor refused", "no tensor plan",
        "no context plan", "wrong count", "rows that see one another", "other seeds", "placed twice", "masks of heads",
        "attention of a batch", "reference tokens",
    ],
    "virtual:neuron,count=2,strict": ["flux tensor", "no tensor plan"],
    "virtual:hpu,count=2,strict": ["tensor refused", "one model at a time"],
    "virtual:xpu,count=2,strict": ["flux tensor"],
}  # fmt: skip


def run_ranks(device: str, folder: Path, cases: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The findings of both ranks."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.runtime.distributed.program", device, str(folder), *cases],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    return first, second


@pytest.mark.long
@pytest.mark.parametrize(
    "device", [pytest.param(device, marks=pytest.mark.slow if ":" in device else ()) for device in MORE]
)
def test_two_ranks_make_the_picture_of_one(device: str, tmp_path: Path) -> None:
    cases = ([] if "xpu" in device else ON_EVERY_DEVICE) + MORE[device]
    found = run_ranks(device, tmp_path, cases)
    for case in cases:
        CHECKS[case](*(one[case] for one in found))
    if device.startswith("virtual:"):
        name = device.removeprefix("virtual:").split(",")[0]
        case = "flux tensor" if "flux tensor" in cases else "flux context"
        assert [one[case]["device"] for one in found] == [f"{name}:0", f"{name}:1"]


def is_the_picture_of_one(*found: dict[str, Any]) -> None:
    for one in found:
        assert one["apart"] <= CLOSE
        assert one["spread"] > 100 * CLOSE, "a flat picture shows nothing"
        assert one["compiling"] == "never"
    assert found[0]["sum"] == pytest.approx(found[1]["sum"], abs=CLOSE)


def has_half_of_the_sequence(*found: dict[str, Any]) -> None:
    is_the_picture_of_one(*found)
    for one in found:
        assert one["plan"] == "context:2"
        assert one["weights"] == one["all_weights"]


def check_flux(*found: dict[str, Any]) -> None:
    has_half_of_the_sequence(*found)
    for one in found:  # of 16 of the picture, of 32 of the text, and of both
        assert one["tokens"] == [8, 16, 24]


def check_wan(*found: dict[str, Any]) -> None:
    has_half_of_the_sequence(*found)
    for one in found:  # of 48 of three frames
        assert 24 in one["tokens"]
        assert 48 not in one["tokens"]


def check_tensor(*found: dict[str, Any]) -> None:
    is_the_picture_of_one(*found)
    for one in found:
        assert one["plan"] == "tensor:2"
        assert one["weights"] < 0.8 * one["all_weights"]


def check_guidance(*found: dict[str, Any]) -> None:
    is_the_picture_of_one(*found)
    for one in found:
        assert one["plan"] == "cfg:2"
        assert one["rows"] == [1, HALF], "the batch of two was run whole once, to compare, and then in halves"


def says(*words: str) -> Any:
    def check(*found: dict[str, Any]) -> None:
        for one in found:
            for word in words:
                assert word in f"{one['message']} hint: {one['hint']}"
            assert not one["moved"], "it is refused before weights are moved"

    return check


def check_no_seed(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first["sum"] == pytest.approx(second["sum"], abs=CLOSE)
    assert first["next"] == pytest.approx(second["next"], abs=CLOSE)
    assert abs(first["sum"] - first["next"]) > CLOSE, "two pictures without a seed are two"
    assert first["apart"] <= CLOSE
    assert second["apart"] <= CLOSE


def check_seeds(*found: dict[str, Any]) -> None:
    for one in found:
        assert one["seed"] <= CLOSE
        assert one["generator"] <= CLOSE


def check_twice(*found: dict[str, Any]) -> None:
    for one in found:
        assert one["apart"] <= CLOSE
        assert "is split over devices by context:2 already" in one["message"]


def check_failure(*found: dict[str, Any]) -> None:
    for one in found:
        assert one["failed"], "it does not fail any more: take it off the list of planning/parallel.py"


CHECKS = {
    "flux context": check_flux,
    "wan context": check_wan,
    "uneven context": has_half_of_the_sequence,
    "two experts": has_half_of_the_sequence,
    "one model at a time": has_half_of_the_sequence,
    "flux tensor": check_tensor,
    "guidance": check_guidance,
    "auto flux": has_half_of_the_sequence,
    "auto unet": check_guidance,
    "tensor refused": says("supports tensor parallelism on cuda, neuron, tpu, xpu, not on", "parallel='context'"),
    "no tensor plan": says("parallel='tensor:2': diffusers"),
    "no context plan": says("no context-parallel plan for UNet2DConditionModel", "parallel='cfg'"),
    "wrong count": says("requires 4 processes, one per device, but 2 are running", "torchrun --nproc-per-node 4"),
    "rows that see one another": says("the halves of a batch do not give what the batch gives", "leave parallel out"),
    "no seed": check_no_seed,
    "other seeds": check_seeds,
    "placed twice": check_twice,
    "masks of heads": check_failure,
    "attention of a batch": check_failure,
    "reference tokens": check_failure,
}


def test_one_process_is_told_how_to_start_several() -> None:
    pipe = recipes()["flux"].make()
    with pytest.raises(UsageError, match="requires 2 processes, one per device, but only one is running") as raised:
        place(pipe, "cpu", parallel="context:2")
    assert raised.value.hint == "start the program with torchrun --nproc-per-node 2 program.py"
    assert place(pipe, "cpu", parallel="auto").plan.parallel.value is None
