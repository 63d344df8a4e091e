"""Two ranks generate the same image as one rank, on the CPU and on virtual devices."""

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
BATCH = 2
ON_EVERY_DEVICE = ["flux context", "wan context", "guidance", "no seed"]
MORE = {
    "cpu": [
        "uneven context", "two experts", "auto flux", "auto unet", "tensor rejected", "no tensor plan",
        "no context plan", "wrong count", "attention across rows", "different seeds", "placed twice", "masks per head",
        "attention of the whole batch", "reference tokens",
    ],
    "virtual:neuron,count=2,strict": ["flux tensor", "no tensor plan"],
    "virtual:hpu,count=2,strict": ["tensor rejected", "one model at a time"],
    "virtual:xpu,count=2,strict": ["flux tensor"],
}  # fmt: skip


def run_ranks(device: str, folder: Path, cases: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of both ranks."""
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "device", [pytest.param(device, marks=pytest.mark.slow if ":" in device else ()) for device in MORE]
)
def test_two_ranks_compute_the_image_of_one(device: str, tmp_path: Path) -> None:
    cases = ([] if "xpu" in device else ON_EVERY_DEVICE) + MORE[device]
    ranks = run_ranks(device, tmp_path, cases)
    for case in cases:
        CHECKS[case](*(rank[case] for rank in ranks))
    if device.startswith("virtual:"):
        name = device.removeprefix("virtual:").split(",")[0]
        case = "flux tensor" if "flux tensor" in cases else "flux context"
        assert [rank[case]["device"] for rank in ranks] == [f"{name}:0", f"{name}:1"]


def check_image(*ranks: dict[str, Any]) -> None:
    """Check that the ranks generated the same image as a single rank."""
    for rank in ranks:
        assert rank["difference"] <= CLOSE
        assert rank["spread"] > 100 * CLOSE, "the image is uniform, so the comparison is meaningless"
        assert rank["compile_policy"] == "never"
    assert ranks[0]["sum"] == pytest.approx(ranks[1]["sum"], abs=CLOSE)


def check_context(*ranks: dict[str, Any]) -> None:
    check_image(*ranks)
    for rank in ranks:
        assert rank["plan"] == "context:2"
        assert rank["weights"] == rank["all_weights"]


def check_flux(*ranks: dict[str, Any]) -> None:
    check_context(*ranks)
    for rank in ranks:  # half of 16 image tokens, of 32 text tokens, and of both
        assert rank["tokens"] == [8, 16, 24]


def check_wan(*ranks: dict[str, Any]) -> None:
    check_context(*ranks)
    for rank in ranks:  # half of the 48 tokens of three frames
        assert 24 in rank["tokens"]
        assert 48 not in rank["tokens"]


def check_tensor(*ranks: dict[str, Any]) -> None:
    check_image(*ranks)
    for rank in ranks:
        assert rank["plan"] == "tensor:2"
        assert rank["weights"] < 0.8 * rank["all_weights"]


def check_guidance(*ranks: dict[str, Any]) -> None:
    check_image(*ranks)
    for rank in ranks:
        assert rank["plan"] == "cfg:2"
        assert rank["rows"] == [1, BATCH], "the full batch runs only as the reference; each rank then runs half of it"


def check_error(*texts: str) -> Any:
    def check(*ranks: dict[str, Any]) -> None:
        for rank in ranks:
            for text in texts:
                assert text in f"{rank['message']} hint: {rank['hint']}"
            assert not rank["moved"], "weights were moved before the split was rejected"

    return check


def check_no_seed(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first["sum"] == pytest.approx(second["sum"], abs=CLOSE)
    assert first["next"] == pytest.approx(second["next"], abs=CLOSE)
    assert abs(first["sum"] - first["next"]) > CLOSE, "two calls without a seed give different images"
    assert first["difference"] <= CLOSE
    assert second["difference"] <= CLOSE


def check_seeds(*ranks: dict[str, Any]) -> None:
    for rank in ranks:
        assert rank["seed"] <= CLOSE
        assert rank["generator"] <= CLOSE


def check_second_placement(*ranks: dict[str, Any]) -> None:
    for rank in ranks:
        assert rank["difference"] <= CLOSE
        assert "is already split with parallel='context:2'" in rank["message"]


def check_failure(*ranks: dict[str, Any]) -> None:
    for rank in ranks:
        assert rank["failed"], "it no longer fails: remove it from _KNOWN_FAILURES in planning/parallel.py"


CHECKS = {
    "flux context": check_flux,
    "wan context": check_wan,
    "uneven context": check_context,
    "two experts": check_context,
    "one model at a time": check_context,
    "flux tensor": check_tensor,
    "guidance": check_guidance,
    "auto flux": check_context,
    "auto unet": check_guidance,
    "tensor rejected": check_error(
        "diffusers supports tensor parallelism only on cuda, neuron, tpu, xpu, not on", "parallel='context'"
    ),
    "no tensor plan": check_error("parallel='tensor:2' is not available: diffusers"),
    "no context plan": check_error("no context-parallel plan for UNet2DConditionModel", "parallel='cfg'"),
    "wrong count": check_error(
        "requires 4 processes, one per device, but 2 are running", "torchrun --nproc-per-node 4"
    ),
    "attention across rows": check_error("the output of the two halves differs", "omit parallel"),
    "no seed": check_no_seed,
    "different seeds": check_seeds,
    "placed twice": check_second_placement,
    "masks per head": check_failure,
    "attention of the whole batch": check_failure,
    "reference tokens": check_failure,
}


def test_the_hint_for_a_single_process_is_the_torchrun_command() -> None:
    pipe = recipes()["flux"].make()
    with pytest.raises(UsageError, match="requires 2 processes, one per device, but only one is running") as raised:
        place(pipe, "cpu", parallel="context:2")
    assert raised.value.hint == "start the program with torchrun --nproc-per-node 2 program.py"
    assert place(pipe, "cpu", parallel="auto").plan.parallel.value is None
