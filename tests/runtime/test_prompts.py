"""Prompts that come again are not encoded again, and nothing that would change the encoding is missed."""

from collections.abc import Callable
from typing import Any

import diffusers
import numpy
import pytest
import torch

from anyaccel.recipes import recipes
from anyaccel.runtime.pipeline import place
from anyaccel.runtime.placement import find_placement
from anyaccel.runtime.prompts import Prompts


class Counted:
    """Counts the runs of all models of a class: to hook one of them would be strange."""

    def __init__(self, module: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs, kind = 0, type(module)
        before: Any = kind.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.runs += 1
            return before(*args, **kwargs)

        monkeypatch.setattr(kind, "forward", forward)


def picture(pipe: Any, prompt: Any = "a cat", **more: Any) -> Any:
    call = {**recipes()["stable-diffusion"].call(), "prompt": prompt, **more}
    return pipe(**{**call, "generator": torch.Generator().manual_seed(0)}).images


@pytest.fixture
def pipe() -> Any:
    return place(recipes()["stable-diffusion"].make(), "cpu", dtype="float32")


def test_a_prompt_that_comes_a_second_time_is_not_encoded(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(pipe.text_encoder, monkeypatch)
    made = [picture(pipe)]
    before = counted.runs
    made += [picture(pipe), picture(pipe)]
    assert counted.runs == before
    for other in made[1:]:
        numpy.testing.assert_array_equal(other, made[0])
    picture(pipe, "a dog")
    assert counted.runs > before
    assert pipe.plan.prompts_kept.value


def test_what_has_to_be_fetched_from_a_device_is_kept_the_second_time() -> None:
    prompts, host = Prompts(most=4), torch.device("cpu")
    prompts.note("a cat", torch.ones(2))
    assert prompts.find("a cat", host) is None
    prompts.note("a cat", torch.ones(2))
    assert torch.equal(prompts.find("a cat", host), torch.ones(2))


def test_weights_that_only_wait_on_the_host_are_not_looked_at(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[torch.Tensor] = []

    def look(weight: torch.Tensor) -> torch.Tensor:
        looked.append(weight)
        return weight

    monkeypatch.setattr("anyaccel.runtime.prompts.fingerprint", look)
    prompts = Prompts(most=4)
    for _ in range(2):
        prompts.renew(pipe)
    assert looked == [], "of a large encoder that would take longer than to encode"
    Prompts(most=4, at_home=True).renew(pipe)
    assert len(looked) == len(list(pipe.text_encoder.parameters()))


def test_it_is_encoded_again_where_something_changed(pipe: Any) -> None:
    first, *_ = [picture(pipe) for _ in range(3)]
    with torch.no_grad():
        pipe.text_encoder.get_input_embeddings().weight.mul_(3)
    assert numpy.abs(picture(pipe) - first).max() > 1e-3, "other weights"
    several = picture(pipe, num_images_per_prompt=2)
    assert len(several) == 2, "another number of images"


def write_past_the_count(pipe: Any) -> None:
    pipe.text_encoder.get_input_embeddings().weight.data.mul_(3)


def turn_words_around(pipe: Any) -> None:
    words = pipe.text_encoder.get_input_embeddings().weight
    for word in pipe.tokenizer("a cat").input_ids:
        words.data[word] *= -1


def turn_a_norm_around(pipe: Any) -> None:
    norms = [part for part in pipe.text_encoder.modules() if isinstance(part, torch.nn.LayerNorm)]
    norms[-1].weight.data.mul_(-1)


def put_a_hook(pipe: Any) -> None:
    pipe.text_encoder.get_input_embeddings().register_forward_hook(lambda module, given, made: made * 3)


def pad_elsewhere(pipe: Any) -> None:
    pipe.tokenizer.padding_side = "left"


@pytest.mark.parametrize(
    "change", [write_past_the_count, turn_words_around, turn_a_norm_around, put_a_hook, pad_elsewhere]
)
def test_what_changes_without_being_told_is_seen(pipe: Any, change: Callable[[Any], None]) -> None:
    before = picture(pipe)
    change(pipe)
    assert numpy.abs(picture(pipe) - before).max() > 1e-3


def test_lists_of_prompts_are_kept_in_their_order(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(pipe.text_encoder, monkeypatch)
    for _ in range(3):
        pair = picture(pipe, ["a cat", "a dog"])
    before = counted.runs
    numpy.testing.assert_array_equal(picture(pipe, ["a cat", "a dog"]), pair)
    assert counted.runs == before
    assert len(picture(pipe, ["a dog", "a cat"])) == 2
    assert counted.runs > before


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = place(recipes()["stable-diffusion"].make(), "cpu", dtype="float32", keep_prompts=False)
    counted = Counted(pipe.text_encoder, monkeypatch)
    runs = []
    for _ in range(4):
        picture(pipe)
        runs.append(counted.runs)
    assert runs[3] - runs[2] == runs[0]


def change_a_projection(pipe: Any) -> None:
    with torch.no_grad():
        for weight in pipe.projection_model.parameters():
            weight.mul_(-0.5)


def change_a_template(pipe: Any) -> None:
    pipe.prompt_template_encode = "One two three four five: {}"
    pipe.prompt_template_encode_start_idx = 0


@pytest.mark.parametrize(("name", "change"), [("audio-ldm-2", change_a_projection), ("qwen-image", change_a_template)])
def test_all_that_encoding_reads_is_looked_at(name: str, change: Callable[[Any], None]) -> None:
    recipe, made = recipes()[name], []
    for pipe in (place(recipe.make(), "cpu", dtype="float32"), recipe.make()):
        for _ in range(3):
            before = make_array(pipe, recipe)
        change(pipe)
        made += [before, make_array(pipe, recipe)]
    first, ours, _, plain = made
    numpy.testing.assert_array_equal(ours, plain)
    assert numpy.abs(ours - first).max() > 1e-3


def test_what_the_guidance_decides_is_not_kept_for_another() -> None:
    recipe = recipes()["i2vgen-xl"]
    pipe, plain = place(recipe.make(), "cpu", dtype="float32"), recipe.make()
    for scale in (1.0, 9.0, 1.0):
        ours, theirs = (make_array(one, recipe, guidance_scale=scale) for one in (pipe, plain))
        numpy.testing.assert_array_equal(ours, theirs)


def make_array(pipe: Any, recipe: Any, **more: Any) -> Any:
    torch.manual_seed(0)
    made = pipe(**{**recipe.call(), **more}).to_tuple()[0]
    return numpy.asarray(made.detach() if isinstance(made, torch.Tensor) else made, dtype=numpy.float32)


class _Worded:
    word = "one"


def convert_otherwise(pipe: Any) -> None:
    pipe.maybe_convert_prompt = lambda prompt, tokenizer: "a dog"


def hook_the_encoder(pipe: Any) -> None:
    pipe.text_encoder.register_forward_hook(lambda module, given, made: made)


@pytest.mark.parametrize("change", [convert_otherwise, hook_the_encoder])
def test_where_somebodys_own_python_has_a_part_nothing_is_kept(pipe: Any, change: Callable[[Any], None]) -> None:
    change(pipe)
    for _ in range(3):
        picture(pipe)
    found = find_placement(pipe)
    assert found is not None
    assert found.prompts is None or not found.prompts.kept


def test_an_encoding_of_a_users_own_is_asked_each_time() -> None:
    library: Any = diffusers

    class Worded(library.StableDiffusionPipeline):  # type: ignore[misc]
        def encode_prompt(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
            return super().encode_prompt(f"{_Worded.word} {prompt}", *args, **kwargs)

    plain: Any = recipes()["stable-diffusion"].make()
    pipe = place(Worded(**plain.components, requires_safety_checker=False), "cpu", dtype="float32")
    first, *_ = [picture(pipe) for _ in range(3)]
    _Worded.word = "two dogs"
    assert numpy.abs(picture(pipe) - first).max() > 1e-3


def test_gradients_are_not_lost(pipe: Any) -> None:
    picture(pipe)
    for _ in range(3):
        assert pipe.encode_prompt("a cat", "cpu", 1, False)[0].requires_grad
