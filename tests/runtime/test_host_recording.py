"""Recordings on the host: the same numbers to the last bit, from little memory, and a refusal of what cannot be."""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.nn import functional

from anyaccel.host_recording import lower, program
from anyaccel.host_recording.record import record_host

Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def change_in_place(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    made = one @ other
    half, rest = made.chunk(2, dim=1)
    half.mul_(2)
    rest.copy_(half.flip(1))
    made[:, 0].fill_(7)
    return functional.silu(made, inplace=True).add_(one)


def normalize(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
    normed = functional.layer_norm(one, one.shape[-1:])  # makes its own memory
    normed.add_(other)
    picture = functional.group_norm(normed.t().reshape(1, 4, 4, 4), 2)
    return normed.t(), picture, picture.permute(0, 2, 3, 1)[..., :2]


def pad(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    padded = functional.pad(one.view(1, 1, 8, 8), (1, 2, 3, 0), value=5.0)
    return torch.cat([padded, functional.pad(other.view(1, 1, 8, 8), (1, 2, 0, 3))], 1).unfold(2, 3, 2).contiguous()


def turn_pairs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    normed = functional.layer_norm(one, one.shape[-1:])
    numbers = torch.view_as_complex(normed.view(8, 4, 2)) * torch.polar(other[:, :4], other[:, 4:])
    return torch.view_as_real(numbers).flatten(1)


def attend(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    query, key, value = (rows.view(1, 8, 2, 4).transpose(1, 2) for rows in (one, other, one + other))
    return functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def build_from_nothing(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    place = one.new_empty(8, 8)
    torch.add(one, torch.arange(8.0), out=place)
    table = torch.exp(-torch.arange(8, dtype=torch.float32) / 8)
    return place[torch.arange(8).flip(0)[:4]] * table + torch.zeros(4, 8).add_(other[:4])


def give_back(one: torch.Tensor, other: torch.Tensor) -> dict[str, Any]:
    return {"same": one, "part": other[2:], "sum": one + other, "word": "yes"}


FUNCTIONS = [change_in_place, normalize, pad, turn_pairs, attend, build_from_nothing, give_back]


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def draw(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 8, generator=generator) for _ in range(2)]


def check(function: Function, kept: list[bool]) -> None:
    """Record once, and compare all that is replayed with what the function gives."""
    places = draw(0)
    result, replay = record_host(lambda: function(*places), places, kept)
    for seed in (0, 1, 1, 2):
        for place, value in zip(places, draw(seed), strict=True):
            if not torch.equal(place, value):
                place.copy_(value)
        replay()
        expected = function(*draw(seed))
        assert [one.stride() for one in tensors(result)] == [one.stride() for one in tensors(expected)]
        for made, wanted in zip(tensors(result), tensors(expected), strict=True):
            assert torch.equal(made, wanted)


@pytest.mark.parametrize("kept", [[False, False], [False, True], [True, True]], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_replay_gives_the_same_bits(function: Function, kept: list[bool]) -> None:
    check(function, kept)


CHANGES: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda one, other: one.mul_(0.5).add_(other.tanh()),
    lambda one, other: one[:4].copy_(other[4:].clone()),
]
MAKERS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda one, other: torch.tanh(one @ other),
    lambda one, other: functional.layer_norm(one, (8,)),
    lambda one, other: one.t(),
    lambda one, other: torch.cat([one[:4], other[4:]]),
    lambda one, other: functional.pad(one[1:7, 1:7], (1, 1, 1, 1)),
]


def make_program(seed: int) -> Function:
    """A function of two matrices that does some forty things to what it has, in place and not."""
    draws = random.Random(seed)
    steps = [(draws.choice([*CHANGES, *MAKERS, None]), draws.random(), draws.random()) for _ in range(40)]

    def run(*given: torch.Tensor) -> list[torch.Tensor]:
        have = [value * 1 for value in given]
        for step, first, second in steps:
            one, other = have[int(first * len(have))], have[int(second * len(have))]
            if step is None:
                have = have[1:] if len(have) > 3 else have
            elif step in MAKERS:
                have.append(step(one, other))
            else:
                step(one, other)
        return have

    return run


@pytest.mark.parametrize("seed", range(25))
def test_programs_that_nobody_thought_of(seed: int) -> None:
    check(make_program(seed), [seed % 2 == 0, seed % 3 == 0])


def test_what_follows_from_an_input_that_stays_is_done_once() -> None:
    weight, calls = torch.randn(8, 8), draw(3)

    def run() -> torch.Tensor:
        return calls[0] + calls[1] @ weight

    made, replay = record_host(run, calls, [False, True])
    replay()
    first = run()
    assert torch.equal(made, first)
    weight.zero_()
    calls[0].add_(1)
    replay()
    torch.testing.assert_close(made, first + 1, msg="the product was worked out before")
    calls[1].add_(1)
    replay()
    assert torch.equal(made, calls[0])


def test_memory_is_taken_again_once_nobody_reads_it() -> None:
    one = torch.randn(256, 1024)

    def run() -> torch.Tensor:
        made = one
        for _ in range(30):
            made = torch.sin(made)
        return made

    result, replay = record_host(run, [one], [False])
    laid_out: Any = replay.__self__  # type: ignore[attr-defined]
    held = {memory.data_ptr(): memory.nbytes() for memory in laid_out._memory.values()}
    assert sum(held.values()) <= 4 * one.nbytes, "the input, and two or three in turns"
    replay()
    assert torch.equal(result, run())


def test_places_can_be_written_to_in_any_mode() -> None:
    with torch.inference_mode():
        weight = torch.randn(8, 8)
        with torch.inference_mode(False):
            places = draw(0)
        result, replay = record_host(lambda: normalize(places[0], places[1] @ weight), places, [False, True])
        replay()
    places[0].copy_(draw(1)[0])
    replay()
    expected = normalize(draw(1)[0], draw(0)[1] @ weight)
    for made, wanted in zip(tensors(result), tensors(expected), strict=True):
        assert torch.equal(made, wanted)


KEPT = torch.zeros(8, 8)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda one: one * float(one[0, 0]), "reads a number"),
        (lambda one: one[one > 0], "reads a number"),
        (lambda one: one * one.tolist()[0][0], "reads a number"),
        (lambda one: one.nonzero(), "reads a number"),
        (lambda one: one + torch.rand(8), "random"),
        (lambda one: functional.dropout(one, 0.5), "random"),
        (lambda one: KEPT.add_(one), "not its own"),
        (lambda one: one.mul_(2), "not its own"),
        (lambda one: one + torch.tensor([1.0, 2.0] * 4), "nobody saw"),
        (lambda one: one + torch.from_numpy(one.numpy() * 2), "reads a number"),
        (lambda one: one * float(numpy.asarray(one)[0, 0]), "reads a number"),
        (lambda one: one.to_sparse() @ one, "reads a number|laid out"),
        (lambda one: functional.layer_norm(one, (8,))[:, :1].expand(8, 8), "expanded"),
    ],
)
def test_what_cannot_be_replayed_is_refused(function: Function, words: str) -> None:
    one = torch.randn(8, 8)
    with pytest.raises(RuntimeError, match=words):
        record_host(lambda: function(one), [one], [False])


def draw_anew(one: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return one + torch.randn(8)


@pytest.mark.parametrize(
    "function",
    [torch.bernoulli, draw_anew, lambda one: one + torch.randn(8, generator=torch.Generator())],
    ids=["the host's", "seeded inside", "one of its own"],
)
def test_what_draws_numbers_is_refused_before_it_does(function: Function) -> None:
    one = torch.full((8, 8), 0.5)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="random"):
        record_host(lambda: function(one), [one], [False])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_form_that_cannot_be_called_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **named: Any) -> None:
        raise RuntimeError("not here")

    monkeypatch.setattr(lower, "_SAME", {})
    monkeypatch.setattr(lower, "_find_out", lambda function: refuse)
    check(lambda one, other: torch.sin(one) + other, [False, False])


def test_a_form_that_gives_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def find_wrong(function: Any) -> Any:
        asked.append(str(function))
        return torch.ops.aten.cos.out if function is torch.ops.aten.sin.default else None

    monkeypatch.setattr(lower, "_SAME", {})
    monkeypatch.setattr(lower, "_find_out", find_wrong)
    check(lambda one, other: torch.sin(one) + other, [False, False])
    assert "aten.sin.default" in asked


def test_memory_that_was_shared_too_soon_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_one_for_all(size: int, blocks: list[int], free: list[int]) -> int:
        blocks[:] = [max([size, *blocks])]
        return 0

    one, other = draw(0)
    monkeypatch.setattr(program, "_find_block", find_one_for_all)
    record_host(lambda: torch.sin(one), [one], [False])
    with pytest.raises(RuntimeError, match="written over"):
        record_host(lambda: torch.sin(one) + torch.cos(other), [one, other], [False, False])
    with pytest.raises(RuntimeError, match="gives was written over"):
        record_host(lambda: (torch.sin(one), torch.cos(other)), [one, other], [False, False])


@pytest.fixture
def foreign() -> Iterator[Any]:
    library: Any = torch.library.Library("anyaccel_tests", "DEF")  # type: ignore[no-untyped-call]
    yield library
    library._destroy()


def test_operations_of_others_are_tried_by_a_replay(foreign: Any) -> None:
    runs = []

    def count(one: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return one + len(runs)

    foreign.define("double(Tensor one) -> Tensor")
    foreign.impl("double", lambda one: one * 2, "CPU")
    foreign.define("count(Tensor one) -> Tensor")
    foreign.impl("count", count, "CPU")
    check(lambda one, other: torch.ops.anyaccel_tests.double(one) + other, [False, False])
    one = torch.randn(8, 8)
    with pytest.raises(RuntimeError, match="another result"):
        record_host(lambda: torch.ops.anyaccel_tests.count(one), [one], [False])
    assert len(runs) == 2


def test_what_is_too_large_is_refused() -> None:
    one = torch.randn(64, 64)
    with pytest.raises(RuntimeError, match="would hold"):
        record_host(lambda: torch.sin(one), [one], [False], most_bytes=1000)


def test_what_takes_long_is_left_alone() -> None:
    one = torch.randn(64, 64)

    def run() -> torch.Tensor:
        time.sleep(0.1)
        return torch.sin(one)

    with pytest.raises(RuntimeError, match="shortens by little"):
        record_host(run, [one], [False], longest_call_s=0.05)
