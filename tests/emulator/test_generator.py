"""Random numbers on a virtual device: generators, seeds, and a host whose own numbers are left alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from anyaccel.emulator.accelerator import VirtualAccelerator
from tests.emulator.forked import Everywhere

everywhere = Everywhere()

DRAWS: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "randn": lambda d: torch.randn(9, device=d),
    "rand": lambda d: torch.rand(9, device=d),
    "randint": lambda d: torch.randint(0, 99, (9,), device=d),
    "randperm": lambda d: torch.randperm(30, device=d),
    "randn_like": lambda d: torch.randn_like(torch.ones(9, device=d)),
    "rand_like": lambda d: torch.rand_like(torch.ones(9, device=d)),
    "normal_": lambda d: torch.empty(9, device=d).normal_(),
    "uniform_": lambda d: torch.empty(9, device=d).uniform_(),
    "exponential_": lambda d: torch.empty(9, device=d).exponential_(),
    "random_": lambda d: torch.empty(9, device=d).random_(99),
    "bernoulli": lambda d: torch.bernoulli(torch.full((40,), 0.5, device=d)),
    "multinomial": lambda d: torch.multinomial(torch.ones(40, device=d), 20),
    "normal": lambda d: torch.normal(torch.zeros(9, device=d), 1.0),
    "normal of a size": lambda d: torch.normal(0.0, 1.0, (9,), device=d),
    "poisson": lambda d: torch.poisson(torch.full((40,), 9.0, device=d)),
    "dropout": lambda d: functional.dropout(torch.ones(40, device=d)),
    "a module's weights": lambda d: torch.nn.Linear(3, 3, device=d).weight.detach(),
}
FROM_HOST = {"randn_like", "rand_like", "dropout"}


def consumes_host(draw: Callable[[torch.device], torch.Tensor], device: torch.device) -> bool:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    draw(device)
    return not torch.equal(before, torch.get_rng_state())


@everywhere()
def test_draws_differ_from_one_another(accelerator: VirtualAccelerator) -> None:
    for name, draw in DRAWS.items():
        first, second = draw(accelerator.device()), draw(accelerator.device())
        assert first.device == accelerator.device(), name
        assert not torch.equal(first, second), name


@everywhere()
def test_draws_of_tensors_leave_the_host_alone(accelerator: VirtualAccelerator) -> None:
    for name in set(DRAWS) - FROM_HOST:
        assert not consumes_host(DRAWS[name], accelerator.device()), name


@everywhere()
def test_every_draw_leaves_the_host_alone(accelerator: VirtualAccelerator) -> None:
    assert not [name for name, draw in DRAWS.items() if consumes_host(draw, accelerator.device())]


@everywhere()
def test_manual_seed_repeats_on_every_device(accelerator: VirtualAccelerator) -> None:
    for device in (accelerator.device(0), accelerator.device(1)):
        for name, draw in DRAWS.items():
            torch.manual_seed(7)
            first = draw(device)
            torch.manual_seed(7)
            assert torch.equal(draw(device), first), (name, device)


@everywhere()
def test_the_vendors_module_seeds(accelerator: VirtualAccelerator) -> None:
    module, there = torch.get_device_module(accelerator.name), accelerator.device(1)
    module.manual_seed_all(3)
    first = torch.empty(3, device=there).normal_()
    module.manual_seed_all(3)
    assert torch.equal(torch.empty(3, device=there).normal_(), first)
    module.set_device(1)
    module.manual_seed(3)
    assert torch.equal(torch.empty(3, device=there).normal_(), first)
    state = module.get_rng_state()
    second = torch.empty(3, device=there).normal_()
    module.set_rng_state(state)
    assert torch.equal(torch.empty(3, device=there).normal_(), second)


@everywhere()
def test_the_state_of_a_device_by_its_number(accelerator: VirtualAccelerator) -> None:
    module, there = torch.get_device_module(accelerator.name), accelerator.device(1)
    state = module.get_rng_state(1)
    first = torch.empty(3, device=there).normal_()
    module.set_rng_state(state, 1)
    assert torch.equal(torch.empty(3, device=there).normal_(), first)


@everywhere()
def test_generators_belong_to_a_device(accelerator: VirtualAccelerator) -> None:
    there = accelerator.device(1)
    generator = torch.Generator(there)
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert generator.device == torch.Generator(device=str(there)).device == there
    assert torch.Generator(accelerator.name).device == accelerator.device(0)
    assert torch.Generator().device == torch.Generator("cpu").device == torch.device("cpu")
    assert generator.manual_seed(5).initial_seed() == 5


@everywhere()
def test_generators_draw_on_their_device(accelerator: VirtualAccelerator) -> None:
    there = accelerator.device(1)
    generator = torch.Generator(there).manual_seed(5)
    state = generator.get_state()
    first = torch.randn(3, generator=generator, device=there)
    assert first.device == there
    generator.set_state(state)
    assert torch.equal(torch.randn(3, generator=generator, device=there), first)
    assert torch.equal(torch.randn(3, generator=torch.Generator(there).manual_seed(5), device=there), first)


@everywhere()
def test_a_generator_of_the_host_is_refused(accelerator: VirtualAccelerator) -> None:
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, generator=torch.Generator(), device=accelerator.device())


@everywhere(broken="a generator of the device is taken for a draw on the host")
def test_a_generator_of_the_device_is_refused_on_the_host(accelerator: VirtualAccelerator) -> None:
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, generator=torch.Generator(accelerator.device()))


@everywhere()
def test_generators_can_be_copied(accelerator: VirtualAccelerator) -> None:
    generator = torch.Generator(accelerator.device(1)).manual_seed(3)
    for again in (copy.deepcopy(generator), generator.clone_state(), pickle.loads(pickle.dumps(generator))):
        assert again.device == accelerator.device(1)


@everywhere()
def test_a_generator_of_the_host_can_be_pickled(accelerator: VirtualAccelerator) -> None:
    assert pickle.loads(pickle.dumps(torch.Generator().manual_seed(3))).initial_seed() == 3
