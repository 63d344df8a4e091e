"""Every recipe with its denoisers recorded on the host: the same bits as without, call after call."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from anyaccel.backends.cpu import CpuDriver
from anyaccel.backends.driver import Recorder
from anyaccel.host_recording.record import record_host
from anyaccel.recipes import recipes, run
from anyaccel.runtime.pipeline import place

GRADIENTS = ("attend-and-excite",)
"""They ask for gradients, which the tests' own process refuses."""


def compare(name: str) -> None:
    """Three pictures, each recorded and not."""
    recipe, recorder = recipes()[name], Recorder(record_host, warm=1, off=None, of_calls=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuDriver, "recorder", lambda self, index: recorder)
        plain, recorded = (
            place(recipe.make(), "cpu", dtype="float32", host_layers=True, capture=capture) for capture in (False, True)
        )
        for _ in range(3):
            torch.manual_seed(0)
            expected = run(recipe, plain)
            torch.manual_seed(0)
            assert (run(recipe, recorded) == expected).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # diffusers says much of what will change
@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_pipeline_is_the_same_to_the_last_bit(name: str) -> None:
    if name not in GRADIENTS:
        compare(name)
        return
    command = [sys.executable, "-c", f"from {__name__} import compare; compare({name!r})"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
