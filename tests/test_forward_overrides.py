"""Modules with overrides still work with torch, accelerate, diffusers and user hooks."""

import copy
import gc
import inspect
import operator
import pickle
import subprocess
import sys
import typing
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook as AccelerateHook
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from diffusers.hooks.hooks import HookRegistry, ModelHook

from anyaccel.forward_overrides import (
    ForwardOverrides,
    Slot,
    get_override,
    refresh_overrides,
    remove_override,
    set_override,
)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, sample: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return torch.nn.functional.silu(self.layer(sample)) * scale


class AddOne:
    """An override that counts its calls and adds 1 to the output."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls += 1
        return forward(*args, **kwargs) + 1


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval().requires_grad_(False)


@pytest.fixture
def sample() -> torch.Tensor:
    return torch.linspace(-1, 1, 6).reshape(2, 3)


@pytest.fixture
def plain(model: Model, sample: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(sample)
    return output


@pytest.fixture
def override(model: Model, plain: torch.Tensor) -> AddOne:
    added = AddOne()
    set_override(model, Slot.CAPTURE, added)
    return added


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_overrides_run_in_the_order_of_their_slots(model: Model, sample: torch.Tensor, plain: torch.Tensor) -> None:
    order: list[str] = []

    def note(name: str) -> Any:
        def run(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            order.append(name)
            return forward(*args, **kwargs)

        return run

    for slot in (Slot.COMPILE, Slot.INPUTS, Slot.BATCHING):
        set_override(model, slot, note(slot.name))
    assert torch.equal(model(sample), plain)
    assert order == ["INPUTS", "BATCHING", "COMPILE"]
    set_override(model, Slot.BATCHING, note("another"))
    order.clear()
    model(sample)
    assert order == ["INPUTS", "another", "COMPILE"]


def test_removing_an_override_restores_the_module(
    model: Model, sample: torch.Tensor, plain: torch.Tensor, override: AddOne
) -> None:
    assert torch.equal(model(sample), plain + 1)
    assert get_override(model, Slot.CAPTURE) is override
    remove_override(model, Slot.CAPTURE)
    remove_override(model, Slot.CAPTURE)
    assert "forward" not in vars(model)
    assert torch.equal(model(sample), plain)


def test_signature_is_that_of_the_model(model: Model, override: AddOne) -> None:
    assert list(inspect.signature(model.forward).parameters) == ["sample", "scale"]
    assert inspect.signature(model.forward).parameters["scale"].default == 1.0


def test_a_deep_copy_runs_its_own_weights(
    model: Model, sample: torch.Tensor, plain: torch.Tensor, override: AddOne
) -> None:
    copied = copy.deepcopy(model)
    assert torch.equal(copied(sample), plain), "a copy starts without overrides"
    copied.layer.weight.zero_()
    copied.layer.bias.zero_()
    assert torch.equal(copied(sample), torch.zeros_like(plain))
    assert torch.equal(model(sample), plain + 1)
    set_override(copied, Slot.CAPTURE, AddOne())
    assert torch.equal(copied(sample), torch.ones_like(plain))


def test_a_shallow_copy_runs_its_own_layers(
    model: Model, sample: torch.Tensor, plain: torch.Tensor, override: AddOne
) -> None:
    copied = copy.copy(model)
    copied._modules = dict(copied._modules)
    copied.layer = torch.nn.Identity()  # type: ignore[assignment]
    assert torch.equal(copied(sample), torch.nn.functional.silu(sample))
    assert torch.equal(model(sample), plain + 1)
    alive = weakref.ref(model)
    set_override(copied, Slot.CAPTURE, AddOne())
    assert torch.equal(copied(sample), torch.nn.functional.silu(sample) + 1)
    assert alive() is not None
    assert get_override(model, Slot.CAPTURE) is override


def test_a_copy_of_the_attributes_gets_overrides_of_its_own(
    model: Model, sample: torch.Tensor, override: AddOne
) -> None:
    copied = Model.__new__(Model)
    vars(copied).update(vars(model))
    copied._modules = {"layer": torch.nn.Identity()}
    assert get_override(copied, Slot.CAPTURE) is None
    set_override(copied, Slot.INPUTS, AddOne())
    assert torch.equal(copied(sample), torch.nn.functional.silu(sample) + 1)
    assert get_override(model, Slot.CAPTURE) is override


def test_forward_can_be_inspected_like_a_method(model: Model, override: AddOne) -> None:
    method = Model().forward
    for read in (
        inspect.getsource, inspect.ismethod, inspect.signature, typing.get_type_hints, inspect.getdoc,
        operator.attrgetter("__qualname__"), operator.attrgetter("__module__"), operator.attrgetter("__name__"),
    ):  # fmt: skip
        assert read(model.forward) == read(method)
    assert operator.attrgetter("__self__")(model.forward) is model
    assert not hasattr(model.forward, "__wrapped__")


def test_a_pickle_runs_its_own_weights(
    model: Model, sample: torch.Tensor, plain: torch.Tensor, override: AddOne
) -> None:
    copied = pickle.loads(pickle.dumps(model))
    copied.layer.weight.zero_()
    copied.layer.bias.zero_()
    assert torch.equal(copied(sample), torch.zeros_like(plain))
    set_override(copied, Slot.CAPTURE, AddOne())
    assert torch.equal(copied(sample), torch.ones_like(plain))


def test_saved_module_loads_without_anyaccel(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    set_override(layer, Slot.CAPTURE, AddOne())
    torch.save(layer, tmp_path / "layer.pt")
    program = (
        "import sys; import torch; sys.modules['anyaccel'] = None; "
        f"layer = torch.load({str(tmp_path / 'layer.pt')!r}, weights_only=False); "
        "print(tuple(layer(torch.ones(1, 2)).shape))"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert process.stdout.strip() == "(1, 2)", process.stderr


def test_overrides_do_not_run_in_a_frame_that_dynamo_skips(
    model: Model,
    sample: torch.Tensor,
    plain: torch.Tensor,
    override: AddOne,
    fresh_dynamo: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Dynamo skips frames that it cannot trace, and compiles the functions that they call. It must not trace overrides.
    original = ForwardOverrides.__call__
    skipped = FunctionType(original.__code__.replace(), original.__globals__)
    disable: Any = torch.compiler.disable
    monkeypatch.setattr(ForwardOverrides, "__call__", disable(skipped, recursive=False))
    model.compile(backend="eager")
    torch.testing.assert_close(model(sample), plain)
    assert override.calls == 0


def test_full_graph_compile_by_the_user(
    model: Model, sample: torch.Tensor, plain: torch.Tensor, override: AddOne, fresh_dynamo: None
) -> None:
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(sample), plain)
    assert override.calls == 0, "overrides do not run while torch traces"
    assert torch.equal(model(sample), plain + 1)


@pytest.mark.parametrize("strict", [True, False])
def test_export(
    model: Model, sample: torch.Tensor, plain: torch.Tensor, override: AddOne, strict: bool, fresh_dynamo: None
) -> None:
    exported = torch.export.export(model, (sample,), {"scale": 1.0}, strict=strict)
    torch.testing.assert_close(exported.module()(sample, scale=1.0), plain)
    assert override.calls == 0


def test_vmap(model: Model, sample: torch.Tensor, plain: torch.Tensor, override: AddOne) -> None:
    torch.testing.assert_close(torch.vmap(model)(sample), plain)
    assert override.calls == 0


def test_jit_trace(model: Model, sample: torch.Tensor, plain: torch.Tensor, override: AddOne) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        trace: Any = torch.jit.trace
        traced = trace(model, sample, check_trace=False)
    torch.testing.assert_close(traced(sample), plain)
    assert override.calls == 0


def test_user_hooks_added_before_and_after(model: Model, sample: torch.Tensor, plain: torch.Tensor) -> None:
    model.register_forward_hook(lambda module, args, output: output * 2)
    set_override(model, Slot.CAPTURE, AddOne())
    model.register_forward_pre_hook(lambda module, args: (args[0] + 0,))
    model.register_forward_hook(lambda module, args, output: output + 3)
    torch.testing.assert_close(model(sample), (plain + 1) * 2 + 3)


class Times(AccelerateHook):  # type: ignore[misc]
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        return output * self.factor


class DiffusersTimes(ModelHook):
    def __init__(self, factor: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.factor = factor

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        return output * self.factor


def add_accelerate(module: torch.nn.Module) -> Callable[[], None]:
    add_hook_to_module(module, Times(10))
    return lambda: remove_hook_from_module(module)


def add_diffusers(module: torch.nn.Module) -> Callable[[], None]:
    registry = HookRegistry.check_if_exists_or_initialize(module)
    registry.register_hook(DiffusersTimes(10), "times")
    return lambda: registry.remove_hook("times")


ADDERS = pytest.mark.parametrize("add", [add_accelerate, add_diffusers])


@ADDERS
def test_hooks_added_first_stay_beneath(model: Model, sample: torch.Tensor, plain: torch.Tensor, add: Any) -> None:
    remove = add(model)
    set_override(model, Slot.CAPTURE, AddOne())
    torch.testing.assert_close(model(sample), plain * 10 + 1)
    remove()
    refresh_overrides(model)
    torch.testing.assert_close(model(sample), plain + 1)
    remove_override(model, Slot.CAPTURE)
    torch.testing.assert_close(model(sample), plain)


@ADDERS
def test_hooks_added_later_come_beneath(
    model: Model, sample: torch.Tensor, plain: torch.Tensor, override: AddOne, add: Any
) -> None:
    remove = add(model)
    torch.testing.assert_close(model(sample), (plain + 1) * 10)
    refresh_overrides(model)
    torch.testing.assert_close(model(sample), plain * 10 + 1)
    calls = override.calls
    remove()
    torch.testing.assert_close(
        model(sample), plain
    )  # the hook restored an older forward, which passes calls through until the next refresh
    refresh_overrides(model)
    torch.testing.assert_close(model(sample), plain + 1)
    assert override.calls == calls + 1


@ADDERS
def test_overrides_are_removed_from_around_a_hook(
    model: Model, sample: torch.Tensor, plain: torch.Tensor, override: AddOne, add: Any
) -> None:
    remove = add(model)
    refresh_overrides(model)
    remove_override(model, Slot.CAPTURE)
    torch.testing.assert_close(model(sample), plain * 10)
    remove()
    torch.testing.assert_close(model(sample), plain)


def test_two_diffusers_hooks_and_the_inner_one_removed(
    model: Model, sample: torch.Tensor, plain: torch.Tensor, override: AddOne
) -> None:
    registry = HookRegistry.check_if_exists_or_initialize(model)
    registry.register_hook(DiffusersTimes(10), "inner")
    refresh_overrides(model)
    registry.register_hook(DiffusersTimes(7), "outer")
    refresh_overrides(model)
    torch.testing.assert_close(model(sample), plain * 70 + 1)
    registry.remove_hook("inner")
    refresh_overrides(model)
    torch.testing.assert_close(model(sample), plain * 7 + 1)


def test_a_class_patched_later_is_used(
    model: Model, sample: torch.Tensor, plain: torch.Tensor, override: AddOne, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "forward", lambda self, sample, scale=1.0: sample * 5)
    assert torch.equal(model(sample), sample * 5 + 1)
    copied = copy.deepcopy(model)
    monkeypatch.setattr(Model, "forward", lambda self, sample, scale=1.0: sample * 6)
    assert torch.equal(copied(sample), sample * 6)


def test_a_module_is_released_without_a_garbage_collection(sample: torch.Tensor) -> None:
    model = Model()
    set_override(model, Slot.CAPTURE, AddOne())
    model(sample)
    alive = weakref.ref(model)
    forward = model.forward
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()
    assert isinstance(forward, ForwardOverrides)
    with pytest.raises(ReferenceError):
        forward(sample)


@pytest.mark.parametrize("forward", [staticmethod(torch.sin), classmethod(lambda cls, value: torch.sin(value))])
def test_a_forward_that_is_no_method(forward: Any) -> None:
    kind = type("Sine", (torch.nn.Module,), {"forward": forward})
    module: Any = kind()
    set_override(module, Slot.INPUTS, lambda run, args, kwargs: run(*args, **kwargs) * 2)
    assert torch.equal(module(torch.ones(2)), torch.ones(2).sin() * 2)
