"""Convolutions of 3 by 3 on the host: torch's own against Winograd's algorithm, in turns, and how exact each is.

    python -m benchmarks.convolutions

Writes benchmarks/results/convolutions_cpu.json: layers of Stable Diffusion 1.5 at 256 by 256 and of the embedded model,
and a whole UNet of the former's shape with random weights.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch.nn import functional

from anyaccel.runtime.kernels import winograd
from benchmarks.provenance import describe_run, read_commit

RESULT = Path(__file__).parent / "results" / "convolutions_cpu.json"
LAYERS = [(2, 320, 32, 320), (2, 960, 32, 320), (2, 640, 16, 640), (2, 1280, 8, 1280), (2, 2560, 8, 1280),
          (2, 160, 16, 160), (2, 192, 8, 192), (1, 128, 128, 128)]  # fmt: skip
"""Images, channels, side, channels of the result."""
ROUNDS = 7


def time_in_turns(first: Callable[[], Any], second: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """The medians of two functions, in seconds."""
    first(), second()
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for function, taken in zip((first, second), seconds, strict=True):
            begun = time.perf_counter()
            function()
            taken.append(time.perf_counter() - begun)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def measure_layer(images: int, channels: int, side: int, out: int) -> dict[str, Any]:
    """One layer: times, and the largest error of each beside float64."""
    torch.manual_seed(0)
    picture = torch.randn(images, channels, side, side)
    weight, bias = torch.randn(out, channels, 3, 3) / (channels * 9) ** 0.5, torch.randn(out)
    exact = functional.conv2d(picture.double(), weight.double(), bias.double(), padding=1)
    tile = winograd.choose_tile(picture.shape, weight.shape)
    filters = winograd.transform_filters(weight, tile) if tile else None

    def plain() -> torch.Tensor:
        return functional.conv2d(picture, weight, bias, padding=1)

    def ours() -> torch.Tensor:
        return plain() if filters is None else winograd.convolve(picture, filters, bias, tile)

    plain_s, ours_s = time_in_turns(plain, ours, ROUNDS)
    return {
        "layer": f"{images} x {channels} x {side} x {side} to {out}", "tile": tile, "ratio": round(plain_s / ours_s, 3),
        "plain_ms": round(plain_s * 1e3, 2), "ours_ms": round(ours_s * 1e3, 2),
        "plain_error": float((plain() - exact).abs().max()), "ours_error": float((ours() - exact).abs().max()),
    }  # fmt: skip


def measure_unet() -> dict[str, Any]:
    """A UNet of Stable Diffusion 1.5's shape at 256 by 256 with guidance: one step."""
    torch.manual_seed(0)
    library: Any = diffusers
    unet = library.UNet2DConditionModel(cross_attention_dim=768, attention_head_dim=8, sample_size=32).eval()
    sample, text = torch.randn(2, 4, 32, 32), torch.randn(2, 77, 768)
    expected = unet(sample, 500, text).sample

    def plain() -> Any:
        winograd_off()
        return unet(sample, 500, text).sample

    kept = {}
    winograd.install(unet)
    for part in unet.modules():
        if winograd.is_installed(part):
            kept[part] = part.forward

    def winograd_off() -> None:
        for part in kept:
            vars(part).pop("forward", None)

    def ours() -> Any:
        for part, forward in kept.items():
            part.forward = forward
        return unet(sample, 500, text).sample

    plain_s, ours_s = time_in_turns(plain, ours, 4)
    off = float((ours() - expected).abs().max() / expected.abs().max())
    return {"plain_s": round(plain_s, 3), "ours_s": round(ours_s, 3), "ratio": round(plain_s / ours_s, 3), "off": off}


def main() -> None:
    """Measure, print and keep."""
    with torch.no_grad():
        report = {
            "what": "torch's own convolutions against Winograd's algorithm, in turns",
            **describe_run(read_commit()),
            "threads": torch.get_num_threads(),
            "layers": [measure_layer(*layer) for layer in LAYERS],
            "unet": measure_unet(),
        }
    RESULT.write_text(json.dumps(report, indent=1) + "\n")
    for layer in report["layers"]:
        print(layer)
    print(report["unet"])


if __name__ == "__main__":
    main()
