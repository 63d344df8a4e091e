"""Tiny pipelines with each version of diffusers: stock and placed, compared with stock diffusers on the CPU.

    python -m benchmarks.diffusers_versions                               every environment
    python -m benchmarks.diffusers_versions --only 0.35.2 0.36.0          only these versions of diffusers
    python -m benchmarks.diffusers_versions --names flux wan --again      only these recipes, also if they have a result

Every environment has its own versions of diffusers, transformers, huggingface_hub and tokenizers, which are installed
into a folder that precedes the installed packages. All other packages, such as torch, are the installed ones.

Writes benchmarks/results/diffusers_versions.json after each recipe, and continues where an earlier run stopped. For
each environment and recipe, the file has the state of the stock and of the placed pipeline on each virtual device
(`works`, `waits`, `wrong` or `stops`), the error of a recipe that fails on the CPU with stock diffusers (`error`), or
`missing` if this version of diffusers does not have the pipeline.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from anyaccel.checking.run import CheckMode, run_on_cpu, run_on_device
from anyaccel.errors import AnyaccelError, first_line, summarize_error
from anyaccel.processes.json_line_worker import JsonLineWorker, connecting_to_parent
from anyaccel.recipes import recipes
from anyaccel.storage.atomic_write import atomic_write
from benchmarks.provenance import describe_run, read_commit

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "diffusers_versions.json"
DEVICES = ("mps", "neuron", "hpu")
# States of a pipeline that gives the image of the CPU. `waits` also synchronizes with the device in each step.
WORKING = ("works", "waits")
RECIPES = (
    "stable-diffusion", "stable-diffusion-inpaint", "stable-diffusion-xl", "stable-diffusion-3", "controlnet",
    "ip-adapter", "animate-diff", "flux", "flux-image-to-image", "flux-fill", "chroma", "pixart-sigma", "sana",
    "lumina-2", "qwen-image", "kandinsky-2-2-combined", "wan", "ltx", "hunyuan-video", "cogvideo-rotary",
    "audio-ldm-2", "stable-audio", "z-image", "flux-2",
)  # fmt: skip


@dataclass(frozen=True)
class Environment:
    """Versions of the libraries that depend on each other."""

    diffusers: str
    transformers: str
    huggingface_hub: str
    tokenizers: str = "0.23.3"
    others: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name in the results: `0.35.2 with transformers 4.57.6`."""
        return f"{self.diffusers} with transformers {self.transformers}"

    @property
    def requirements(self) -> list[str]:
        """Arguments for pip."""
        return [
            f"diffusers=={self.diffusers}", f"transformers=={self.transformers}",
            f"huggingface_hub=={self.huggingface_hub}", f"tokenizers=={self.tokenizers}", *self.others,
        ]  # fmt: skip


def list_environments() -> Iterator[Environment]:
    """Yield the newest patch of each minor version of diffusers, with both major versions of transformers.

    transformers 4 requires huggingface_hub 0, and diffusers requires huggingface_hub 1 from 0.40 on.
    """
    for version in ("0.42.1", "0.41.0", "0.40.0", "0.39.0", "0.38.0", "0.37.1", "0.36.0", "0.35.2"):
        # diffusers 0.36 to 0.41 do not accept huggingface_hub 2.
        hub = "2.4.0" if version in ("0.42.1", "0.35.2") else "1.33.0"
        yield Environment(version, "5.23.0", hub, others=_list_others(version))
    for version in ("0.39.0", "0.38.0", "0.37.1", "0.36.0", "0.35.2"):
        yield Environment(version, "4.57.6", "0.36.2", "0.22.2", _list_others(version))
    yield Environment("0.35.2", "4.48.3", "0.34.6", "0.21.4", _list_others("0.35.2"))  # the oldest supported versions


def _list_others(version: str) -> tuple[str, ...]:
    # Wan's pipelines call ftfy, also if it is not installed, until diffusers 0.36.
    return ("ftfy==6.3.1",) if version in ("0.36.0", "0.35.2") else ()


def install(environment: Environment, folder: Path) -> Path:
    """Install an environment, unless it is installed, and return its folder."""
    target = folder / environment.name.replace(" ", "-")
    complete = target / ".complete"
    if not complete.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(target)]
        subprocess.run([*pip, *environment.requirements], check=True)
        complete.touch()
    return target


def start_worker(target: Path) -> JsonLineWorker:
    """Start a process that uses the packages in a folder."""
    paths = [str(target), str(ROOT / "src"), str(ROOT)]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return JsonLineWorker("benchmarks.diffusers_versions", "--worker", env=environment, cwd=ROOT)


def run_worker() -> None:
    """Answer each recipe name with its results."""
    with connecting_to_parent() as (names, answer):
        importlib.import_module("anyaccel.runtime.pipeline")  # once, because every recipe runs in forks
        for name in names:
            answer(run_recipe(name))


def run_recipe(name: str) -> dict[str, Any]:
    """Run a recipe with stock diffusers on the CPU, and both stock and placed on every virtual device."""
    diffusers = importlib.import_module("diffusers")
    recipe = recipes()[name]
    if not hasattr(diffusers, recipe.pipeline):
        return {"missing": recipe.pipeline}
    try:
        expected = run_on_cpu([recipe])
    except AnyaccelError as error:
        return {"error": error.message}
    return {"devices": {device: run_device(device, name, expected) for device in DEVICES}}


def run_device(device: str, name: str, expected: dict[str, Any]) -> dict[str, Any]:
    """Return the states of the stock and of the placed pipeline on a virtual device."""
    try:
        reports = run_on_device(
            device, [recipes()[name]], expected, [CheckMode(placed=placed) for placed in (False, True)]
        )
    except Exception as error:  # noqa: BLE001 - a crash of the process is a result too
        return {mode: {"state": "stops", "error": summarize_error(error)} for mode in ("stock", "placed")}
    return {
        mode: {"state": report.state, "error": report.error, "max_difference": report.max_difference}
        for mode, report in zip(("stock", "placed"), reports, strict=True)
    }


def read_versions(environment: Environment) -> dict[str, str]:
    """Return the versions of the packages that the recipes use."""
    installed = {name: importlib.metadata.version(name) for name in ("torch", "accelerate", "peft", "numpy")}
    return {
        "diffusers": environment.diffusers, "transformers": environment.transformers,
        "huggingface_hub": environment.huggingface_hub, "tokenizers": environment.tokenizers, **installed,
    }  # fmt: skip


def run_environment(environment: Environment, options: argparse.Namespace, rows: dict[str, Any]) -> Iterator[str]:
    """Add the missing rows of an environment, and yield the name of each recipe after its row is added."""
    names = [name for name in options.names if options.again or name not in rows]
    worker = None
    try:
        for name in names:
            worker = worker or start_worker(install(environment, options.folder))
            try:
                rows[name] = worker.request(name, options.limit_s)
            except EOFError:
                worker.kill()
                last = (worker.stderr.strip().splitlines() or ["no output"])[-1]
                rows[name] = {"error": f"the process exited or exceeded {options.limit_s:.0f} s: {last[:300]}"}
                worker = None
            yield name
    finally:
        if worker:
            worker.kill()


def count(row: dict[str, Any]) -> str:
    """Describe a row in a few words."""
    if "devices" not in row:
        return f"missing: {row['missing']}" if "missing" in row else f"error: {row['error']}"
    return ", ".join(
        f"{device} {cell['stock']['state']}/{cell['placed']['state']} {cell['placed']['error'][:200]}".strip()
        for device, cell in row["devices"].items()
    )


def main() -> None:
    """Run the recipes in every environment and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="versions of diffusers")
    parser.add_argument("--transformers", help="only environments whose version of transformers starts with this")
    parser.add_argument("--names", nargs="*", default=RECIPES)
    parser.add_argument("--again", action="store_true", help="also run recipes that have a result")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "diffusers_versions")
    parser.add_argument("--limit-s", type=float, default=600)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_worker()
        return
    report: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"environments": {}}
    for environment in list_environments():
        if options.only and environment.diffusers not in options.only:
            continue
        if options.transformers and not environment.transformers.startswith(options.transformers):
            continue
        entry = report["environments"].setdefault(environment.name, {"rows": {}})
        for name in run_environment(environment, options, entry["rows"]):
            entry |= {"versions": read_versions(environment), "commit": read_commit()}
            entry |= {"date": datetime.now(timezone.utc).date().isoformat()}
            print(f"{environment.name}: {name}: {count(entry['rows'][name])}", flush=True)
            text = json.dumps(describe_file() | report, indent=1)
            for folder in (options.folder.resolve(), ROOT, Path(torch.__file__).parents[1]):
                text = text.replace(f"{folder}{os.sep}", "")  # tracebacks have the paths of this machine
            atomic_write(options.out, text + "\n")


def render_table(report: dict[str, Any]) -> list[str]:
    """Return the table of docs/supported-versions.md."""
    lines = [
        "| diffusers | transformers | huggingface_hub | pipelines | works with anyaccel | works in stock diffusers |",
        "|---|---|---|---|---|---|",
    ]
    for entry in report["environments"].values():
        versions, rows = entry["versions"], entry["rows"].values()
        cells = [cell for row in rows for cell in row.get("devices", {}).values()]
        placed, stock = ([cell[mode]["state"] in WORKING for cell in cells] for mode in ("placed", "stock"))
        names = (versions[name] for name in ("diffusers", "transformers", "huggingface_hub"))
        pipelines = sum("devices" in row for row in rows)
        lines.append(
            f"| {' | '.join(names)} | {pipelines} | {sum(placed)} of {len(placed)} | {sum(stock)} of {len(stock)} |"
        )
    return lines


def describe_file() -> dict[str, Any]:
    """Return the fields of the file that do not depend on the results."""
    run = describe_run(read_commit())
    return {
        "what": "tiny pipelines in float32, stock and placed on virtual devices, compared with stock on the CPU",
        "evidence": "virtual", "system": run["system"], "python": run["versions"]["python"],
        "devices": list(DEVICES),
    }  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except AnyaccelError as error:
        sys.exit(first_line(error))
