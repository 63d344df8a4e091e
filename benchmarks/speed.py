"""How fast anyaccel is beside stock diffusers, at full size with random weights, without text encoders.

    python -m benchmarks.speed cuda                  every case, one process after another
    python -m benchmarks.speed cuda --together       the processes compile side by side, and measure one at a time
    python -m benchmarks.speed cuda --cases sdxl

Stock diffusers eager, stock diffusers with its denoiser and its decoder compiled, and anyaccel make the same picture
from the same noise in turns. A row holds medians, the spread, peak memory, what it took until the first picture, the
floor, and how like the pictures are. Writes benchmarks/results/speed_DEVICE.json; `--commit` and `--out` are for a copy
without .git.
"""

import argparse
import copy
import fcntl
import gc
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import diffusers
import torch

import anyaccel
from anyaccel.backends.device import this_machine
from anyaccel.descriptions import find_description
from anyaccel.runtime.pipeline import place
from anyaccel.tracing.build import _find_class, _make_model
from anyaccel.tracing.model_folder import read_model_folder
from benchmarks.provenance import read_commit

RESULTS = Path(__file__).parent / "results"
LIBRARY: Any = diffusers


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    model: str
    title: str
    pipeline: str
    steps: int
    size: int
    floor_s: float
    """By the operations that it takes, at 790 TFLOP/s; from the project's own count."""
    embeds: dict[str, tuple[int, ...]]
    """What stands for the prompt."""
    call: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    """What of the denoiser's config differs from the description's."""


CASES = {
    "schnell": Case(
        "black-forest-labs/FLUX.1-schnell", "FLUX.1-schnell, 4 steps", "FluxPipeline", 4, 1024, 0.365,
        {"prompt_embeds": (1, 256, 4096), "pooled_prompt_embeds": (1, 768)}, {"guidance_scale": 0.0}),
    "sdxl": Case(
        "stabilityai/sdxl-turbo", "SDXL, 30 steps, guidance", "StableDiffusionXLPipeline", 30, 1024, 0.527,
        {"prompt_embeds": (1, 77, 2048), "negative_prompt_embeds": (1, 77, 2048), "pooled_prompt_embeds": (1, 1280),
         "negative_pooled_prompt_embeds": (1, 1280)}, {"guidance_scale": 5.0}),
    "klein": Case(
        "black-forest-labs/FLUX.2-klein-4B", "FLUX.2-klein-4B, 4 steps", "Flux2KleinPipeline", 4, 1024, 0.190,
        {"prompt_embeds": (1, 512, 7680)}, {"guidance_scale": 1.0}),
    "sd15": Case(
        "stable-diffusion-v1-5/stable-diffusion-v1-5", "SD 1.5, 50 steps, guidance", "StableDiffusionPipeline", 50, 512,
        0.105, {"prompt_embeds": (1, 77, 768), "negative_prompt_embeds": (1, 77, 768)}, {"guidance_scale": 7.5}),
    "pixart": Case(
        "PixArt-alpha/PixArt-XL-2-1024-MS", "PixArt-alpha, 20 steps, guidance", "PixArtAlphaPipeline", 20, 1024, 0.343,
        {"prompt_embeds": (1, 120, 4096), "negative_prompt_embeds": (1, 120, 4096),
         "prompt_attention_mask": (1, 120), "negative_prompt_attention_mask": (1, 120)},
        {"guidance_scale": 4.5, "use_resolution_binning": False}),
    "dev": Case(
        "black-forest-labs/FLUX.1-schnell", "FLUX.1-dev, 28 steps", "FluxPipeline", 28, 1024, 2.65,
        {"prompt_embeds": (1, 512, 4096), "pooled_prompt_embeds": (1, 768)}, {"guidance_scale": 3.5},
        {"guidance_embeds": True}),
}  # fmt: skip


def build(case: Case, device: str) -> Any:
    """The pipeline with a denoiser and an autoencoder of full size and random weights, and nothing else."""
    folder = read_model_folder(find_description(case.model) or Path(case.model))
    parts: dict[str, Any] = {}
    for component in folder.components:
        if component.name == "scheduler":
            parts["scheduler"] = _find_class(component).from_config(dict(component.config or {}))
        elif component.name in ("unet", "transformer", "vae"):
            config = dict(component.config or {}) | (case.config if component.name != "vae" else {})
            changed = copy.replace(component, config=config) if hasattr(copy, "replace") else _with(component, config)
            parts[component.name] = _make_model(None, changed, device, torch.bfloat16)
    if case.pipeline == "StableDiffusionXLPipeline":
        parts["scheduler"] = LIBRARY.EulerDiscreteScheduler()
    kind = getattr(LIBRARY, case.pipeline)
    names = [name for name in kind._get_signature_keys(kind)[0] if name not in parts and name != "self"]
    pipe = kind(**parts, **dict.fromkeys(names), **_switches(case))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _with(component: Any, config: dict[str, Any]) -> Any:
    from dataclasses import replace

    return replace(component, config=config)


def _switches(case: Case) -> dict[str, Any]:
    if case.pipeline == "StableDiffusionXLPipeline":
        return {"add_watermarker": False}
    return {"requires_safety_checker": False} if case.pipeline == "StableDiffusionPipeline" else {}


def share_weights(pipe: Any) -> Any:
    """A copy of a pipeline whose models are others with the same weights, so that one can be compiled."""
    tensors = {id(tensor): tensor for part in pipe.components.values() if isinstance(part, torch.nn.Module)
               for tensor in (*part.parameters(), *part.buffers())}  # fmt: skip
    return copy.deepcopy(pipe, tensors)


def compile_stock(pipe: Any) -> Any:
    """As diffusers' documentation has it: the denoiser, and the decoder."""
    for name in ("unet", "transformer"):
        if getattr(pipe, name, None) is not None:
            setattr(pipe, name, torch.compile(getattr(pipe, name)))
    pipe.vae.decode = torch.compile(pipe.vae.decode)
    return pipe


class Variant:
    """One way to make the picture."""

    def __init__(self, name: str, pipe: Any, call: dict[str, Any], device: str) -> None:
        self.name, self.pipe, self.call, self.device = name, pipe, call, device
        self.seconds: list[float] = []
        self.row: dict[str, Any] = {}

    def picture(self) -> Any:
        """The picture, and the seconds that it took."""
        generator = torch.Generator("cpu").manual_seed(0)
        anyaccel.synchronize(self.device)
        start = time.perf_counter()
        made = self.pipe(**self.call, generator=generator)
        anyaccel.synchronize(self.device)
        return made.images, time.perf_counter() - start

    def warm_up(self) -> None:
        """The first pictures: kernels are compiled, chosen and recorded."""
        self.row["first_picture_s"] = round(self.picture()[1], 3)
        for _ in range(3):
            made, _ = self.picture()
        self.made = made.float().cpu()
        gc.collect()
        anyaccel.empty_cache(self.device)

    def measure(self) -> None:
        """One more picture, timed."""
        self.seconds.append(self.picture()[1])

    def finish(self, like: "Variant") -> dict[str, Any]:
        """The row of this variant."""
        anyaccel.reset_peak_memory(self.device)
        self.picture()
        ordered = sorted(self.seconds)
        self.row |= {
            "median_s": round(statistics.median(ordered), 4),
            "spread_s": [round(ordered[0], 4), round(ordered[-1], 4)],
            "peak_bytes_with_the_others_resident": anyaccel.max_memory(self.device),
            "psnr_db": psnr(self.made, like.made),
        }
        return self.row


def psnr(one: torch.Tensor, other: torch.Tensor) -> float | None:
    """How like two pictures are, in decibels; None for the same."""
    error = float(((one - other) ** 2).mean())
    return round(10 * math.log10(1 / error), 2) if error > 0 else None


def run_case(name: str, device: str, rounds: int, sync: Path | None, without: list[str]) -> dict[str, Any]:
    """One row: build, warm up, wait for one's turn, and measure in turns."""
    case = CASES[name]
    torch.manual_seed(0)
    stock = build(case, device)
    ours = place(copy.deepcopy(stock), device, dtype="bfloat16", watch=False, compile=True, pictures=10_000)
    call: dict[str, Any] = {
        key: torch.ones(shape, device=device, dtype=torch.bfloat16) if "mask" in key
        else torch.randn(shape, device=device, dtype=torch.bfloat16) for key, shape in case.embeds.items()
    }  # fmt: skip
    call |= case.call | {"num_inference_steps": case.steps, "height": case.size, "width": case.size}
    call |= {"output_type": "pt"}
    if case.pipeline == "PixArtAlphaPipeline":
        call["negative_prompt"] = None
    failed: dict[str, dict[str, Any]] = {}
    variants = [Variant("stock eager", stock, call, device),
                Variant("stock compiled", compile_stock(share_weights(stock)), call, device),
                Variant("anyaccel", ours, call, device)]  # fmt: skip
    if without:
        wishes = dict.fromkeys(without, False)
        other = place(
            share_weights(stock), device, dtype="bfloat16", watch=False, compile=True, pictures=10_000, **wishes
        )
        variants.append(Variant(f"anyaccel without {', '.join(without)}", other, call, device))
    for variant in list(variants):
        try:
            with torch.no_grad():
                variant.warm_up()
        except Exception as error:  # noqa: BLE001 - the others are measured all the same, and the row says it
            traceback.print_exc()
            failed[variant.name] = {"error": f"{type(error).__name__}: {error}"[:500]}
            variants.remove(variant)
            continue
        print(f"{name}: {variant.name} first picture {variant.row['first_picture_s']} s", file=sys.stderr, flush=True)
    with taking_turns(name, sync):
        for turn in range(rounds):
            first = turn % len(variants)
            for variant in variants[first:] + variants[:first]:
                variant.measure()
        rows = {variant.name: variant.finish(variants[0]) for variant in variants}
        profile = profile_kernels(variants[-1 if "anyaccel" in failed else 2]) if device == "cuda" else None
    rows |= failed
    ours_s = rows["anyaccel"].get("median_s", math.inf)
    return {
        "case": case.title, "steps": case.steps, "size": case.size, "dtype": "bfloat16", "rounds": rounds,
        "floor_s": case.floor_s, **rows, "against_stock_compiled": round(rows["stock compiled"]["median_s"] / ours_s, 3),
        "against_stock_eager": round(rows["stock eager"]["median_s"] / ours_s, 3),
        "plan": {one: str(decision) + ": " + decision.reason for one, decision in ours.plan.decisions()
                 if one in ("compiled", "capture", "channels_last", "fusions")},
        "profile": profile,
    }  # fmt: skip


def profile_kernels(variant: Variant) -> dict[str, Any]:
    """Where the device's time goes in one picture."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        variant.picture()
    kernels = sorted(seen.key_averages(), key=lambda one: -one.device_time_total)
    return {
        "kernels": sum(one.count for one in kernels),
        "busy_s": round(sum(one.device_time_total for one in kernels) / 1e6, 4),
        "most": [{"kernel": one.key[:100], "count": one.count, "ms": round(one.device_time_total / 1e3, 2)}
                 for one in kernels[:15]],
    }  # fmt: skip


@contextmanager
def taking_turns(name: str, sync: Path | None) -> Iterator[None]:
    """Wait until every process is ready, and then for the lock: what one measures, no other disturbs."""
    if sync is None:
        yield
        return
    (sync / f"{name}.ready").touch()
    wanted, deadline = int((sync / "count").read_text()), float((sync / "deadline").read_text())
    while len(list(sync.glob("*.ready"))) < wanted and time.time() < deadline:
        time.sleep(0.2)
    with (sync / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run_all(names: list[str], device: str, options: Any) -> Iterator[dict[str, Any]]:
    """A process for each case: what one leaves behind is not the next's."""
    sync = Path(tempfile.mkdtemp()) if options.together else None
    if sync is not None:
        (sync / "count").write_text(str(len(names)))
        (sync / "deadline").write_text(str(time.time() + options.patience))
    command: Callable[[str], list[str]] = lambda name: [  # noqa: E731
        sys.executable, "-m", "benchmarks.speed", device, "--one", name, "--rounds", str(options.rounds),
        *(["--sync", str(sync)] if sync else []), *(["--without", *options.without] if options.without else []),
    ]  # fmt: skip
    started = []
    for name in names:
        process = subprocess.Popen(command(name), stdout=subprocess.PIPE, text=True)
        started.append((name, process))
        if not options.together:
            process.wait()
    for name, process in started:
        out, _ = process.communicate()
        lines = [line for line in out.splitlines() if line.startswith("{")]
        row = json.loads(lines[-1]) if lines else {"case": CASES[name].title, "error": f"status {process.returncode}"}
        yield row


def main() -> None:
    """Run the cases and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--patience", type=float, default=400, help="how long processes wait for each other")
    parser.add_argument("--one", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--sync", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--without", nargs="*", default=[], help="wishes of a fourth variant that is without them")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.one:
        print(
            json.dumps(run_case(options.one, options.device, options.rounds, options.sync, options.without)), flush=True
        )
        return
    opened, machine = anyaccel.open_device(options.device), this_machine()
    report: dict[str, Any] = {
        "what": "stock diffusers and anyaccel in turns, full size, random weights, without text encoders",
        "device": opened.driver.device_name(opened.index), "evidence": "hardware",
        "date": datetime.now(timezone.utc).date().isoformat(), "commit": options.commit or read_commit(),
        "system": f"{machine.system} {machine.architecture}",
        "versions": dict(machine.versions) | {"diffusers": diffusers.__version__}, "rows": [],
    }  # fmt: skip
    for row in run_all(options.cases, options.device, options):
        report["rows"].append(row)
        print({key: row.get(key) for key in ("case", "error", "against_stock_compiled")}, flush=True)
        options.out.mkdir(exist_ok=True)
        ratios = [one["against_stock_compiled"] for one in report["rows"] if "against_stock_compiled" in one]
        report["geometric_mean"] = round(statistics.geometric_mean(ratios), 3) if ratios else None
        (options.out / f"speed_{opened.sheet.name}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
