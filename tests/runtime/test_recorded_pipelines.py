"""Every recipe with its denoisers recorded on the host: the same bits as without, call after call."""

import pytest
import torch

from anyaccel.backends.cpu import CpuDriver
from anyaccel.backends.driver import Recorder
from anyaccel.host_recording.record import record_host
from anyaccel.recipes import recipes, run
from anyaccel.runtime.pipeline import place


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # diffusers says much of what will change
@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_pipeline_is_the_same_to_the_last_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(record_host, warm=1, off=None, of_calls=True)
    monkeypatch.setattr(CpuDriver, "recorder", lambda self, index: recorder)
    recipe = recipes()[name]
    plain, recorded = (
        place(recipe.make(), "cpu", dtype="float32", host_layers=True, capture=capture) for capture in (False, True)
    )
    for _ in range(3):
        torch.manual_seed(0)
        expected = run(recipe, plain)
        torch.manual_seed(0)
        assert (run(recipe, recorded) == expected).all()
