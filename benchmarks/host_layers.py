"""Layers on the host: torch's own beside ours, a whole UNet beside OpenVINO too, and the embedded model.

    python -m benchmarks.host_layers --json benchmarks/results/host_layers_cpu.json

Layers of Stable Diffusion 1.5 at 256 by 256 and of the embedded model, and how exact each is; a UNet of the former's
shape with random weights, one step with guidance, and OpenVINO's if it is there; the embedded model's UNet, and what
recording it gains; and its pictures, the first few of new processes and the later ones. All in turns.
"""

import argparse
import copy
import importlib
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch.nn import functional

from anyaccel.bench.bench import run_bench
from anyaccel.bench.work import Work
from anyaccel.embedded.model import CALL_DEFAULTS, find_embedded_model
from anyaccel.host_recording.record import record_host
from anyaccel.runtime import host_layers
from anyaccel.runtime.kernels import winograd
from anyaccel.runtime.pipeline import place
from benchmarks.provenance import describe_run, read_commit

LAYERS = [(2, 320, 32, 320), (2, 960, 32, 320), (2, 640, 16, 640), (2, 1280, 8, 1280), (2, 2560, 8, 1280),
          (2, 160, 16, 160), (2, 192, 8, 192), (1, 64, 128, 64)]  # fmt: skip
"""Images, channels, side, channels of the result."""
ROUNDS = 7
PROCESSES, PICTURES = 7, 4


def time_in_turns(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median of each function, in seconds."""
    for function in functions.values():
        function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            begun = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - begun)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def measure_layer(images: int, channels: int, side: int, out: int) -> dict[str, Any]:
    """One layer: times, and the largest error of each beside float64."""
    torch.manual_seed(0)
    picture = torch.randn(images, channels, side, side)
    last = picture.contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(out, channels, 3, 3) / (channels * 9) ** 0.5, torch.randn(out)
    exact = functional.conv2d(picture.double(), weight.double(), bias.double(), padding=1)
    tile = winograd.choose_tile(picture.shape, weight.shape)
    filters = winograd.transform_filters(weight, tile) if tile else None

    def plain() -> torch.Tensor:
        return functional.conv2d(picture, weight, bias, padding=1)

    def ours() -> torch.Tensor:
        return plain() if filters is None else winograd.convolve(last, filters, bias, tile)

    taken = time_in_turns({"plain": plain, "ours": ours}, ROUNDS)
    return {
        "layer": f"{images} x {channels} x {side} x {side} to {out}", "tile": tile,
        "ratio": round(taken["plain"] / taken["ours"], 3),
        "plain_ms": round(taken["plain"] * 1e3, 2), "ours_ms": round(taken["ours"] * 1e3, 2),
        "plain_error": float((plain() - exact).abs().max()), "ours_error": float((ours() - exact).abs().max()),
    }  # fmt: skip


def measure_unet() -> dict[str, Any]:
    """A UNet of Stable Diffusion 1.5's shape at 256 by 256 with guidance: one step."""
    torch.manual_seed(0)
    library: Any = diffusers
    unet = library.UNet2DConditionModel(cross_attention_dim=768, attention_head_dim=8, sample_size=32).eval()
    sample, text = torch.randn(2, 4, 32, 32), torch.randn(2, 77, 768)
    ours = copy.deepcopy(unet)
    host_layers.install(ours)
    runs: dict[str, Callable[[], Any]] = {
        "plain": lambda: unet(sample, 500, text).sample,
        "ours": lambda: ours(sample, 500, text).sample,
    }
    versions = {}
    if importlib.util.find_spec("openvino"):
        openvino: Any = importlib.import_module("openvino")
        versions["openvino"] = openvino.__version__
        runs["openvino"] = convert(openvino, unet, sample, text)
    expected = runs["plain"]()
    taken = time_in_turns(runs, 5)
    off = {name: float((run() - expected).abs().max() / expected.abs().max()) for name, run in runs.items()}
    return {
        "seconds": {name: round(seconds, 3) for name, seconds in taken.items()}, "off": off, "versions": versions,
        "ratio": {name: round(seconds / taken["ours"], 3) for name, seconds in taken.items()},
    }  # fmt: skip


def convert(openvino: Any, unet: Any, sample: torch.Tensor, text: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The same model compiled by OpenVINO for this host, with fixed shapes and in float32, as optimum-intel does it."""

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unet = unet

        def forward(self, sample: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> Any:
            return self.unet(sample, timestep, text, return_dict=False)[0]

    given = (sample, torch.tensor(500), text)
    model = openvino.convert_model(Plain(), example_input=given, input=[tuple(one.shape) for one in given])
    hints = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(model, "CPU", hints)
    arrays = [one.numpy() for one in given]
    return lambda: torch.from_numpy(compiled(arrays)[0])


def measure_recording() -> dict[str, Any]:
    """The embedded model's UNet, one step with guidance: torch's layers, ours, and ours recorded."""
    library: Any = diffusers
    unet = library.UNet2DConditionModel.from_pretrained(find_embedded_model(), subfolder="unet").eval()
    ours = copy.deepcopy(unet)
    host_layers.install(ours)
    torch.manual_seed(0)
    inputs = [torch.randn(2, 8, 16, 16), torch.tensor(500), torch.randn(2, 32, 192)]
    ours(*inputs)
    places = [tensor.clone() for tensor in inputs]
    result, replay = record_host(lambda: ours(*places).sample, places, [False, False, True])
    taken = time_in_turns(
        {"plain": lambda: unet(*inputs), "ours": lambda: ours(*inputs), "recorded": replay}, 3 * ROUNDS
    )
    expected = ours(*inputs).sample
    return {
        "seconds": {name: round(seconds, 4) for name, seconds in taken.items()},
        "ratio": {name: round(taken["plain"] / seconds, 3) for name, seconds in taken.items()},
        "same as ours": torch.equal(result, expected),
    }


def measure_first_pictures() -> dict[str, Any]:
    """The first pictures of new processes, whose models are loaded and imported: medians over processes, in turns."""
    found: dict[str, list[list[float]]] = {"stock": [], "anyaccel": []}
    for _ in range(PROCESSES):
        for name, rows in found.items():
            command = [sys.executable, "-m", "benchmarks.host_layers", "--pictures-of", name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
    pairs = zip(medians["stock"], medians["anyaccel"], strict=True)
    return {
        "processes": PROCESSES,
        "seconds": {name: [round(one, 3) for one in row] for name, row in medians.items()},
        "ratio": [round(stock / ours, 3) for stock, ours in pairs],
    }


def make_pictures(name: str) -> list[float]:
    """What the first pictures of this process take."""
    library: Any = diffusers
    pipe = library.DiffusionPipeline.from_pretrained(find_embedded_model())
    pipe.set_progress_bar_config(disable=True)
    if name == "anyaccel":
        pipe = place(pipe, "cpu", dtype="float32")
    taken = []
    for number in range(PICTURES):
        begun = time.perf_counter()
        pipe("a red apple", generator=torch.Generator().manual_seed(number), **CALL_DEFAULTS)
        taken.append(time.perf_counter() - begun)
    return taken


def measure_embedded() -> dict[str, Any]:
    """The embedded model's pictures by stock diffusers and by anyaccel, each in a process of its own."""
    work = Work(
        model=str(find_embedded_model()), title="the embedded model, 8 steps", device="cpu", dtype="float32",
        call=dict(CALL_DEFAULTS), variants=("stock eager", "anyaccel"),
    )  # fmt: skip
    row = run_bench(work, rounds=21)
    names = ("median_s", "spread_s", "first_picture_s", "psnr_db")
    return {
        "variants": {name: {one: found.get(one) for one in names} for name, found in row["variants"].items()},
        "ratio": row["against stock eager"],
        "ratio of first pictures": round(
            row["variants"]["stock eager"]["first_picture_s"] / row["variants"]["anyaccel"]["first_picture_s"], 3
        ),
    }


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pictures-of", choices=("stock", "anyaccel"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pictures_of:
        print(json.dumps(make_pictures(options.pictures_of)))
        return
    with torch.no_grad():
        report: dict[str, Any] = {
            "what": "torch's own layers and ours, in turns",
            **describe_run(read_commit()),
            "threads": torch.get_num_threads(),
            "embedded": measure_embedded(),
            "first pictures": measure_first_pictures(),
            "recording": measure_recording(),
            "layers": [measure_layer(*layer) for layer in LAYERS],
            "unet": measure_unet(),
        }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    for layer in report["layers"]:
        print(layer)
    print(report["unet"], report["recording"], report["first pictures"], report["embedded"], sep="\n")


if __name__ == "__main__":
    main()
