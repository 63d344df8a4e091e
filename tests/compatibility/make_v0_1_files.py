"""Write the files of `tests/compatibility/v0_1` with the code of version 0.1.

    git worktree add ../anyaccel-0.1 6791ee4
    python tests/compatibility/make_v0_1_files.py ../anyaccel-0.1/src

The modules of version 0.1 run in child processes, with its source folder as PYTHONPATH. They are not imported here.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
FILES = HERE / "v0_1"
PARTS = ("images", "batch", "jobs", "cache", "evidence", "chart", "check")

GENERATE = """
import sys
from anyaccel.cli.main import main

for command in (
    ["generate", "a fox", "-o", "fox.png"], ["generate", "a fox", "-o", "fox.jpg"],
    ["generate", "a fox", "-o", "fox.webp"], ["generate", "a fox", "a red apple", "--grid", "-o", "pair.png"],
):
    sys.argv = ["anyaccel", *command, "--seed", "7", "--steps", "2", "--device", "cpu", "--show", "never"]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
"""

JOBS = """
import pathlib
import sys

from anyaccel.server.jobs import Jobs

jobs = Jobs(pathlib.Path(sys.argv[1]))
(done,) = jobs.list()
failed, _ = jobs.submit({**done.request, "prompt": "a red apple", "seeds": [3]})
assert jobs.take().id == failed.id
jobs.fail(failed.id, {"code": "out_of_memory", "message": "the device has 16 GiB", "status": 500})
cancelled, _ = jobs.submit({**done.request, "prompt": "a boat", "seeds": [4]})
jobs.cancel(cancelled.id)
jobs.submit({**done.request, "prompt": "a castle", "seeds": [5]}, key="castle")
jobs.close()
"""

COMPILED = """
from anyaccel.runtime.artefact_key import find_versions
from anyaccel.runtime.artefacts import save_payload

# A key that `anyaccel warm embedded --size 64x64` made; its payload has 3 MB.
key = {
    "pipeline": "StableDiffusionPipeline", "structure": "8b0d46b6fc655b07", "shape": "64 \u00d7 64, 1 image",
    "dtype": "float32", "how": "whole; inductor, graphs may break, sizes may vary",
    "with": "fusions -; channels last no; in -", "attention": "as it is", "device": "aarch64", **find_versions(),
}
assert save_payload(key, b"a payload that is not code" * 100, took_s=12.5)
"""

OUT_OF_MEMORY = """
import anyaccel
import torch
from anyaccel.recipes import recipes

with anyaccel.virtual("hpu"):
    options = {"dtype": "float32", "memory": "resident", "vae_tiling": False, "attention_slicing": "max"}
    pipe = anyaccel.place(recipes()["stable-diffusion"].make(), "hpu", **options)
    forward = type(pipe.unet).forward

    def fail_on_many(self, sample, *args, **kwargs):
        if len(sample) > 4:  # two images with guidance
            raise torch.OutOfMemoryError("out of memory")
        return forward(self, sample, *args, **kwargs)

    type(pipe.unet).forward = fail_on_many
    call = {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "np", "seed": 3}
    pipe("a fox", num_images_per_prompt=4, **call)
    # Without a dtype, the CPU is measured.
    anyaccel.place(recipes()["stable-diffusion"].make(), "cpu")
"""


def make_images(folder: Path) -> None:
    """Write an image in each format, and a contact sheet."""
    run_code(GENERATE, folder=folder)


def make_batch(folder: Path) -> None:
    """Write a finished batch, and one that was killed between an image and its manifest line."""
    rows = [{"prompt": text, "seed": seed, "num_inference_steps": 2} for seed, text in enumerate(("a fox", "a boat"))]
    (folder / "finished.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows += [{"prompt": "a castle", "seed": 2, "num_inference_steps": 2}]
    rows += [{"prompt": f"a star {seed}", "seed": seed, "num_inference_steps": 8} for seed in (3,)]
    (folder / "stopped.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--device", "cpu", "--dtype", "float32", "--rows-a-call", "1", "--workers", "1"]
    run_command("batch", "finished.jsonl", "--out", "finished", *options, folder=folder)
    command = [sys.executable, "-m", "anyaccel", "batch", "stopped.jsonl", "--out", "stopped", *options]
    process = subprocess.Popen(command, cwd=folder, start_new_session=True)
    manifest = folder / "stopped" / "manifest.jsonl"
    while not manifest.exists() or len(manifest.read_text().splitlines()) < 3:
        assert process.poll() is None, "the batch ended too early"
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    lines = manifest.read_text().splitlines(keepends=True)
    assert len(lines) == 3, "the batch was killed too late"
    manifest.write_text("".join(lines[:2]) + lines[2][:20])  # like a kill while the line was being written
    for lock in folder.glob("*/.lock"):
        lock.unlink()


def make_jobs(folder: Path) -> None:
    """Write the data folder of a service with a finished, a failed, a cancelled and a queued job."""
    command = [sys.executable, "-m", "anyaccel", "serve", "--port", "0", "--device", "cpu", "--dtype", "float32"]
    process = subprocess.Popen([*command, "--data", str(folder)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    address = next(line.split()[1] for line in process.stderr if line.startswith("ready: "))
    import httpx

    body = {"prompt": "a fox", "seed": 7, "n": 2, "num_inference_steps": 2}
    assert httpx.post(f"{address}/v1/images/generations", json=body, timeout=300).status_code == 200
    process.send_signal(signal.SIGTERM)
    process.communicate()
    run_code(JOBS, str(folder), folder=folder)
    (folder / "lock").unlink()


def make_cache(folder: Path) -> None:
    """Write a cache folder: a compile cache entry, the history of calls that ran out of memory, and measurements."""
    os.environ["ANYACCEL_CACHE"] = str(folder / "folder")
    run_code(COMPILED, folder=folder)
    run_command("cache", "export", "exported.tar.gz", folder=folder)
    run_code(OUT_OF_MEMORY, folder=folder)


def make_evidence(folder: Path) -> None:
    """Write a verification of the CPU."""
    options = ["--verify", "--quick", "--pipelines", "stable-diffusion", "--signed-off-by", "A. Tester <a@example.com>"]
    run_command("devices", "cpu", *options, "-o", "cpu.json", folder=folder, may_fail=True)


def make_chart(folder: Path) -> None:
    """Write a chart of one pipeline on one device."""
    options = ["--family", "stable-diffusion", "--device", "mps", "--jobs", "1"]
    run_command("chart", *options, "--keep", "chart.json", folder=folder)
    (folder / ".chart.json.lock").unlink()


def make_check(folder: Path) -> None:
    """Write a check report, which can also be used as a baseline."""
    shutil.copy(HERE / "unportable_pipeline.py", folder)
    command = ("check", "unportable_pipeline:make", "--device", "mps", "--plain", "--json")
    report = run_command(*command, folder=folder, may_fail=True)
    (folder / "report.json").write_text(report.replace(str(folder.resolve()), "/home/user/project"))
    (folder / "unportable_pipeline.py").unlink()


def run_code(code: str, *arguments: str, folder: Path) -> None:
    """Run Python code with version 0.1."""
    subprocess.run([sys.executable, "-c", code, *arguments], cwd=folder, check=True)


def run_command(*arguments: str, folder: Path, may_fail: bool = False) -> str:
    """Run the command line of version 0.1 and return its output; `may_fail` allows exit status 1."""
    done = subprocess.run([sys.executable, "-m", "anyaccel", *arguments], cwd=folder, stdout=subprocess.PIPE, text=True)
    assert done.returncode in ((0, 1) if may_fail else (0,)), done.returncode
    return done.stdout


def main() -> None:
    """Write all files, or only the parts named on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path, help="the folder `src` of version 0.1")
    parser.add_argument("parts", nargs="*", help=f"parts to write, default all: {', '.join(PARTS)}")
    arguments = parser.parse_args()
    assert (arguments.source / "anyaccel" / "pictures").is_dir(), "this is not the source of version 0.1"
    with tempfile.TemporaryDirectory() as temporary:
        os.environ |= {
            "PYTHONPATH": str(arguments.source.resolve()),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        for part in arguments.parts or PARTS:
            os.environ["ANYACCEL_CACHE"] = str(Path(temporary) / "unused_cache")
            folder = Path(temporary) / part
            folder.mkdir()
            globals()[f"make_{part}"](folder)
            shutil.rmtree(FILES / part, ignore_errors=True)
            shutil.copytree(folder, FILES / part)
            print(f"written: {FILES / part}", flush=True)


if __name__ == "__main__":
    main()
