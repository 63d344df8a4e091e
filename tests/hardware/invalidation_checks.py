"""Checks that a placed pipeline follows a change like a stock pipeline, after graphs were captured."""

from __future__ import annotations

from typing import Any

import torch

import anyaccel
from anyaccel.forward_overrides import Slot, get_override
from anyaccel.recipes import recipes
from anyaccel.runtime.speed.graph_capture import GraphCapture
from tests.hardware import global_changes, module_changes, weight_changes
from tests.hardware.invalidation_cases import CASES, find_denoiser, generate

# Each module registers its cases when it is imported.
CHANGES = (weight_changes, module_changes, global_changes)
REPEATS = 3
"""Calls after which every recipe is captured: two warm-up runs, one capture, and some replays."""


def place(recipe: Any, device: str, **options: Any) -> Any:
    """Return a new placed pipeline with graph capture."""
    return anyaccel.place(recipe.make(), device, dtype="float32", capture=True, **options)


def assert_close(actual: Any, expected: Any, what: str, tolerance: float = 1e-3) -> None:
    """Compare two images; the tolerance is a share of the expected image's range."""
    assert actual.shape == expected.shape, what
    error = measure_difference(actual, expected)
    assert error <= tolerance, f"{what}: the images differ by {error:.2g}"


def measure_difference(actual: Any, expected: Any) -> float:
    """Return the largest difference as a share of the expected image's range."""
    return float((actual - expected).abs().max() / (expected.max() - expected.min()))


def find_capture(pipe: Any) -> GraphCapture:
    """Return the graph capture of a pipeline's denoiser."""
    capture = get_override(find_denoiser(pipe), Slot.CAPTURE)
    assert isinstance(capture, GraphCapture)
    return capture


def assert_captured(pipe: Any) -> None:
    """Check that the denoiser runs from a captured graph and that nothing requested runs uncompiled."""
    report = pipe.plan.report
    assert report.capture.value, report.capture
    assert report.not_compiled is None, report.not_compiled


def check_change(name: str, device: str, **options: Any) -> None:
    """Apply a change to a captured and to a stock pipeline, compare their images, undo it, and compare again."""
    case = CASES[name]
    recipe = recipes()[case.recipe]
    stock: Any = recipe.make().to(device)  # type: ignore[attr-defined]
    placed = place(recipe, device, **options)
    plain = generate(stock, recipe, **case.call)
    for _ in range(REPEATS):
        assert_close(generate(placed, recipe, **case.call), plain, "before the change")
    assert_captured(placed)
    graphs = list(find_capture(placed)._shapes.values())
    with case.change(stock):
        changed = generate(stock, recipe, **case.call)
    assert not case.visible or changed.shape != plain.shape or measure_difference(changed, plain) > 1e-2
    with case.change(placed):
        for count in range(REPEATS):
            image = generate(placed, recipe, **case.call)
            assert_close(image, changed, f"call {count} after the change", case.tolerance)
        if case.drops:
            current = list(find_capture(placed)._shapes.values())
            assert not any(shape is other for shape in current for other in graphs), "graphs were kept"
    for _ in range(REPEATS):
        assert_close(generate(placed, recipe, **case.call), plain, "after the change was undone")


def check_change_before_capture(name: str, device: str) -> None:
    """Apply a change while graphs are captured; they must not be used after it is undone."""
    case = CASES[name]
    recipe = recipes()[case.recipe]
    stock: Any = recipe.make().to(device)  # type: ignore[attr-defined]
    placed = place(recipe, device, compile=False)
    plain = generate(stock, recipe, **case.call)
    with case.change(stock):
        changed = generate(stock, recipe, **case.call)
    with case.change(placed):
        for _ in range(REPEATS):
            assert_close(generate(placed, recipe, **case.call), changed, "during the change", case.tolerance)
    assert_close(generate(placed, recipe, **case.call), plain, "after the change was undone")


def check_option_changes(device: str) -> None:
    """Place a captured pipeline again with other options, and with the first ones."""
    recipe = recipes()["stable-diffusion"]
    placed = place(recipe, device, compile=False)
    call = {"num_inference_steps": 8}
    exact = generate(placed, recipe, **call)
    for options in ({"speed": "fast"}, {"speed": "exact"}, {"attention_slicing": "max"}, {"channels_last": True}):
        placed.to(device, dtype="float32", **{"capture": True, "compile": False, **options})
        images = [generate(placed, recipe, **call) for _ in range(REPEATS)]
        assert_close(images[-1], images[0], f"{options}")
        if options.get("speed") == "fast":
            assert measure_difference(images[0], exact) > 1e-3, "fast skips steps"
        else:
            assert_close(images[0], exact, f"{options}")


def check_shared_denoiser(device: str) -> None:
    """Two pipelines with one denoiser, which is edited between their calls."""
    recipe = recipes()["stable-diffusion"]
    stock: Any = recipe.make().to(device)  # type: ignore[attr-defined]
    first = place(recipe, device, compile=False)
    second = anyaccel.DiffusionPipeline.from_pipe(first)
    for factor in (1.0, 1.5, 0.5):
        for pipe in (stock, first):
            pipe.unet.conv_in.weight.data = pipe.unet.conv_in.weight.data * factor
        expected = generate(stock, recipe)
        for pipe in (first, second) * REPEATS:
            assert_close(generate(pipe, recipe), expected, f"weights times {factor}")
    stock.unet.conv_out.weight.data.mul_(1.5)
    second.unet.conv_out.weight.data.mul_(1.5)
    del second
    assert_close(generate(first, recipe), generate(stock, recipe), "after one pipeline was deleted")


def make_denoiser_inputs(device: str, seed: int = 0) -> dict[str, Any]:
    """Return inputs for the UNet of the Stable Diffusion recipe."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "sample": torch.randn(2, 4, 8, 8, generator=generator).to(device),
        "timestep": torch.tensor(float(100 * seed + 1), device=device),
        "encoder_hidden_states": torch.randn(2, 7, 32, generator=generator).to(device),
    }


def check_direct_calls(device: str) -> None:
    """Call a captured denoiser with gradients, under autocast, with CPU arguments and with repeated arguments."""
    recipe = recipes()["stable-diffusion"]
    stock: Any = recipe.make().to(device)  # type: ignore[attr-defined]
    placed = place(recipe, device, compile=False)
    for _ in range(REPEATS):
        generate(placed, recipe)

    def compare(what: str, seed: int, tolerance: float = 1e-3, **changes: Any) -> Any:
        outputs = [pipe.unet(**{**make_denoiser_inputs(device, seed), **changes})[0] for pipe in (stock, placed)]
        assert_close(outputs[1].detach(), outputs[0].detach(), what, tolerance)
        return outputs[1]

    with torch.no_grad():
        for seed in range(5):
            compare("captured", seed)
        for seed in range(5):
            compare("timestep on the CPU", seed, timestep=torch.tensor(float(100 * seed + 1)))
        for seed in range(5):
            compare("timestep as a number", seed, timestep=100 * seed + 1)
        for seed in range(5):
            compare("strided", seed, sample=make_denoiser_inputs(device, seed)["sample"].transpose(2, 3))
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            compare("autocast", 1, 5e-2)
    with torch.inference_mode():
        compare("inference mode", 2)
    assert compare("gradients", 3).requires_grad
    with torch.no_grad():
        assert not compare("without gradients", 3).requires_grad


def check_denoiser_on_the_cpu(device: str) -> None:
    """Move a captured denoiser to the CPU, call it there, and move it back."""
    recipe = recipes()["stable-diffusion"]
    stock: Any = recipe.make()
    placed = place(recipe, device, compile=False)
    for _ in range(REPEATS):
        generate(placed, recipe)
    placed.unet.to("cpu")
    with torch.no_grad():
        for seed in range(6):
            inputs = make_denoiser_inputs("cpu", seed)
            assert_close(placed.unet(**inputs)[0].cpu(), stock.unet(**inputs)[0], f"on the CPU, seed {seed}")
    placed.unet.to(device)
    stock.to(device)
    for _ in range(REPEATS):
        assert_close(generate(placed, recipe), generate(stock, recipe), "moved back")
