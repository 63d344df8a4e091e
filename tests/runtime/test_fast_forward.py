"""What stands in for a forward: the same output from recordings, none that is stale, and a model that stays a model."""

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from anyaccel.backends.driver import Recorder
from anyaccel.recipes import recipes, run
from anyaccel.runtime.fast_forward import FastForward, can_stand_in, release
from anyaccel.runtime.snapshot import Snapshot
from anyaccel.runtime.speed import _collecting_later


class Keeper:
    """Records a function by keeping it: a replay computes again, from the fixed places and into the fixed places."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0
        self.spoil = 0.0

    def __call__(self, function: Callable[[], Any], *_: Any) -> tuple[Any, Callable[[], None]]:
        self.recorded += 1
        result = function()

        def replay() -> None:
            self.replayed += 1
            made = function()
            for place, value in zip(_tensors(result), _tensors(made), strict=True):
                place.copy_(value * (1 + self.spoil))

        return result, replay


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@pytest.fixture
def unet() -> Any:
    pipe: Any = recipes()["stable-diffusion"].make()
    return pipe.unet


def make_inputs(seed: int, size: int = 8) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "sample": torch.randn(2, 4, size, size, generator=generator),
        "timestep": torch.tensor(float(seed)),
        "encoder_hidden_states": torch.randn(2, 7, 32, generator=generator),
    }


def stand_in(unet: Any, recorder: Keeper, **options: Any) -> FastForward:
    made = FastForward(unet, None, Recorder(recorder), **options)
    made.install()
    made.renew()
    return made


@torch.no_grad()
def test_every_replay_reads_its_own_inputs(unet: Any) -> None:
    expected = [unet(**make_inputs(seed)).sample for seed in range(6)]
    recorder = Keeper()
    stand_in(unet, recorder)
    made = [unet(**make_inputs(seed)).sample for seed in range(6)]
    assert (recorder.recorded, recorder.replayed) == (1, 4), "two runs to warm up, and one replay to look at it"
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other)
    other_size = unet(**make_inputs(1, size=16), return_dict=False)[0]
    assert other_size.shape[-1] == 16
    release(unet)
    assert "forward" not in vars(unet)


@torch.no_grad()
def test_a_recording_that_is_wrong_is_not_used(unet: Any) -> None:
    expected = [unet(**make_inputs(seed)).sample for seed in range(5)]
    recorder = Keeper()
    recorder.spoil = 0.5
    found = stand_in(unet, recorder)
    for seed in range(5):
        torch.testing.assert_close(unet(**make_inputs(seed)).sample, expected[seed])
    assert recorder.recorded == 1
    assert "another result" in found.told


@torch.no_grad()
def test_what_cannot_be_recorded_runs_as_before(unet: Any) -> None:
    def refuse(*given: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    expected = unet(**make_inputs(3)).sample
    found = FastForward(unet, None, Recorder(refuse))
    found.install()
    for _ in range(4):
        torch.testing.assert_close(unet(**make_inputs(3)).sample, expected)
    assert "not permitted" in found.told


@torch.no_grad()
@pytest.mark.parametrize("change", ["weights", "free_u", "processor", "adapter"])
def test_a_model_that_changed_is_recorded_anew(unet: Any, change: str) -> None:
    recorder = Keeper()
    found = stand_in(unet, recorder)
    for seed in range(4):
        unet(**make_inputs(seed))
    found.renew()
    assert found.recordings == 1, "nothing changed"
    if change == "weights":
        unet.conv_in.weight = torch.nn.Parameter(unet.conv_in.weight * 2)
    elif change == "free_u":
        unet.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    elif change == "processor":
        unet.set_attn_processor(copy.copy(next(iter(unet.attn_processors.values()))))
    else:
        peft = pytest.importorskip("peft")
        unet.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    found.renew()
    assert found.recordings == 0


@torch.no_grad()
def test_the_strength_of_an_adapter_is_part_of_what_was_recorded(unet: Any) -> None:
    peft = pytest.importorskip("peft")
    unet.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    before = Snapshot(unet)
    assert before.holds()
    unet.set_adapters("default", 0.5)
    assert not before.holds()


def test_a_copy_is_a_plain_model(unet: Any) -> None:
    stand_in(unet, Keeper())
    for other in (copy.deepcopy(unet), pickle.loads(pickle.dumps(unet))):
        assert not isinstance(vars(other).get("forward"), FastForward)
        with torch.no_grad():
            torch.testing.assert_close(other(**make_inputs(1)).sample, unet(**make_inputs(1)).sample)
        assert other.forward.__self__ is other


def test_nothing_stands_in_beside_hooks(unet: Any) -> None:
    assert can_stand_in(unet)
    unet.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)
    assert not can_stand_in(unet)


def test_gradients_are_not_recorded(unet: Any) -> None:
    recorder = Keeper()
    stand_in(unet, recorder)
    for seed in range(4):
        assert unet(**make_inputs(seed)).sample.requires_grad
    assert not recorder.recorded


def test_a_pipeline_that_is_recorded_makes_the_same_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    from anyaccel.backends.cpu import CpuDriver
    from anyaccel.runtime.pipeline import place

    recipe = recipes()["stable-diffusion-xl"]
    expected = run(recipe, recipe.make())
    recorder = Keeper()
    monkeypatch.setattr(CpuDriver, "recorder", lambda self, index: Recorder(recorder))
    pipe = place(recipe.make(), "cpu", dtype="float32", capture=True)
    for _ in range(2):
        made = run(recipe, pipe)
        assert abs(made - expected).max() < 1e-5
    assert recorder.replayed
    assert "recorded" in pipe.plan.capture.reason
    assert pipe.to("cpu", capture=False).unet.forward.__self__ is pipe.unet


@pytest.mark.parametrize("before", [True, False])
def test_garbage_is_looked_for_again_after_compiling(before: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with _collecting_later(True):
            assert not gc.isenabled()
        assert gc.isenabled() is before
        with pytest.raises(ZeroDivisionError), _collecting_later(True):
            1 / 0  # noqa: B018
        assert gc.isenabled() is before
        with _collecting_later(False):
            assert gc.isenabled() is before
    finally:
        (gc.enable if was else gc.disable)()
