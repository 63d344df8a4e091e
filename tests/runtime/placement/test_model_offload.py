"""Models that move to the device when they run, and back; changes on either side are kept."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from accelerate.hooks import ModelHook

from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.runtime.placement.model_offload import LoadHook, ModelLoader

DEVICE = torch.device("mps", 0)


def on_device(use: Callable[[ModelLoader], None]) -> None:
    def run(accelerator: VirtualAccelerator) -> None:
        with torch.no_grad():
            use(ModelLoader(DEVICE, lambda name, other: True))

    run_forked("mps", run)


def list_devices(model: torch.nn.Module) -> set[str]:
    return {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}


def test_weights_return_to_the_memory_they_came_from() -> None:
    def use(loader: ModelLoader) -> None:
        first, second = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)
        weight, address = first.weight, first.weight.data_ptr()
        loader.load("first", first)
        assert list_devices(first) == {"mps"}
        loader.load("second", second)
        assert (list_devices(first), list_devices(second)) == ({"cpu"}, {"mps"})
        assert first.weight is weight
        assert weight.data_ptr() == address
        loader.release_all()
        assert list_devices(second) == {"cpu"}

    on_device(use)


def test_changes_on_the_device_are_kept() -> None:
    def use(loader: ModelLoader) -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        model.register_buffer("count", torch.zeros(()))
        weights: list[Any] = [layer.weight for layer in model]
        expected = copy.deepcopy(model)
        views = [weight.detach() for weight in weights]
        loader.load("model", model)
        for target, device in ((model, "mps"), (expected, "cpu")):
            layers: list[Any] = list(target)
            layers[0].weight.add_(1)
            layers[1].weight.data[5, 5] += 1e-6  # no version counter, and too small for a float32 sum
            layers[2].weight.data = torch.ones(64, 64, device=device)
            layers[3].weight = torch.nn.Parameter(torch.ones(2, 2, device=device))
            layers[5].weight.data.neg_()
            layers[6].weight.data[:32].copy_(layers[6].weight.data[:32].flip(0).clone())
            layers[7].weight.data.mul_(2)
            target.count.add_(1)  # type: ignore[operator]
        loader.load("model", model)  # as at the next forward
        loader.release("model")
        assert list_devices(model) == {"cpu"}
        for name, value in expected.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
        assert torch.equal(views[0], weights[0]), "views of the weight see the change"
        assert torch.equal(views[1], weights[1])
        assert weights[4].data_ptr() == views[4].data_ptr()

    on_device(use)


def test_gradients_move_with_the_weights() -> None:
    def use(loader: ModelLoader) -> None:
        model = torch.nn.Linear(2, 2)
        model.weight.grad = torch.ones(2, 2)
        loader.load("model", model)
        assert model.weight.grad.device.type == "mps"
        loader.release("model")
        assert torch.equal(model.weight.grad, torch.ones(2, 2))
        assert model.bias.grad is None

    on_device(use)


def test_backward_through_several_models() -> None:
    """While gradients are enabled, a model does not replace another one that ran with gradients."""

    def use(loader: ModelLoader) -> None:
        first, second = torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 4)
        expected = first.weight.T @ second.weight.sum(0)
        inputs = torch.ones(4, device=DEVICE, requires_grad=True)
        with torch.enable_grad():
            loader.load("first", first)
            hidden = first(inputs)
            loader.load("second", second)
            assert (list_devices(first), list_devices(second)) == ({"mps"}, {"mps"})
            torch.autograd.backward(second(hidden).sum())
        assert inputs.grad is not None
        torch.testing.assert_close(inputs.grad.cpu(), expected)
        assert second.weight.grad is not None
        loader.load("second", second)
        assert (list_devices(first), list_devices(second)) == ({"cpu"}, {"mps"})
        loader.release_all()
        assert second.weight.grad.device.type == "cpu"

    on_device(use)


def test_a_model_moves_while_a_graph_refers_to_its_buffer() -> None:
    def use(loader: ModelLoader) -> None:
        model, scale = torch.nn.Module(), torch.ones(4)
        model.register_buffer("scale", scale)
        with torch.enable_grad():
            loader.load("model", model)
            output = torch.ones(4, device=DEVICE, requires_grad=True) * scale
        loader.release_all()
        assert list_devices(model) == {"cpu"}
        assert output.requires_grad

    on_device(use)


def test_weights_of_functional_call_are_used_and_returned() -> None:
    def use(loader: ModelLoader) -> None:
        model = torch.nn.Linear(2, 2, bias=False)
        hook = LoadHook(loader, "model")
        model.register_forward_pre_hook(lambda module, args: hook.pre_forward(module)[0] or None)
        given, x = {"weight": torch.full((2, 2), 5.0)}, torch.ones(1, 2).to("mps")
        expected = model.weight.detach().clone()
        for _ in range(2):
            output = torch.func.functional_call(model, given, (x,))
            assert torch.equal(output.cpu(), torch.full((1, 2), 10.0))
            assert torch.equal(model(x).cpu(), x.cpu() @ expected.t()), "the model's own weights must be loaded too"
        loader.release("model")
        assert given["weight"].device.type == "cpu"
        assert torch.equal(model.weight, expected)

    on_device(use)


class QuantizedParameter(torch.nn.Parameter):
    """A parameter with data in addition to `.data`, as in quantization libraries."""


class QuantizedLinear(torch.nn.Linear):
    """A layer with a quantized weight."""

    scale = torch.ones(())

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.scale = fn(self.scale)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def test_quantized_layers_move_as_a_whole() -> None:
    def use(loader: ModelLoader) -> None:
        model = torch.nn.Sequential(QuantizedLinear(2, 2))
        layer: Any = model[0]
        layer.weight = QuantizedParameter(layer.weight.detach())
        loader.load("model", model)
        assert layer.scale.device.type == "mps"
        loader.release("model")
        assert layer.scale.device.type == "cpu"
        assert list_devices(model) == {"cpu"}

    on_device(use)


def test_a_copy_of_the_hook_does_nothing() -> None:
    hook = LoadHook(ModelLoader(DEVICE, lambda name, other: True), "model")
    assert type(copy.deepcopy(hook)) is ModelHook
