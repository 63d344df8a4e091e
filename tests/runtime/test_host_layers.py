"""Layers as the host does them fastest: the same numbers, and layers that stay what they are."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import psutil
import pytest
import torch
from torch.nn import functional

from anyaccel.emulator.process import fork
from anyaccel.recipes import recipes
from anyaccel.runtime import host_layers
from anyaccel.runtime.pipeline import place


def convolution(**options: Any) -> torch.nn.Conv2d:
    return torch.nn.Conv2d(64, 64, **{"kernel_size": 3, "padding": 1, **options})


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (convolution(), True),
        (convolution(kernel_size=1, padding=0), True),
        (convolution(stride=2), False),
        (convolution(padding=0), False),
        (convolution(groups=2), False),
        (convolution(dilation=2, padding=2), False),
        (convolution(padding_mode="reflect"), False),
        (torch.nn.Linear(3, 3), False),
    ],
)
def test_which_layers_it_is_for(module: torch.nn.Module, expected: bool) -> None:
    assert host_layers.serves(module) is expected


@torch.no_grad()
@pytest.mark.parametrize("kernel", [1, 3])
def test_a_layer_stays_a_layer(kernel: int) -> None:
    layer = convolution(kernel_size=kernel, padding=kernel // 2)
    picture = torch.randn(2, 64, 32, 32)
    plain = layer(picture)
    host_layers.install(layer)
    torch.testing.assert_close(layer(picture), plain, rtol=1e-4, atol=1e-4)
    layer.weight.mul_(2)
    host_layers.install(layer)
    doubled = functional.conv2d(picture, layer.weight, layer.bias, padding=kernel // 2)
    torch.testing.assert_close(layer(picture), doubled, rtol=1e-4, atol=1e-4)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(other(picture), layer(picture), rtol=1e-4, atol=1e-4)
        other.weight.zero_()
        host_layers.install(other)
        assert layer.bias is not None
        assert (other(picture) - layer.bias.view(1, -1, 1, 1)).abs().max() < 1e-5, "its own weight, not the first one's"
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert half(picture.to(torch.bfloat16)).dtype is torch.bfloat16
    host_layers.remove(layer)
    assert "forward" not in vars(layer)
    assert layer not in host_layers._FILTERS


@torch.no_grad()
def test_a_compiler_is_given_the_plain_layers() -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn2 = torch.nn.ModuleDict({"to_k": torch.nn.Linear(32, 32)})
            self.layer = convolution()

        def forward(self, picture: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.attn2["to_k"](self.layer(picture))
            return made

    model, picture = Both(), torch.randn(2, 64, 32, 32)
    plain = model(picture)
    host_layers.install(model)
    called: set[str] = set()

    def look(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        called.update(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(model, backend=look, fullgraph=True)
    torch.testing.assert_close(compiled(picture), plain, rtol=1e-5, atol=1e-5)
    assert any("conv2d" in name for name in called), called
    torch._dynamo.reset()


def test_gradients_go_the_usual_way() -> None:
    def has_gradient() -> bool:
        layer = convolution()
        host_layers.install(layer)
        layer(torch.randn(2, 64, 32, 32)).sum().backward()
        return layer.weight.grad is not None

    assert fork(has_gradient), "in another process: torch counts devices at a process's first gradient, and never again"


def draw(pipe: Any, steps: int = 4) -> Any:
    return pipe(**{**recipes()["stable-diffusion"].call(), "num_inference_steps": steps}).images


def test_a_pipeline_makes_the_same_picture() -> None:
    recipe = recipes()["stable-diffusion"]
    expected = draw(recipe.make())
    pipe = place(recipe.make(), "cpu", dtype="float32", host_layers=True)
    draw(pipe, steps=2)
    assert not any(host_layers.is_installed(part) for part in pipe.unet.modules()), "too few steps to pay"
    assert abs(draw(pipe) - expected).max() < 1e-4
    assert pipe.plan.host_layers.value
    assert any(host_layers.is_installed(part) for part in pipe.unet.modules())
    pipe.to("cpu", host_layers=False)
    assert not any(host_layers.is_installed(part) for part in pipe.unet.modules())


@pytest.fixture
def turning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose products are faster with weights that were turned."""
    monkeypatch.setattr(host_layers, "measure_turning", lambda: 2.0)


@torch.no_grad()
@pytest.mark.usefixtures("turning")
def test_weights_lie_as_products_read_them() -> None:
    layer = torch.nn.Linear(96, 128)
    rows = torch.randn(5, 96)
    plain, before = layer(rows), layer.weight.clone()
    host_layers.install(layer)
    assert layer.weight.stride() == (1, 128)
    assert torch.equal(layer.weight, before)
    torch.testing.assert_close(layer(rows), plain)
    host_layers.remove(layer)
    assert layer.weight.is_contiguous()
    small = torch.nn.Linear(8, 128)
    host_layers.install(small)
    assert small.weight.is_contiguous()


def test_weights_are_turned_where_that_pays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ANYACCEL_CACHE", str(tmp_path))
    monkeypatch.setattr(host_layers, "_is_busy", lambda: False)
    host_layers.measure_turning.cache_clear()
    gain = host_layers.measure_turning()
    assert 0.01 < gain < 100
    layer = torch.nn.Linear(96, 128)
    host_layers.install(layer)
    assert layer.weight.is_contiguous() is (gain < 1.05)
    monkeypatch.setattr(host_layers, "_time", lambda *functions: pytest.fail("it was tried before"))
    host_layers.measure_turning.cache_clear()
    assert host_layers.measure_turning() == gain
    host_layers.measure_turning.cache_clear()


def test_what_is_tried_on_a_busy_host_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ANYACCEL_CACHE", str(tmp_path))
    monkeypatch.setattr(host_layers, "_is_busy", lambda: True)
    for taken in ([2.0, 1.0], [1.0, 1.0]):
        monkeypatch.setattr(host_layers, "_time", lambda *functions, taken=taken: taken)
        host_layers.measure_turning.cache_clear()
        assert host_layers.measure_turning() == taken[0]
    host_layers.measure_turning.cache_clear()
    host_layers.measure_gain.cache_clear()
    assert host_layers.measure_gain() is None
    host_layers.measure_gain.cache_clear()
    assert not list(tmp_path.iterdir())


def test_a_pipeline_can_be_saved_meanwhile(tmp_path: Path) -> None:
    recipe = recipes()["stable-diffusion"]
    pipe = place(recipe.make(), "cpu", dtype="float32", host_layers=True)
    made = draw(pipe)
    pipe.save_pretrained(tmp_path)
    again = place(type(pipe).from_pretrained(tmp_path), "cpu", dtype="float32", host_layers=True)
    assert (draw(again) == made).all()


@torch.no_grad()
@pytest.mark.usefixtures("turning")
def test_without_memory_for_a_second_form_weights_are_laid_out_alone() -> None:
    first, second = convolution(), torch.nn.Linear(64, 64)
    layers = torch.nn.Sequential(first, second)
    host_layers.install(layers)
    assert host_layers.is_installed(first)
    host_layers.install(layers, second_filters=False)
    assert not host_layers.is_installed(first)
    assert second.weight.stride() == (1, 64)


def test_a_trial_says_whether_it_pays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ANYACCEL_CACHE", str(tmp_path))
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval=None: 0.0)
    host_layers.measure_gain.cache_clear()
    gain = host_layers.measure_gain()
    assert gain is not None
    assert 0.01 < gain < 100
    monkeypatch.setattr(host_layers, "_try_out", lambda: pytest.fail("it was tried before"))
    host_layers.measure_gain.cache_clear()
    assert host_layers.measure_gain() == gain
    pipe = place(recipes()["stable-diffusion"].make(), "cpu", dtype="float32")
    assert pipe.plan.host_layers.value is (gain >= 1.1)
    assert f"{gain:.2f} times as fast" in pipe.plan.host_layers.reason
    host_layers.measure_gain.cache_clear()


def test_there_is_no_trial_while_others_keep_the_host_busy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ANYACCEL_CACHE", str(tmp_path))
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval=None: 90.0)
    host_layers.measure_gain.cache_clear()
    pipe = place(recipes()["stable-diffusion"].make(), "cpu", dtype="float32")
    assert not pipe.plan.host_layers.value
    assert "busy" in pipe.plan.host_layers.reason
    host_layers.measure_gain.cache_clear()


@torch.no_grad()
def test_a_prompt_is_projected_once() -> None:
    model = torch.nn.ModuleDict({"attn2": torch.nn.ModuleDict({"to_k": torch.nn.Linear(64, 64)})})
    layer: Any = model["attn2"]["to_k"]  # type: ignore[index]
    host_layers.install(model)
    prompt = torch.randn(2, 7, 64)
    first = layer(prompt)
    assert layer(prompt) is first
    first[:, :2] *= 3  # it is its caller's
    torch.testing.assert_close(layer(prompt), functional.linear(prompt, layer.weight, layer.bias))
    other = torch.randn(2, 7, 64)
    torch.testing.assert_close(layer(other), functional.linear(other, layer.weight, layer.bias))
    prompt.mul_(2)
    torch.testing.assert_close(layer(prompt), functional.linear(prompt, layer.weight, layer.bias))
    layer.weight.mul_(2)
    torch.testing.assert_close(layer(prompt), functional.linear(prompt, layer.weight, layer.bias))
    layer.bias.add_(1)
    torch.testing.assert_close(layer(prompt), functional.linear(prompt, layer.weight, layer.bias))
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(layer(prompt), functional.linear(prompt, layer.weight, layer.bias))
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        copied.weight.zero_()
        torch.testing.assert_close(copied(prompt), layer.bias.expand(2, 7, 64))
    host_layers.remove(model)
    assert "forward" not in vars(layer)


def wide_unet() -> Any:
    library: Any = diffusers
    torch.manual_seed(0)
    return library.UNet2DModel(
        block_out_channels=(64, 64), layers_per_block=1, norm_num_groups=8, sample_size=32, in_channels=3,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    ).eval()  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("how", ["written", "behind torch's back", "turned around", "some rows", "another", "a copy"])
def test_filters_that_changed_are_done_again(how: str) -> None:
    unet = wide_unet()
    picture = torch.randn(1, 3, 32, 32)
    host_layers.install(unet)
    first = unet(picture, 5).sample
    changed = copy.deepcopy(unet) if how == "a copy" else unet
    for part in changed.modules():
        if isinstance(part, torch.nn.Conv2d) and part.kernel_size == (3, 3):
            if how == "behind torch's back":
                part.weight.data.mul_(0.8)
            elif how == "turned around":
                part.weight.data.copy_(part.weight.data.flip(2))
            elif how == "some rows":
                part.weight.detach().numpy()[3::8] = 0
            elif how == "another":
                part.weight = torch.nn.Parameter(part.weight * 0.8)
            else:
                part.weight.mul_(0.8)
    if how in ("behind torch's back", "turned around", "some rows"):
        host_layers.install(changed)  # as every call of a pipeline does
    made = changed(picture, 5).sample
    plain = copy.deepcopy(changed)
    host_layers.remove(plain)
    torch.testing.assert_close(made, plain(picture, 5).sample, rtol=1e-3, atol=1e-3)
    assert (made - first).abs().max() > 1e-2
    if how == "a copy":
        torch.testing.assert_close(unet(picture, 5).sample, first)


@torch.no_grad()
def test_weights_that_are_exchanged_twice_are_seen() -> None:
    unet, picture = wide_unet(), torch.randn(1, 3, 32, 32)
    host_layers.install(unet)
    unet(picture, 5)
    for turn in range(3):
        for part in unet.modules():
            if isinstance(part, torch.nn.Conv2d):
                part.weight.data = part.weight.data * (1 + turn)  # the next one may get the first one's memory
                part.weight.data = part.weight.data + 0.001
        plain = copy.deepcopy(unet)
        host_layers.remove(plain)
        torch.testing.assert_close(unet(picture, 5).sample, plain(picture, 5).sample, rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("name", ["forward", "_conv_forward"])
def test_what_is_exchanged_for_all_convolutions_is_done(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unet, picture, before = wide_unet(), torch.randn(1, 3, 32, 32), getattr(torch.nn.Conv2d, name)
    host_layers.install(unet)
    monkeypatch.setattr(torch.nn.Conv2d, name, lambda *given: before(*given) * 0.9)
    plain = copy.deepcopy(unet)
    host_layers.remove(plain)
    torch.testing.assert_close(unet(picture, 5).sample, plain(picture, 5).sample, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_what_a_model_gives_can_be_viewed_as_before() -> None:
    library: Any = diffusers
    unet, vae = wide_unet(), library.AutoencoderKL(block_out_channels=(64,), norm_num_groups=8).eval()
    host_layers.install(unet)
    host_layers.install(vae)
    picture = torch.randn(1, 3, 32, 32)
    latents = vae.encode(picture).latent_dist.mean
    for made in (unet(picture, 5).sample, latents, vae.decode(latents).sample):
        assert made.is_contiguous()


def test_a_pickle_does_not_carry_the_second_form() -> None:
    unet = wide_unet()
    before = len(pickle.dumps(unet))
    host_layers.install(unet)
    with torch.no_grad():
        unet(torch.randn(1, 3, 32, 32), 5)
    assert len(pickle.dumps(unet)) < before * 1.1


def test_short_calls_see_weights_that_changed() -> None:
    recipe = recipes()["stable-diffusion"]
    pipe = place(recipe.make(), "cpu", dtype="float32", host_layers=True)
    draw(pipe)
    with torch.no_grad():
        for part in pipe.unet.modules():
            if isinstance(part, torch.nn.Conv2d):
                part.weight.mul_(0.9)
    short = draw(pipe, steps=2)
    pipe.to("cpu", host_layers=False)
    assert abs(draw(pipe, steps=2) - short).max() < 1e-4


def test_inference_mode() -> None:
    recipe = recipes()["stable-diffusion"]
    expected = draw(place(recipe.make(), "cpu", dtype="float32", host_layers=False))
    with torch.inference_mode():
        pipe = place(recipe.make(), "cpu", dtype="float32", host_layers=True)
        made = [draw(pipe) for _ in range(3)]
    for one in made:
        assert abs(one - expected).max() < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(
    "options",
    [{"stride": 2}, {"stride": 2, "padding": 0}, {"kernel_size": 7, "padding": 3}, {"dilation": 2, "padding": 2},
     {"bias": False}, {"kernel_size": 1, "padding": 0, "stride": 2}, {}],
)  # fmt: skip
def test_all_other_convolutions_keep_a_packed_weight(
    options: dict[str, Any], packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packs:
        monkeypatch.setattr(host_layers, "can_pack", lambda: False)
    given = {"kernel_size": 3, "padding": 1, **options}
    layer = torch.nn.Conv2d(4, 24, **given)
    pictures = [torch.randn(2, 4, side, side) for side in (8, 9, 12, 16, 20, 24)]
    expected = [layer(picture) for picture in pictures]
    host_layers.install(layer)
    assert host_layers.is_installed(layer)
    for _ in range(2):
        for picture, plain in zip(pictures, expected, strict=True):
            torch.testing.assert_close(layer(picture), plain, rtol=1e-5, atol=1e-5)
    kept = host_layers._FILTERS.get(layer)
    if packs and host_layers.can_pack():
        assert kept is not None
        assert 0 < len(kept.packed) <= 4, "not one for each shape that ever came"
    else:
        assert kept is None
    layer.weight.mul_(2)
    doubled = functional.conv2d(
        pictures[0], layer.weight, layer.bias, stride=layer.stride, padding=given["padding"], dilation=layer.dilation
    )
    torch.testing.assert_close(layer(pictures[0]), doubled, rtol=1e-5, atol=1e-5)
    host_layers.remove(layer)
    assert layer not in host_layers._FILTERS


def test_convolutions_that_do_more_are_left_alone() -> None:
    for options in ({"groups": 2}, {"padding_mode": "reflect"}, {"padding": "same"}):
        layer = convolution(**options)
        host_layers.install(layer)
        assert not host_layers.is_installed(layer), options


class _Louder(torch.nn.Conv2d):
    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        return super().forward(picture) * 2


def _pad_around(layer: Any) -> None:
    layer.padding_mode = "circular"


def _convolve_otherwise(layer: Any) -> None:
    layer._conv_forward = lambda picture, weight, bias: torch.nn.functional.conv2d(picture, weight, None, padding=1)


def _exchange_class(layer: Any) -> None:
    layer.__class__ = _Louder


@torch.no_grad()
@pytest.mark.parametrize("change", [_pad_around, _convolve_otherwise, _exchange_class])
@pytest.mark.parametrize("early", [True, False])
def test_a_convolution_that_was_given_another_way_goes_it(change: Callable[[Any], None], early: bool) -> None:
    layer = convolution()
    plain, picture = copy.deepcopy(layer), torch.randn(2, layer.in_channels, 16, 16)
    if early:
        change(layer)
    host_layers.install(layer)
    before = layer(picture)
    if not early:
        change(layer)
        assert not host_layers.install(layer), "what was recorded of it no longer holds"
        assert (layer(picture) - before).abs().max() > 1e-2
    change(plain)
    assert not host_layers.is_installed(layer)
    torch.testing.assert_close(layer(picture), plain(picture), rtol=1e-4, atol=1e-4)  # weights may lie another way


@torch.no_grad()
def test_a_product_whose_class_was_exchanged_is_done_by_it() -> None:
    class Louder(torch.nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows) * 2

    model = torch.nn.Module()
    model.attn2 = torch.nn.Module()
    layer = model.attn2.to_k = torch.nn.Linear(8, 8)
    rows = torch.randn(3, 8)
    host_layers.install(model)
    before = layer(rows)
    assert host_layers.is_installed(layer)
    layer.__class__ = Louder
    assert not host_layers.install(model)
    torch.testing.assert_close(layer(rows), before * 2)
