"""A graph that cannot be captured leaves the device as it was."""

from typing import Any

import pytest
import torch

import anyaccel
from anyaccel.recipes import recipes, run
from tests.conftest import NEEDS_RECIPES

pytestmark = NEEDS_RECIPES


@pytest.mark.skipif(not torch.cuda.is_available(), reason="requires CUDA, whose graphs are captured")
def test_later_graphs_are_captured_and_random_numbers_are_drawn() -> None:
    recorder: Any = anyaccel.open_device("cuda").driver.recorder(0)
    stream, state = torch.cuda.current_stream(), torch.cuda.get_rng_state()
    with pytest.raises(RuntimeError):
        # Waiting for the device cannot be captured.
        recorder.record(lambda: torch.ones(3, device="cuda").sum().item())
    assert torch.cuda.current_stream() == stream
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.randn(2, device="cuda").isfinite().all()
    pipe = anyaccel.place(recipes()["stable-diffusion"].make(), "cuda", dtype="float32", compile=False, capture=True)
    for _ in range(3):
        run(recipes()["stable-diffusion"], pipe)
    assert pipe.plan.report.capture.value, pipe.plan.report.capture.reason
