"""Memory planning: order of the rules, predicted peaks, and the first rule that fits."""

from dataclasses import replace

import pytest

from anyaccel.planning.attention import AttentionRule
from anyaccel.planning.footprint import Footprint, MemorySavings, ModelCall, ModelSize
from anyaccel.planning.kernel_workspace import Workspace
from anyaccel.planning.memory import (
    MemoryRule,
    choose_memory,
    choose_residence,
    find_largest_batch,
    list_residences,
    list_rules,
    predict,
)
from anyaccel.planning.options import PlacementOptions
from anyaccel.units import readable

MODELS = tuple(
    ModelSize(name=name, kind="Model", parameters=size, weights_bytes=size, layer_bytes=size // 10)
    for name, size in (("text_encoder", 100), ("unet", 500), ("vae", 50), ("safety_checker", 30))
)
DISCRETE, UNIFIED = list_residences(unified_memory=False), list_residences(unified_memory=True)


def measure(savings: MemorySavings, images: int, images_per_call: int | None = None, /) -> Footprint:
    """Return a pipeline with activations of 10, 40 and 200 bytes per image; tiles and slices reduce them."""
    at_a_time = min(images, images_per_call or images)
    decode = 200 * at_a_time if not savings.vae_in_parts else 60
    denoise = (40 if not savings.sliced_attention else 20) * at_a_time
    model_calls = (
        ModelCall("text_encoder", "encode", 10 * images),
        ModelCall("unet", "denoise", denoise),
        ModelCall("vae", "decode", decode),
        ModelCall("safety_checker", "decode", 5),
    )
    return Footprint(
        pipeline="Pipeline", dtype="float16", size=(512, 512), images=images, models=MODELS, model_calls=model_calls,
        offload_order=("text_encoder", "image_encoder", "unet", "vae"), never_offloaded=("safety_checker",),
    )  # fmt: skip


def test_peaks_of_each_residence() -> None:
    plain = measure(MemorySavings(), 1)
    assert predict(plain, "resident") == {"load": 680, "encode": 690, "denoise": 720, "decode": 880}
    assert predict(plain, "component") == {"load": 30, "encode": 140, "denoise": 570, "decode": 280}
    assert predict(plain, "layer") == {"load": 30, "encode": 50, "denoise": 120, "decode": 235}
    whole = replace(plain, never_streamed=("vae",))
    assert predict(whole, "layer") == {"load": 80, "encode": 100, "denoise": 170, "decode": 280}
    assert predict(whole, "component") == predict(plain, "component")
    offloadable = replace(plain, never_offloaded=())
    assert predict(offloadable, "phase") == {"load": 0, "encode": 110, "denoise": 540, "decode": 280}


def test_captured_graphs_hold_memory_in_all_phases() -> None:
    held = {"load": 720, "encode": 730, "denoise": 720, "decode": 920}
    assert predict(measure(MemorySavings(), 1), "resident", recorded=True) == held


def test_model_that_runs_again_stays_where_diffusers_leaves_it() -> None:
    model_calls = (ModelCall("vae", "encode", 1), ModelCall("unet", "denoise", 1), ModelCall("vae", "decode", 1))
    footprint = replace(measure(MemorySavings(), 1), model_calls=model_calls)
    # The VAE comes after the denoiser in the offload order, so the denoiser does not offload it.
    assert predict(footprint, "component")["denoise"] == 30 + 50 + 500 + 1
    assert predict(footprint, "component")["decode"] == 30 + 50 + 1


def test_order_of_the_rules() -> None:
    order = [str(rule) for rule in list_rules(1, PlacementOptions(), DISCRETE)]
    assert order == [
        "everything resident",
        "everything resident, VAE tiled",
        "everything resident, VAE tiled, attention one head at a time",
        "one model at a time",
        "one model at a time, VAE tiled",
        "one model at a time, VAE tiled, attention one head at a time",
        "one layer at a time",
        "one layer at a time, VAE tiled",
        "one layer at a time, VAE tiled, attention one head at a time",
    ]
    unified = {rule.residence for rule in list_rules(1, PlacementOptions(), UNIFIED)}
    assert unified == {"resident", "phase", "layer"}, "offloading to the CPU frees nothing with unified memory"
    split = [
        rule.images_per_call for rule in list_rules(4, PlacementOptions(), DISCRETE) if rule.residence == "component"
    ]
    assert split == [None] * 3 + [2] * 3 + [1] * 3


@pytest.mark.parametrize(
    ("capacity", "images", "expected"),
    [
        (880, 1, MemoryRule()),
        (879, 1, MemoryRule("resident", MemorySavings(True))),
        (739, 1, MemoryRule("component")),
        (569, 1, MemoryRule("component", MemorySavings(True, True))),
        (549, 1, MemoryRule("layer")),
        (700, 4, MemoryRule("component", MemorySavings(True))),
        (640, 4, MemoryRule("component", MemorySavings(True, True))),
        (580, 4, MemoryRule("component", MemorySavings(True, True), 2)),
        (119, 1, MemoryRule("layer", MemorySavings(True, True))),
        (99, 1, None),
    ],
)
def test_first_rule_that_fits_is_chosen(capacity: int, images: int, expected: MemoryRule | None) -> None:
    decision, peaks = choose_memory(measure, images, capacity, list_rules(images, PlacementOptions(), DISCRETE))
    assert decision.value == expected
    assert (max(peaks.values()) <= capacity) == (expected is not None)
    assert readable(capacity) in decision.reason


def test_pinned_options_are_in_every_rule() -> None:
    pinned = PlacementOptions(memory="component", vae_tiling=True, images_per_call=1, attention_slicing="auto")
    assert list(list_rules(4, pinned, DISCRETE)) == [MemoryRule("component", MemorySavings(True), 1)]
    assert {rule.savings.vae_in_parts for rule in list_rules(1, PlacementOptions(vae_tiling=False), DISCRETE)} == {
        False
    }


def test_residence_before_a_size_is_known() -> None:
    weights = {"unet": 500, "vae": 50}
    assert choose_residence(weights, 700, DISCRETE).value.residence == "resident"
    assert choose_residence(weights, 650, DISCRETE).value.residence == "component"
    assert choose_residence(weights, 600, DISCRETE).value.residence == "layer"
    assert choose_residence(weights, 600, UNIFIED).value.residence == "phase"


@pytest.mark.parametrize(("capacity", "most"), [(879, 0), (880, 1), (1279, 2), (1480, 4), (2680, 10)])
def test_largest_batch(capacity: int, most: int) -> None:
    assert find_largest_batch(measure, MemoryRule(), capacity) == most


def test_reordered_convolution_copies_input_and_output() -> None:
    reordering = Workspace(reordered_convolutions=True)
    shapes = (1, 256, 1024, 1024), (128, 256, 3, 3), (1, 128, 1024, 1024)
    # Measured on an H200: 512 + 256 MiB, plus the weight.
    assert reordering.convolution_bytes(*shapes, 2, False) == (512 + 256) * 2**20 + 128 * 256 * 9 * 2
    assert reordering.convolution_bytes(*shapes, 2, True) == 128 * 256 * 9 * 2
    assert Workspace().convolution_bytes(*shapes, 2, False) == 0


def test_unfused_attention_holds_all_scores() -> None:
    query = key = (2, 8, 4096, 40)
    assert Workspace(fused_attention=False).attention_bytes(query, key, 40) == 2 * 4 * 16 * 4096**2
    assert Workspace().attention_bytes(query, key, 40) == 4 * 16 * 4096


def test_large_tensors_use_whole_segments() -> None:
    segments = Workspace(segment_bytes=2**21)
    assert segments.round_up_bytes(25 * 2**20) == 26 * 2**20
    assert segments.round_up_bytes(25 * 2**20 - 2**19) == 25 * 2**20 - 2**19, "remainders above 1 MiB are reused"
    assert segments.round_up_bytes(1000) == 1024


def test_slice_shapes_of_a_rule() -> None:
    query = (2, 8, 64, 40)
    assert AttentionRule().slices(query, 64) is None
    assert AttentionRule(heads="max").slices(query, 64) == ((1, 64, 40), (1, 64, 40), 40)
    assert AttentionRule(heads="auto").slices(query, 64) == ((4, 64, 40), (4, 64, 40), 40)
    assert AttentionRule(max_scores=16 * 64 * 64).slices(query, 64) is None
    assert AttentionRule(max_scores=2 * 64 * 64).slices(query, 64) == ((2, 64, 40), (2, 64, 40), 40)
    assert AttentionRule(max_scores=32 * 64).slices(query, 64) == ((1, 32, 40), (1, 64, 40), 40)
