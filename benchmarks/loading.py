"""Peak host memory and time of loading a pipeline onto a device, with stock diffusers and with anyaccel.

    python -m benchmarks.loading cuda
    python -m benchmarks.loading cpu --cases sdxl sdxl-cast sd-float32 sd-variant --runs 1

Writes benchmarks/results/loading_DEVICE.json after every row. The folders have the shapes of published models and
random weights; they are written to `--folder`, and each is deleted before the next one is written. Each load runs in a
process of its own, which has loaded a tiny pipeline onto the device before, so that neither the libraries nor the
context of the device count. Both load from the page cache. `--commit` and `--out` are for a copy without .git.
"""

import argparse
import hashlib
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import diffusers
import torch

import anyaccel
from anyaccel.explanation.model_configs import find_model
from anyaccel.recipes import recipes
from anyaccel.tracing.meta_pipeline import build_pipeline
from benchmarks.host_memory import HostMemoryPeak, read_status
from benchmarks.provenance import describe_run, read_commit

RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("stock", "anyaccel")
SHARD_BYTES = 5_000_000_000
NAMES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True)
class Case:
    """A model, the dtype of its files and the dtype in which it is loaded."""

    title: str
    model: str
    stored: str
    dtype: str
    variant: str | None = None


CASES = {
    "sdxl": Case("SDXL, bfloat16 files", "stabilityai/sdxl-turbo", "bfloat16", "bfloat16"),
    "sdxl-cast": Case("SDXL, float16 files, loaded in bfloat16", "stabilityai/sdxl-turbo", "float16", "bfloat16"),
    "flux": Case("FLUX.1, bfloat16 files", "black-forest-labs/FLUX.1-schnell", "bfloat16", "bfloat16"),
    "tiny": Case("Stable Diffusion 1.5, float32 files, loaded in bfloat16",
                 "stable-diffusion-v1-5/stable-diffusion-v1-5", "float32", "bfloat16"),
    "sd-float32": Case("Stable Diffusion 1.5, float16 files, loaded in float32",
                       "stable-diffusion-v1-5/stable-diffusion-v1-5", "float16", "float32"),
    "sd-variant": Case("Stable Diffusion 1.5, files of the variant fp16, loaded in bfloat16",
                       "stable-diffusion-v1-5/stable-diffusion-v1-5", "float16", "bfloat16", variant="fp16"),
}  # fmt: skip


def write_folder(model: str, dtype: torch.dtype, folder: Path, variant: str | None = None) -> dict[str, int]:
    """Write a pipeline with the shapes of a model and random weights; return the bytes of each model's weights."""
    pipe = build_pipeline(find_model(model), "meta", dtype).pipe
    pipe.save_config(folder)
    sizes = {}
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            sizes[name] = write_model(component, folder / name, variant)
        elif component is not None:
            component.save_pretrained(folder / name)
    return sizes


def write_model(model: Any, folder: Path, variant: str | None = None) -> int:
    """Write the config of a model and random weights, in shards; return their bytes."""
    folder.mkdir(parents=True)
    is_diffusers = hasattr(model, "save_config")
    model.save_config(folder) if is_diffusers else model.config.save_pretrained(folder)
    kept = set(model.state_dict())
    tensors = {name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers()) if name in kept}
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in tensors.items():
        if sum(other.nbytes for other in shards[-1].values()) + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    stem = "diffusion_pytorch_model" if is_diffusers else "model"
    single, suffix = len(shards) == 1, f".{variant}" if variant else ""
    parts = [""] if single else [f"-{i + 1:05}-of-{len(shards):05}" for i in range(len(shards))]
    files = [f"{stem}{suffix}{part}.safetensors" for part in parts]
    for file, shard in zip(files, shards, strict=True):
        write_safetensors(folder / file, shard)
    total: int = sum(tensor.nbytes for tensor in tensors.values())
    if not single:
        places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / f"{stem}.safetensors.index{suffix}.json").write_text(json.dumps(index))
    return total


def write_safetensors(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file with repeated random values, without holding the tensors in memory."""
    names = {dtype: name for name, dtype in NAMES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.nbytes
        kind = names.get(tensor.dtype, "I64")
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    dtype = next(iter(tensors.values())).dtype
    block = (torch.randn(2**25, generator=torch.Generator().manual_seed(0)) / 50).to(dtype)
    values: Any = block.view(torch.uint8).numpy()
    data = memoryview(values)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, position, len(data)):
            opened.write(data[: min(len(data), position - start)])


def load(library: str, folder: Path, device: str, dtype: str, variant: str | None = None) -> Any:
    """Load a pipeline onto a device."""
    if library == "anyaccel":
        return anyaccel.DiffusionPipeline.from_pretrained(folder, device=device, dtype=dtype, variant=variant)
    loader: Any = diffusers.DiffusionPipeline
    return loader.from_pretrained(folder, torch_dtype=getattr(torch, dtype), variant=variant).to(device)


def read_checksum(pipe: Any) -> str:
    """Return a checksum of all weights, computed on their device."""
    digest = hashlib.sha256()
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            for key, tensor in component.state_dict().items():
                values = tensor.contiguous().view(torch.uint8).flatten()
                # Small parts, because the CPU sums a copy in int64.
                total = sum(
                    int(part.sum(dtype=torch.int64)) for part in values.split(2**20 if values.is_cpu else 2**28)
                )
                digest.update(f"{name} {key} {tensor.dtype} {tuple(tensor.shape)} {total}".encode())
    return digest.hexdigest()[:16]


def measure(library: str, folder: Path, tiny: Path, device: str, case: Case) -> dict[str, Any]:
    """Load a pipeline in this process; return the seconds and the peaks of the host memory."""
    warnings.simplefilter("ignore")
    load(library, tiny, device, case.dtype)
    anyaccel.synchronize(device)
    before = read_status()
    with HostMemoryPeak() as peak:
        start = time.perf_counter()
        pipe = load(library, folder, device, case.dtype, case.variant)
        anyaccel.synchronize(device)
        seconds = time.perf_counter() - start
    row = {
        "seconds": round(seconds, 2),
        "anonymous_bytes": peak.anonymous,
        "resident_bytes": peak.resident,
        "empty_process_bytes": before["RssAnon"] + before["RssFile"] + before["RssShmem"],
        "devices": sorted({str(c.device) for c in pipe.components.values() if isinstance(c, torch.nn.Module)}),
    }
    row["checksum"] = read_checksum(pipe)
    # On the CPU, mapped weights have been read now: they must not be in memory twice.
    after = read_status()
    row["used_bytes"] = sum(after[name] - before[name] for name in ("RssAnon", "RssFile", "RssShmem"))
    return row


def run_child(library: str, folder: Path, tiny: Path, device: str, case: str) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.loading", device, "--measure", library, str(folder), str(tiny), case]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1:]}
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def run_case(name: str, options: argparse.Namespace, tiny: Path) -> dict[str, Any]:
    """Write the folder of a case and measure both libraries, in turns."""
    case = CASES[name]
    with tempfile.TemporaryDirectory(dir=options.folder) as parent:
        folder = Path(parent) / "model"
        start = time.perf_counter()
        sizes = write_folder(case.model, getattr(torch, case.stored), folder, case.variant)
        print(f"written in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        predicted = anyaccel.explain(folder, options.device, dtype=case.dtype).forecast
        runs: dict[str, list[dict[str, Any]]] = {library: [] for library in LIBRARIES}
        for _ in range(options.runs):
            for library in LIBRARIES:
                runs[library].append(run_child(library, folder, tiny, options.device, name))
                print(library, json.dumps(runs[library][-1]), file=sys.stderr, flush=True)
    largest = max(sizes.values())
    row: dict[str, Any] = {"title": case.title, "stored": case.stored, "dtype": case.dtype,
                           "weights_bytes": sizes, "largest_bytes": largest, "runs": runs}  # fmt: skip
    if predicted and predicted.loading:  # not for variants
        row["predicted"] = asdict(predicted.loading)
    if not any("error" in run for results in runs.values() for run in results):
        row |= summarize(runs, largest)
        if options.device == "cpu":
            # The weights after loading: those in the files, unless they are cast.
            total = sum(sizes.values()) * NAMES_BYTES[case.dtype] // NAMES_BYTES[case.stored]
            row |= {"above_weights_of_largest": read_excess(runs, total, largest)}
    return row


def summarize(runs: dict[str, list[dict[str, Any]]], largest: int) -> dict[str, Any]:
    """Return the comparison of both libraries: fastest runs and highest peaks."""
    fastest = {library: min(run["seconds"] for run in results) for library, results in runs.items()}
    summary: dict[str, Any] = {"time_of_stock": round(fastest["anyaccel"] / fastest["stock"], 3)}
    for library, results in runs.items():
        peak = max(run["resident_bytes"] for run in results)
        held = max(run["anonymous_bytes"] for run in results)
        summary[library] = {"seconds": fastest[library], "resident_of_largest": round(peak / largest, 3),
                            "anonymous_of_largest": round(held / largest, 3)}  # fmt: skip
    summary["same_weights"] = len({run["checksum"] for results in runs.values() for run in results}) == 1
    return summary


def read_excess(runs: dict[str, list[dict[str, Any]]], total: int, largest: int) -> dict[str, float]:
    """Return the host memory above the weights of the model, relative to its largest component.

    This is the higher one of the anonymous peak of loading and of the memory after all weights were read.
    """
    peaks = {name: max(max(run["anonymous_bytes"], run["used_bytes"]) for run in runs[name]) for name in runs}
    return {name: round((peak - total) / largest, 3) for name, peak in peaks.items()}


def run_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each case."""
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        tiny: Any = recipes()["stable-diffusion"].make()
        tiny.save_pretrained(name)
        for case in options.cases:
            needed = sum(read_parameters(CASES[case].model)) * NAMES_BYTES[CASES[case].stored]
            free = shutil.disk_usage(options.folder or tempfile.gettempdir()).free
            if free < needed * 1.05:
                yield {"case": case, "error": f"needs {needed:,} bytes of disk space, but only {free:,} are free"}
                continue
            yield {"case": case, **run_case(case, options, Path(name))}


NAMES_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def read_parameters(model: str) -> Iterator[int]:
    """Yield the number of parameters of each model."""
    for component in build_pipeline(find_model(model), "meta", torch.bfloat16).pipe.components.values():
        if isinstance(component, torch.nn.Module):
            yield sum(math.prod(parameter.shape) for parameter in component.parameters())


def main() -> None:
    """Run the rows and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device")
    parser.add_argument("--cases", nargs="*", default=["sdxl", "sdxl-cast", "flux"], choices=list(CASES))
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the folders are written; on a disk, not in memory")
    parser.add_argument("--measure", nargs=4, metavar=("LIBRARY", "FOLDER", "TINY", "CASE"), help=argparse.SUPPRESS)
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.measure:
        library, folder, tiny, case = options.measure
        print(json.dumps(measure(library, Path(folder), Path(tiny), options.device, CASES[case])))
        return
    opened = anyaccel.open_device(options.device)
    report: dict[str, Any] = {
        "what": "peak host memory and seconds of loading a pipeline onto the device, random weights, above the memory "
        "of the process before loading",
        "device": opened.driver.device_name(opened.index), "evidence": "hardware",
        "date": datetime.now(timezone.utc).date().isoformat(), **describe_run(options.commit or read_commit()),
        "rows": [],
    }  # fmt: skip
    report["versions"] |= {"diffusers": diffusers.__version__, "torch": torch.__version__}
    path = options.out / f"loading_{opened.sheet.name}.json"
    for row in run_rows(options):
        report["rows"].append(row)
        path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        print(json.dumps({key: value for key, value in row.items() if key != "runs"}), flush=True)


if __name__ == "__main__":
    main()
