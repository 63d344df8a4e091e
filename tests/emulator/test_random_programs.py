"""Random programs give the same tensors on the host and on every virtual device: values, shapes, strides, aliasing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from tests.emulator.forked import DEVICES
from tests.emulator.program import NAMES, Instruction, run_program

EXAMPLES = 150
PHASES = (Phase.generate, Phase.shrink)

NUMBER = st.integers(0, 11)
PROGRAM = st.lists(st.tuples(st.sampled_from(NAMES), st.tuples(NUMBER, NUMBER, NUMBER)), min_size=3, max_size=25)


def _aliases(pool: list[torch.Tensor]) -> list[list[bool]]:
    places = [tensor.untyped_storage().data_ptr() for tensor in pool]
    return [[first == second for second in places] for first in places]


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype


def _compare(program: list[Instruction], device: torch.device) -> None:
    expected, refused = run_program(program, torch.device("cpu"))
    found, refused_there = run_program(program, device)
    assert refused_there == refused, "one refused what the other did"
    assert [_form(tensor) for tensor in found] == [_form(tensor) for tensor in expected]
    assert _aliases(found) == _aliases(expected), "the tensors share memory differently"
    for place, (virtual, host) in enumerate(zip(found, expected, strict=True)):
        assert virtual.device == device
        moved = virtual.cpu()
        same = torch.allclose(moved, host) if host.is_floating_point() else torch.equal(moved, host)
        assert same, f"tensor {place} is {moved} and should be {host}"


def _tell(program: list[Instruction]) -> None:
    """Put the program into the error's notes; Schemathesis takes Hypothesis's own way of printing it out."""
    note(f"program={program}")


def _search(accelerator: VirtualAccelerator) -> int:
    """Try many programs; the error of a failure carries the shortest program that shows it."""
    tried = 0

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        phases=PHASES,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(PROGRAM)
    def check(program: list[Instruction]) -> None:
        nonlocal tried
        tried += 1
        _tell(program)
        _compare(program, accelerator.device(0))

    with torch.no_grad():
        check()
    assert accelerator.memory.used(0) == 0, "memory was left behind"
    return tried


@pytest.mark.parametrize("device", DEVICES)
def test_random_programs_agree_with_the_host(device: str) -> None:
    assert run_forked(device, _search, memory="1GiB") >= EXAMPLES


def test_a_failure_arrives_with_its_program() -> None:
    def fail(accelerator: VirtualAccelerator) -> None:
        @settings(max_examples=20, derandomize=True, deadline=None, database=None, phases=PHASES)
        @given(PROGRAM)
        def check(program: list[Instruction]) -> None:
            _tell(program)
            raise AssertionError(f"{len(program)} instructions")

        check()

    with pytest.raises(AssertionError, match="3 instructions") as caught:
        run_forked("npu", fail)
    assert any("program=[" in note for note in caught.value.__notes__)
