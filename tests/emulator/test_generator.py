"""Random numbers on a virtual device: generators and seeds; the CPU generator does not change."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from anyaccel.emulator.accelerator import VirtualAccelerator
from tests.emulator.forked import OnEveryDevice

on_every_device = OnEveryDevice()

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
WITHOUT_GENERATOR = {"randn_like", "rand_like", "dropout"}
"""Operations without a generator argument."""


def changes_cpu_generator(draw: Callable[[torch.device], torch.Tensor], device: torch.device) -> bool:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    draw(device)
    return not torch.equal(before, torch.get_rng_state())


@on_every_device()
def test_consecutive_draws_differ(accelerator: VirtualAccelerator) -> None:
    for name, draw in DRAWS.items():
        first, second = draw(accelerator.device()), draw(accelerator.device())
        assert first.device == accelerator.device(), name
        assert not torch.equal(first, second), name


@on_every_device()
def test_draws_with_a_generator_do_not_change_the_cpu_generator(accelerator: VirtualAccelerator) -> None:
    for name in set(DRAWS) - WITHOUT_GENERATOR:
        assert not changes_cpu_generator(DRAWS[name], accelerator.device()), name


@on_every_device()
def test_no_draw_changes_the_cpu_generator(accelerator: VirtualAccelerator) -> None:
    assert not [name for name, draw in DRAWS.items() if changes_cpu_generator(draw, accelerator.device())]


@on_every_device()
def test_manual_seed_repeats_on_every_device(accelerator: VirtualAccelerator) -> None:
    for device in (accelerator.device(0), accelerator.device(1)):
        for name, draw in DRAWS.items():
            torch.manual_seed(7)
            first = draw(device)
            torch.manual_seed(7)
            assert torch.equal(draw(device), first), (name, device)


@on_every_device()
def test_device_module_seeds_the_devices(accelerator: VirtualAccelerator) -> None:
    module, device = torch.get_device_module(accelerator.name), accelerator.device(1)
    module.manual_seed_all(3)
    first = torch.empty(3, device=device).normal_()
    module.manual_seed_all(3)
    assert torch.equal(torch.empty(3, device=device).normal_(), first)
    module.set_device(1)
    module.manual_seed(3)
    assert torch.equal(torch.empty(3, device=device).normal_(), first)
    state = module.get_rng_state()
    second = torch.empty(3, device=device).normal_()
    module.set_rng_state(state)
    assert torch.equal(torch.empty(3, device=device).normal_(), second)


@on_every_device()
def test_random_state_of_a_device_by_index(accelerator: VirtualAccelerator) -> None:
    module, device = torch.get_device_module(accelerator.name), accelerator.device(1)
    state = module.get_rng_state(1)
    first = torch.empty(3, device=device).normal_()
    module.set_rng_state(state, 1)
    assert torch.equal(torch.empty(3, device=device).normal_(), first)


@on_every_device()
def test_generators_report_their_device(accelerator: VirtualAccelerator) -> None:
    device = accelerator.device(1)
    generator = torch.Generator(device)
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert generator.device == torch.Generator(device=str(device)).device == device
    assert torch.Generator(accelerator.name).device == accelerator.device(0)
    assert torch.Generator().device == torch.Generator("cpu").device == torch.device("cpu")
    assert generator.manual_seed(5).initial_seed() == 5


@on_every_device()
def test_generators_draw_on_their_device(accelerator: VirtualAccelerator) -> None:
    device = accelerator.device(1)
    generator = torch.Generator(device).manual_seed(5)
    state = generator.get_state()
    first = torch.randn(3, generator=generator, device=device)
    assert first.device == device
    generator.set_state(state)
    assert torch.equal(torch.randn(3, generator=generator, device=device), first)
    assert torch.equal(torch.randn(3, generator=torch.Generator(device).manual_seed(5), device=device), first)


@on_every_device()
def test_generators_draw_other_values_than_the_cpu(accelerator: VirtualAccelerator) -> None:
    for seed in (0, 5, -1, 2**40):
        generator, cpu_generator = torch.Generator(accelerator.device()), torch.Generator()
        assert generator.initial_seed() == cpu_generator.initial_seed()
        generator.manual_seed(seed)
        cpu_generator.manual_seed(seed)
        drawn = torch.randn(3, generator=generator, device=accelerator.device())
        assert not torch.equal(drawn.cpu(), torch.randn(3, generator=cpu_generator))
        assert generator.initial_seed() == cpu_generator.initial_seed()


@on_every_device()
def test_cpu_generator_is_rejected_on_the_device(accelerator: VirtualAccelerator) -> None:
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, generator=torch.Generator(), device=accelerator.device())


@on_every_device(broken="a draw on the CPU accepts a generator of the device")
def test_device_generator_is_rejected_on_the_cpu(accelerator: VirtualAccelerator) -> None:
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, generator=torch.Generator(accelerator.device()))


@on_every_device()
def test_generators_can_be_copied(accelerator: VirtualAccelerator) -> None:
    generator = torch.Generator(accelerator.device(1)).manual_seed(3)
    for again in (copy.deepcopy(generator), generator.clone_state(), pickle.loads(pickle.dumps(generator))):
        assert again.device == accelerator.device(1)


@on_every_device()
def test_cpu_generator_can_be_pickled(accelerator: VirtualAccelerator) -> None:
    assert pickle.loads(pickle.dumps(torch.Generator().manual_seed(3))).initial_seed() == 3
