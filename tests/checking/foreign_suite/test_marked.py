"""Tests with the `accelerator` marker."""

import os

import pytest
import torch


@pytest.mark.accelerator("mps", "neuron")
def test_in_a_separate_process(accelerator):
    assert accelerator.virtual
    ones = torch.ones(3).to(accelerator.device)
    assert ones.device.type == accelerator.name
    accelerator.ledger.assert_clean()


@pytest.mark.accelerator("neuron")
def test_the_ledger_records_a_violation(accelerator):
    torch.ones(3, dtype=torch.float64).to(accelerator.device)
    accelerator.ledger.assert_clean("error")


@pytest.mark.accelerator("mps", strict=True)
def test_strict_raises(accelerator):
    with pytest.raises(TypeError):
        torch.ones(3, dtype=torch.float64).to(accelerator.device)


@pytest.mark.accelerator("hpu")
def test_that_kills_its_process(accelerator):
    os._exit(7)


def test_that_is_not_marked():
    torch.set_num_threads(2)
    big = torch.ones(600, 600)
    assert (big @ big)[0, 0] == 600
    assert not hasattr(torch, "neuron")
