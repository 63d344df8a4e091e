"""What stands in for a forward: the same output from recordings, none that is stale, and a model that stays a model."""

import collections
import copy
import gc
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0

from anyaccel.backends import cpu
from anyaccel.backends.cpu import CpuDriver
from anyaccel.backends.driver import Recorder
from anyaccel.host_recording.record import record_host
from anyaccel.recipes import recipes, run
from anyaccel.runtime import fast_forward
from anyaccel.runtime.fast_forward import FastForward, can_stand_in, release
from anyaccel.runtime.pipeline import place
from anyaccel.runtime.placement import find_placement
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
            for where, value in zip(_tensors(result), _tensors(made), strict=True):
                where.copy_(value * (1 + self.spoil))

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


def host_recorder() -> Recorder:
    return Recorder(record_host, warm=1, off=None, of_calls=True)


@torch.no_grad()
def test_calls_of_the_host_are_replayed_to_the_last_bit(unet: Any) -> None:
    prompts = [make_inputs(seed)["encoder_hidden_states"] for seed in range(2)]
    given = [{**make_inputs(seed), "encoder_hidden_states": prompts[seed // 6]} for seed in range(12)]
    expected = [unet(**inputs).sample for inputs in given]
    found = FastForward(unet, None, host_recorder())
    found.install()
    found.renew()
    for inputs, other in zip(given, expected, strict=True):
        assert torch.equal(unet(**inputs).sample, other)
    assert found.recordings == 1
    [shape] = found.shapes.values()
    assert shape.kept == [False, False, True], "the prompt stays, and what follows from it is worked out once"
    prompts[1].mul_(2)
    changed = unet(**given[-1]).sample
    release(unet)
    assert torch.equal(changed, unet(**given[-1]).sample), "a prompt that was written to is another one"


@torch.no_grad()
@pytest.mark.parametrize("how", ["in place", "behind torch's back", "a hook", "inference mode", "autocast"])
def test_a_recording_of_calls_is_not_used_where_it_would_be_wrong(unet: Any, how: str) -> None:
    found = FastForward(unet, None, host_recorder())
    found.install()
    found.renew()
    for seed in range(4):
        unet(**make_inputs(seed))
    assert found.recordings == 1
    seen = []
    if how == "in place":
        unet.conv_in.weight.mul_(2)
    elif how == "behind torch's back":
        unet.conv_in.weight.data.mul_(2)
        found.renew()  # as every call of a pipeline does
    elif how == "a hook":
        unet.mid_block.register_forward_hook(lambda *given: seen.append(1))
    cast = torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast")
    with torch.inference_mode(how == "inference mode"), cast:
        made = unet(**make_inputs(1)).sample.clone()
    assert bool(seen) is (how == "a hook")
    release(unet)
    with cast:
        assert torch.equal(made, unet(**make_inputs(1)).sample)


@torch.no_grad()
def test_an_interrupted_call_leaves_no_prompt_behind(unet: Any) -> None:
    prompts, inputs = [make_inputs(seed)["encoder_hidden_states"] for seed in range(2)], make_inputs(5)
    found = FastForward(unet, None, host_recorder())
    found.install()
    found.renew()
    for _ in range(3):
        expected = unet(**{**inputs, "encoder_hidden_states": prompts[0]}).sample
    [shape] = found.shapes.values()
    replay = shape.replay
    shape.replay = lambda: pytest.fail("interrupted")  # after the other prompt was copied in
    with pytest.raises(pytest.fail.Exception):
        unet(**{**inputs, "encoder_hidden_states": prompts[1]})
    shape.replay = replay
    assert torch.equal(unet(**{**inputs, "encoder_hidden_states": prompts[0]}).sample, expected)


class Changeable(torch.nn.Module):
    """What users change about a model between two pictures, or two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4))
        self.linear = torch.nn.Linear(4, 4)
        self.scale, self.strengths, self.merged = [1.0], {"style": 1.0}, list[str]()

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(picture) * self.table * self.scale[0] * self.strengths["style"]
        return made if self.merged else made + 1


def replace_table(model: Any) -> None:
    model.table = torch.full((4,), 3.0)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a scale in a list": lambda model: model.scale.__setitem__(0, 0.5),
    "a strength": lambda model: model.strengths.update(style=0.5),
    "merged": lambda model: (model.linear.weight.data.add_(1), model.merged.append("style")),
    "a buffer": replace_table,
    "a buffer in place": lambda model: model.table.mul_(2),
    "a hook on everything": lambda model: None,
}


@torch.no_grad()
@pytest.mark.parametrize("renewed", [True, False], ids=["next picture", "next step"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_users_change_is_seen(change: str, renewed: bool) -> None:
    model, picture = Changeable(), torch.randn(2, 4)
    found = FastForward(model, None, host_recorder())
    found.install()
    found.renew()
    for _ in range(3):
        first = model(picture)
    assert found.recordings == 1
    CHANGES[change](model)
    if renewed:
        found.renew()
    if change == "a hook on everything":
        seen: list[Any] = []
        handle = torch.nn.modules.module.register_module_forward_hook(lambda *given: seen.append(1))
        model(picture)
        handle.remove()
        assert len(seen) == 2, "the model, and the layer inside"
        return
    made = model(picture)
    release(model)
    assert torch.equal(made, model(picture))
    assert not torch.equal(made, first)


@dataclass
class Hidden:
    picture: torch.Tensor


@torch.no_grad()
def test_an_output_that_hides_its_tensors_is_not_recorded() -> None:
    class Hides(torch.nn.Module):
        def forward(self, picture: torch.Tensor) -> Hidden:
            return Hidden(picture * 2)

    model = Hides()
    found = FastForward(model, None, host_recorder())
    found.install()
    found.renew()
    for number in range(4):
        assert model(torch.full((2,), float(number))).picture[0] == 2 * number
    assert "nobody sees" in found.told


@torch.no_grad()
def test_a_recording_that_was_interrupted_is_not_used(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = FastForward(unet, None, host_recorder())
    found.install()
    found.renew()
    expected = unet(**make_inputs(0)).sample

    def interrupt(*given: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(fast_forward, "_know", interrupt)
    with pytest.raises(KeyboardInterrupt):
        unet(**make_inputs(0))
    assert all(shape.replay is None for shape in found.shapes.values())
    monkeypatch.undo()
    assert torch.equal(unet(**make_inputs(0)).sample, expected)
    assert found.recordings == 1


class Remembers(torch.nn.Module):
    """Puts what it made into a list that it is given, as decoders of videos do."""

    def forward(self, picture: torch.Tensor, made_before: list[Any]) -> torch.Tensor:
        made = picture * 2 if made_before[0] is None else picture + made_before[0]
        made_before[0] = made
        return made


@torch.no_grad()
@pytest.mark.parametrize("recorder", [host_recorder(), Recorder(Keeper())], ids=["calls", "graph"])
def test_a_model_that_writes_to_what_it_is_given_is_not_recorded(recorder: Recorder) -> None:
    model, picture = Remembers(), torch.ones(4, 4)
    found = FastForward(model, None, recorder)
    found.install()
    found.renew()
    for _ in range(4):
        kept: list[Any] = [None]
        for number in range(5):
            assert torch.equal(model(picture, kept), picture * (number + 2))
    assert not found.recordings
    assert "writes to what it is given" in found.told


@torch.no_grad()
def test_two_at_once_do_not_mix_their_inputs(unet: Any) -> None:
    expected = [unet(**make_inputs(seed)).sample for seed in range(8)]
    found = FastForward(unet, None, host_recorder())
    found.install()
    found.renew()

    @torch.no_grad()
    def run(seed: int) -> bool:
        return all(torch.equal(unet(**make_inputs(seed)).sample, expected[seed]) for _ in range(10))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(8)))
    assert found.recordings == 1


def draw(recipe: Any, pipe: Any) -> Any:
    return pipe(**{**recipe.call(), "num_inference_steps": 9})[0]


@pytest.mark.parametrize("name", ["stable-diffusion", "lumina", "flux", "pixart-alpha", "controlnet"])
def test_a_pipeline_on_the_host_is_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_LONGEST_CALL_S", 1.0)  # others may keep this machine busy
    recipe = recipes()[name]
    plain = place(recipe.make(), "cpu", dtype="float32", host_layers=True, capture=False)
    pipe: Any = place(recipe.make(), "cpu", dtype="float32", host_layers=True)
    for _ in range(2):
        assert (draw(recipe, pipe) == draw(recipe, plain)).all()
    assert pipe.plan.capture.value
    assert pipe.plan.capture.reason.endswith("ms by itself: recorded")
    placement = find_placement(pipe)
    assert placement is not None
    for denoiser in placement.denoisers:
        for weight in getattr(pipe, denoiser).parameters():
            weight.data.mul_(0.9)  # which torch does not count
    changed = draw(recipe, pipe)
    pipe.to("cpu", capture=False, host_layers=False)
    assert abs(changed - draw(recipe, pipe)).max() < 1e-3


@pytest.mark.parametrize("before", [True, False])
def test_garbage_is_looked_for_again_after_compiling(before: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with _collecting_later(True):
            assert not gc.isenabled()
            assert torch._dynamo.config.run_gc_after_compile is not before
        assert gc.isenabled() is before
        with pytest.raises(ZeroDivisionError), _collecting_later(True):
            1 / 0  # noqa: B018
        assert gc.isenabled() is before
        with _collecting_later(False):
            assert gc.isenabled() is before
    finally:
        (gc.enable if was else gc.disable)()


class CallsItself(torch.nn.Module):
    """Halves what it is given until one row is left."""

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        if len(picture) == 1:
            return picture * 2
        return torch.cat([self(picture[:1]), self(picture[1:])])


@torch.no_grad()
@pytest.mark.parametrize("model", [CallsItself(), torch.nn.LSTM(4, 4)], ids=["calls itself", "gives more than tensors"])
def test_models_of_all_kinds_run(model: torch.nn.Module) -> None:
    given = [torch.full((3, 4), float(number)) for number in range(4)]
    expected = [_tensors(model(one)) for one in given]
    found = FastForward(model, None, host_recorder())
    found.install()
    found.renew()
    for one, wanted in zip(given, expected, strict=True):
        assert all(map(torch.equal, _tensors(model(one)), wanted))
    release(model)


@torch.no_grad()
def test_a_replay_that_fails_is_run_instead(unet: Any) -> None:
    found = FastForward(unet, None, host_recorder())
    found.install()
    found.renew()
    expected, *_ = [unet(**make_inputs(0)).sample for _ in range(3)]
    [shape] = found.shapes.values()

    def fail() -> None:
        raise RuntimeError("no such kernel")

    shape.replay = fail
    assert torch.equal(unet(**make_inputs(0)).sample, expected)
    assert "no such kernel" in found.told
    assert not found.recordings


class Strange(AttnProcessor2_0):
    """A processor of a user's, which counts its calls in an object of its own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gain, self.seen = torch.ones(1), collections.Counter[str]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.seen["calls"] += 1
        return super().__call__(*args, **kwargs) * self.gain


def test_a_model_with_something_of_a_user_in_it_is_not_recorded() -> None:
    recipe = recipes()["stable-diffusion"]
    pipe = place(recipe.make(), "cpu", dtype="float32", capture=True)
    call = {**recipe.call(), "num_inference_steps": 10}
    pipe(**call)
    assert "recorded" in pipe.plan.capture.reason
    processor = Strange()
    pipe.unet.set_attn_processor(processor)
    pipe(**call)
    counted = processor.seen["calls"]
    assert "Strange" in pipe.plan.capture.reason
    pipe(**call)
    assert processor.seen["calls"] == 2 * counted
    pipe.unet.set_attn_processor(AttnProcessor2_0())  # type: ignore[no-untyped-call]
    pipe(**call)
    assert "recorded" in pipe.plan.capture.reason
    inside = pipe.unet.mid_block
    inside.forward = lambda *args, **kwargs: type(inside).forward(inside, *args, **kwargs)
    pipe(**call)
    assert "another forward" in pipe.plan.capture.reason
    del inside.forward
    first = pipe.unet.conv_in
    first._conv_forward = lambda *given: type(first)._conv_forward(first, *given)
    pipe(**call)
    assert "another _conv_forward" in pipe.plan.capture.reason


def change_tensor(model: Any) -> None:
    model.attention.processor.gain = torch.ones(1)


def change_list(model: Any) -> None:
    model.attention.processor.kept[0] = torch.ones(1)


def change_hook(model: Any) -> None:
    model.attention.register_forward_hook(lambda *given: None)


def change_forward(model: Any) -> None:
    model.attention.forward = lambda *given: given


def turn_weight(model: Any) -> None:
    model.attention.weight.data = model.attention.weight.data.t()


@pytest.mark.parametrize("change", [change_tensor, change_list, change_hook, change_forward, turn_weight])
def test_a_snapshot_sees_what_changed(change: Callable[[Any], None]) -> None:
    model: Any = torch.nn.Module()
    model.attention = torch.nn.Linear(4, 4)
    model.attention.processor = Strange()
    model.attention.processor.kept = [torch.ones(1)]
    before = Snapshot(model)
    assert before.holds()
    change(model)
    assert not before.holds()
