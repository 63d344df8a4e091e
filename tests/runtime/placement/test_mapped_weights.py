"""Weights mapped from files: they need no memory until they are read, and can be changed."""

import copy
import io
import itertools
import pickle
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from anyaccel.processes.forked_call import call_in_fork
from anyaccel.runtime.placement import mapped_weights
from anyaccel.runtime.placement.mapped_weights import is_mapped, map_weights
from anyaccel.storage import temporary_file

SIDE = 2048
WEIGHT_KIB = SIDE * SIDE * 4 // 1024


def read_anonymous_kib() -> int:
    """Return the memory of this process that is not backed by files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_mapped_weights_use_memory_only_for_changes() -> None:
    def measure() -> list[float]:
        layer = torch.nn.Linear(SIDE, SIDE, bias=False)
        layer.weight.data.fill_(0.5)
        before = weakref.ref(layer.weight.untyped_storage())
        map_weights([layer])
        # Its memory may stay with torch's allocator, so the memory of the process does not decrease at once.
        assert before() is None, "the weights in memory were not freed"
        steps = [read_anonymous_kib()]
        layer.weight.detach().sum()  # reads every page
        steps.append(read_anonymous_kib())
        layer.weight.data[: SIDE // 2] = 1.0
        steps.append(read_anonymous_kib())
        return [(after - before) / WEIGHT_KIB for before, after in itertools.pairwise(steps)]

    read, changed = call_in_fork(measure)
    assert read == pytest.approx(0, abs=0.15), "reading must not allocate memory"
    assert changed == pytest.approx(0.5, abs=0.15), "only changed pages are copied"


def test_changes_are_not_written_to_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    layer = torch.nn.Linear(4, 4)
    map_weights([layer])
    assert not list(tmp_path.iterdir()), "the file is removed when it is mapped"

    monkeypatch.setattr(temporary_file, "_CAN_REMOVE_MAPPED_FILES", False)  # as on Windows
    other = torch.nn.Linear(4, 4)
    map_weights([other])
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    with torch.no_grad():
        other.weight.fill_(7)
    assert path.read_bytes() == before
    assert torch.equal(other.weight, torch.full((4, 4), 7.0))
    map_weights([torch.nn.Linear(4, 4)])
    assert not path.exists(), "files that can be removed are removed when the next file is written"


def test_parameters_keep_their_identity_values_and_strides() -> None:
    model: Any = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model.to(memory_format=torch.channels_last)
    model[1].to(torch.bfloat16)
    model[2].weight.data = torch.arange(18.0).reshape(3, 6)[:, ::2]  # a view with gaps
    model.register_parameter("scalar", torch.nn.Parameter(torch.tensor(3.0)))
    model.register_parameter("alias", torch.nn.Parameter(model[1].weight.data))
    model[1].weight.tag = "mine"
    before = [(parameter, parameter.detach().clone(), parameter.stride()) for parameter in model.parameters()]
    map_weights([model])
    for (parameter, value, stride), after in zip(before, model.parameters(), strict=True):
        assert after is parameter
        assert after.requires_grad
        assert is_mapped(after)
        assert torch.equal(after, value)
        assert after.untyped_storage().nbytes() == value.numel() * value.element_size(), "each weight has its storage"
        assert after.stride() == stride or after is model[2].weight
    assert model[1].weight.tag == "mine"
    assert model.alias.data_ptr() == model[1].weight.data_ptr()

    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    map_weights([model])
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses, "mapped twice"


def test_parameters_that_overlap_still_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_weights, "_FILE_BYTES", 1)  # one file for each block
    first: Any = torch.nn.Linear(4, 6)
    second: Any = torch.nn.Linear(4, 6)
    flat = torch.arange(100.0)
    first.weight.data = flat[10:34].view(6, 4)
    first.register_parameter("transposed", torch.nn.Parameter(first.weight.data.t()))
    first.register_parameter("rows", torch.nn.Parameter(first.weight.data[2:4]))
    first.register_parameter("expanded", torch.nn.Parameter(torch.ones(1).expand(3)))
    second.weight = torch.nn.Parameter(first.weight.data)
    second.register_parameter("tail", torch.nn.Parameter(flat[30:50]))
    second.bias.data = flat[50:56]  # beside the others, without an element in common
    before = [parameter.detach().clone() for model in (first, second) for parameter in model.parameters()]
    map_weights([first, second])
    after = [*first.parameters(), *second.parameters()]
    assert all(map(is_mapped, after))
    assert all(torch.equal(parameter, value) for parameter, value in zip(after, before, strict=True))
    assert first.transposed.stride() == (1, 4)
    assert second.bias.untyped_storage().nbytes() == second.bias.nbytes
    with torch.no_grad():
        first.weight[3, 1], first.weight[5, 3], first.expanded[0] = -1.0, -2.0, 5.0
        assert [first.transposed[1, 3], first.rows[1, 1], second.weight[3, 1]] == [-1.0] * 3
        assert second.tail[3] == -2.0
    assert first.expanded.tolist() == [5.0] * 3
    buffer = io.BytesIO()
    torch.save([first.state_dict(), second.state_dict()], buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()))
    assert loaded[0]["transposed"].data_ptr() == loaded[0]["weight"].data_ptr() == loaded[1]["weight"].data_ptr()


def test_mapped_weights_can_be_trained_copied_and_saved() -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = copy.deepcopy(model)
    other = torch.optim.SGD(expected.parameters(), lr=0.1)
    map_weights([model])
    x = torch.ones(3, 4)

    def train() -> None:
        for layer, step in ((model, optimizer), (expected, other)):
            layer(x).sum().backward()
            step.step()

        check(model, expected)

    call_in_fork(train)
    check(copy.deepcopy(model), expected)
    check(pickle.loads(pickle.dumps(model)), expected)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    assert len(buffer.getvalue()) < 5000, "only the weights are saved, not the whole file"


def check(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    for parameter, value in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, value)
