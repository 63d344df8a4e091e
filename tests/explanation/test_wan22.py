"""`explain` for Wan 2.2 A14B from configs only, compared with figures that follow from the shapes of the models.

The formulas are independent of the tracer: they use only the config files and the definition of the architecture.
"""

import json
from typing import Any

import pytest

import anyaccel
from anyaccel.explanation.call_arguments import CallSize
from anyaccel.explanation.explain import trace_call
from anyaccel.planning.memory import Forecast
from anyaccel.planning.plan import Plan
from tests.conftest import ROOT

FOLDER = ROOT / "benchmarks" / "models" / "wan2.2-t2v-a14b"
GIB = 2**30
FRAMES, STEPS, TEXT_TOKENS = 81, 40, 512
# Values of half a byte: the published float32 file of the VAE has 507.6 MB.
VAE_PARAMETERS = 126_892_531


def read_config(component: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((FOLDER / component / "config.json").read_text())
    return config


CONFIG = read_config("transformer")
WIDTH = CONFIG["num_attention_heads"] * CONFIG["attention_head_dim"]
HIDDEN, LAYERS, TEXT_WIDTH = CONFIG["ffn_dim"], CONFIG["num_layers"], CONFIG["text_dim"]
PATCH = CONFIG["in_channels"] * 2 * 2


def count_linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def count_transformer_parameters() -> int:
    # Two attentions with four projections and two norms, the feed-forward, an affine norm and six modulations.
    block = 8 * count_linear(WIDTH, WIDTH) + 4 * WIDTH + 2 * WIDTH + 6 * WIDTH
    block += count_linear(WIDTH, HIDDEN) + count_linear(HIDDEN, WIDTH)
    time = count_linear(CONFIG["freq_dim"], WIDTH) + count_linear(WIDTH, WIDTH) + count_linear(WIDTH, 6 * WIDTH)
    text = count_linear(TEXT_WIDTH, WIDTH) + count_linear(WIDTH, WIDTH)
    return int(LAYERS * block + time + text + count_linear(PATCH, WIDTH) + count_linear(WIDTH, PATCH) + 2 * WIDTH)


def count_encoder_parameters() -> int:
    config = read_config("text_encoder")
    width, inner = config["d_model"], config["num_heads"] * config["d_kv"]
    positions = config["relative_attention_num_buckets"] * config["num_heads"]
    layer = 4 * width * inner + positions + 3 * width * config["d_ff"] + 2 * width
    return int(config["num_layers"] * layer + config["vocab_size"] * width + width)


def count_tokens(width: int, height: int) -> int:
    """Return the tokens of a video: the VAE reduces time 4 times and each side 8 times, and a patch has four values."""
    return ((FRAMES - 1) // 4 + 1) * (height // 16) * (width // 16)


def count_flops(tokens: int) -> float:
    """Return the floating-point operations of the matrix products and the attention of one call of a transformer."""
    itself = 4 * 2 * tokens * WIDTH**2 + 4 * tokens**2 * WIDTH
    text = 2 * 2 * tokens * WIDTH**2 + 2 * 2 * TEXT_TOKENS * WIDTH**2 + 4 * tokens * TEXT_TOKENS * WIDTH
    return float(LAYERS * (itself + text + 2 * 2 * tokens * WIDTH * HIDDEN))


def count_held_bytes(tokens: int) -> int:
    """Return the activations at the end of a block, where most tensors are alive.

    In half precision: the block's input, the hidden states after attention, the attention's output, the normalized
    hidden states and the feed-forward's output. In float32: the hidden states, the output, and its product with a gate.
    """
    return int(tokens * WIDTH * (5 * 2 + 3 * 4))


def count_frame_bytes(width: int, height: int) -> int:
    """Return the size of one of the decoder's largest tensors: 96 channels of four frames in half precision."""
    return 96 * 4 * width * height * 2


PARAMETERS = {
    "transformer": count_transformer_parameters(),
    "transformer_2": count_transformer_parameters(),
    "text_encoder": count_encoder_parameters(),
    "vae": VAE_PARAMETERS,
}
WEIGHTS_BYTES = 2 * sum(PARAMETERS.values())


def test_parameters_are_those_of_the_published_model() -> None:
    assert PARAMETERS["transformer"] == 14_288_491_584
    assert PARAMETERS["text_encoder"] == 5_680_910_336


@pytest.mark.parametrize("size", [(832, 480), pytest.param((1280, 720), marks=pytest.mark.slow)])
def test_trace_agrees_with_the_shapes(size: tuple[int, int]) -> None:
    footprint = trace_call(str(FOLDER), "h200", CallSize(size, FRAMES))
    assert {model.name: model.parameters for model in footprint.models} == PARAMETERS
    # CUDA's allocator rounds large tensors up to segments of 2 MiB.
    assert WEIGHTS_BYTES <= footprint.weights_bytes <= WEIGHTS_BYTES * 1.005
    calls = [(call.component, call.phase) for call in footprint.model_calls]
    guided = [("transformer", "denoise")] * 2 + [("transformer_2", "denoise")] * 2
    assert calls == [("text_encoder", "encode")] * 2 + guided + [("vae", "decode")]
    for call in footprint.model_calls:
        if call.phase == "denoise":
            assert call.work.flops == pytest.approx(count_flops(count_tokens(*size)), rel=0.002)
            held_bytes = count_held_bytes(count_tokens(*size))
            assert held_bytes <= call.held_bytes <= 1.04 * held_bytes
    frame_bytes = count_frame_bytes(*size)
    # The last upsampling holds 192 channels in float32 and, twice, in half precision: 8 of these tensors.
    assert 8 * frame_bytes < footprint.model_calls[-1].held_bytes < 20 * frame_bytes


def explain(device: str, **arguments: Any) -> tuple[Plan, Forecast]:
    plan = anyaccel.explain(FOLDER, device, height=480, width=832, frames=FRAMES, steps=STEPS, **arguments)
    assert plan.forecast is not None
    assert (plan.forecast.size, plan.forecast.frames) == ((832, 480), FRAMES)
    return plan, plan.forecast


def test_a_card_with_24_gb_streams_layers() -> None:
    plan, forecast = explain("rtx4090")
    assert str(plan.memory) == "one layer at a time", "one transformer is larger than the memory"
    assert 2 * PARAMETERS["transformer"] > forecast.capacity_bytes > 23 * GIB
    assert forecast.peak_bytes == dict(forecast.phases)["decode"] < 5 * GIB
    offers = {offer.name: offer for offer in forecast.offers}
    assert offers["int8"].memory == "one model at a time", "which is faster than streaming"
    # The layers of the blocks have one byte per weight, and the others stay in half precision.
    quantized = LAYERS * (8 * WIDTH**2 + 2 * WIDTH * HIDDEN)
    int8_bytes = quantized + 2 * (PARAMETERS["transformer"] - quantized)
    assert int8_bytes < offers["int8"].peak_bytes - count_held_bytes(count_tokens(832, 480)) < 1.06 * int8_bytes
    time = forecast.time
    assert time is not None
    guided_calls = 2 * STEPS
    assert time.flops == pytest.approx(guided_calls * count_flops(count_tokens(832, 480)), rel=0.02)
    moved_bytes = guided_calls * 2 * PARAMETERS["transformer"] + 2 * 2 * PARAMETERS["text_encoder"]
    assert time.moved_bytes == pytest.approx(moved_bytes, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "memory", "capacity"),
    [
        ("mps:64GiB", "one layer at a time", 48 * GIB),
        ("gaudi2", "everything resident, VAE tiled, attention one head at a time", 96 * 10**9),
        ("trn2", "one layer at a time, VAE tiled, attention one head at a time", 24 * GIB - 192 * 2**20),
    ],
)
def test_devices_without_fused_attention_compute_one_head_at_a_time(device: str, memory: str, capacity: int) -> None:
    plan, forecast = explain(device)
    assert str(plan.memory) == memory
    assert forecast.capacity_bytes == pytest.approx(capacity, rel=1e-6)
    tokens = count_tokens(832, 480)
    # Twice the scores of one head in float32, and the input, the norm, queries, keys, values and the output.
    attention = 2 * tokens**2 * 4 + 6 * tokens * WIDTH * 2
    weights = WEIGHTS_BYTES if memory.startswith("everything") else 2 * 6 * WIDTH**2
    assert dict(forecast.phases)["denoise"] == pytest.approx(weights + attention, rel=0.03)
    assert sum(size for _, size in forecast.components) == pytest.approx(WEIGHTS_BYTES, rel=1e-4)
    if device == "mps:64GiB":
        int8 = next(offer for offer in forecast.offers if offer.name == "int8")
        assert int8.memory.startswith("everything resident")
