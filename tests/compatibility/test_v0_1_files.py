"""Files that version 0.1 wrote: each is read by the command line or another public entry point of this version."""

import hashlib
import hmac
import json
import os
import platform
import shutil
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.conftest import NEEDS_RECIPES, RunCli, run_in_fork
from tests.server.live import Live

FILES = Path(__file__).parent / "v0_1"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Return a copy of the files, since commands modify them."""
    return Path(shutil.copytree(FILES, tmp_path / "v0_1"))


@pytest.fixture(scope="module")
def generate_imported() -> None:
    """Import the modules that the embedded model needs once, before processes are forked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # import-time warnings of libraries
        import diffusers
        import transformers

        import anyaccel

        names = ("StableDiffusionPipeline", "UNet2DConditionModel", "AutoencoderKL", "DPMSolverMultistepScheduler")
        assert all(hasattr(diffusers, name) for name in names)
        assert all(hasattr(transformers, name) for name in ("CLIPTextModel", "CLIPTokenizer", "CLIPImageProcessor"))
        assert all(hasattr(anyaccel, name) for name in ("generate", "place", "virtual"))


def generate_now(run: RunCli, folder: Path, prompt: str) -> bytes:
    """Return the pixels for a prompt with the settings of the images of version 0.1 and today's embedded model."""
    options = ("--seed", "7", "--steps", "2", "--device", "cpu", "--dtype", "float32", "-o", str(folder / "now.png"))
    done = run("generate", prompt, *options, "--force")
    assert done.returncode == 0, done.stderr
    return read_pixels(folder / "now.png")


def read_pixels(path: Path) -> bytes:
    with Image.open(path) as image:
        return image.convert("RGB").tobytes()


# Images


@pytest.mark.usefixtures("generate_imported")
@pytest.mark.parametrize("name", ["fox.png", "fox.jpg", "fox.webp"])
def test_an_image_is_generated_again_from_its_metadata(files: Path, name: str, run_cli_forked: RunCli) -> None:
    output = files / "again.png"
    done = run_cli_forked("generate", "--from", str(files / "images" / name), "-o", str(output), "--json")
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(done.stdout)
    expected = {"prompt": "a fox", "seed": 7, "steps": 2, "model": "embedded", "dtype": "float32", "device": "cpu:0"}
    assert {key: record[key] for key in expected} == expected
    # The embedded model has been trained further since.
    assert "warning: the revision was sha256:" in done.stderr
    assert read_pixels(output) == generate_now(run_cli_forked, files, "a fox")


@pytest.mark.usefixtures("generate_imported")
def test_a_contact_sheet_gives_all_of_its_images(files: Path, run_cli_forked: RunCli) -> None:
    sheet, output = files / "images" / "pair-grid.png", files / "again"
    done = run_cli_forked("generate", "--from", str(sheet), "-o", f"{output}/", "--json")
    assert done.returncode == 0, done.stderr
    records = json.loads(done.stdout)
    assert [(record["prompt"], record["seed"]) for record in records] == [("a fox", 7), ("a red apple", 7)]
    for record in records:
        assert read_pixels(Path(record["path"])) == generate_now(run_cli_forked, files, record["prompt"])


@pytest.mark.usefixtures("generate_imported")
def test_an_option_changes_an_image_of_version_0_1(files: Path, run_cli_forked: RunCli) -> None:
    source = str(files / "images" / "fox.png")
    done = run_cli_forked("generate", "--from", source, "--steps", "1", "-o", str(files / "other.png"), "--json")
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(done.stdout)
    assert (record["prompt"], record["seed"], record["steps"]) == ("a fox", 7, 1)


# Batches


def run_batch(run: RunCli, files: Path, name: str) -> dict[str, Any]:
    folder = files / "batch"
    options = ("--device", "cpu", "--dtype", "float32", "--workers", "1", "--json")
    done = run("batch", str(folder / f"{name}.jsonl"), "--out", str(folder / name), *options, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def read_images(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*.png")}


def test_a_finished_batch_is_not_run_again(files: Path, run_cli_forked: RunCli) -> None:
    before = read_images(files / "batch" / "finished")
    summary = run_batch(run_cli_forked, files, "finished")
    assert (summary["rows"], summary["done"], summary["failed"], summary["made"]) == (2, 2, 0, 0)
    assert read_images(files / "batch" / "finished") == before


@pytest.mark.slow
def test_a_stopped_batch_continues_with_its_last_row(files: Path, run_cli_forked: RunCli) -> None:
    folder = files / "batch" / "stopped"
    before = read_images(folder)
    assert len(before) == 3
    summary = run_batch(run_cli_forked, files, "stopped")
    assert (summary["rows"], summary["done"], summary["failed"], summary["made"]) == (4, 4, 0, 1)
    after = read_images(folder)
    assert {name: after[name] for name in before} == before
    assert len(after) == 4
    lines = [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]
    assert sorted(line["row"] for line in lines) == [1, 2, 3, 4]
    for line in lines:
        assert hashlib.sha256((folder / line["path"]).read_bytes()).hexdigest() == line["sha256"]
    assert len({Path(line["path"]).parent for line in lines}) == 1, "a batch has one folder of images"


def test_another_input_is_not_mixed_into_a_batch(files: Path, run_cli_forked: RunCli) -> None:
    batch = files / "batch"
    done = run_cli_forked("batch", str(batch / "finished.jsonl"), "--out", str(batch / "stopped"), "--device", "cpu")
    assert done.returncode == 2, done.stdout + done.stderr


# Jobs


@pytest.fixture
def service(files: Path) -> Iterator[Live]:
    """Start a service on the data of version 0.1. By default, its jobs would have expired."""
    limits = [f"--limit={name}=1e10" for name in ("keep_s", "deadline_s")]
    live = Live(files / "jobs", "embedded", "--device", "cpu", "--dtype", "float32", *limits)
    yield live
    live.end(signal.SIGTERM)


@pytest.mark.slow
def test_a_service_continues_with_the_jobs(service: Live, files: Path) -> None:
    with service.http() as client:
        jobs = {job["request"]["prompt"]: job for job in client.get("/v1/jobs").json()["data"]}
        assert set(jobs) == {"a fox", "a red apple", "a boat", "a castle"}

        fox = jobs["a fox"]
        assert fox["state"] == "done"
        assert [image["seed"] for image in fox["images"]] == [7, 8]
        assert [(image["width"], image["height"]) for image in fox["images"]] == [(128, 128), (128, 128)]
        secret = (FILES / "jobs" / "secret").read_bytes()
        for index, image in enumerate(fox["images"]):
            content = (FILES / "jobs" / "results" / fox["id"] / f"{index}.png").read_bytes()
            assert client.get(image["url"]).content == content
            token = hmac.new(secret, f"{fox['id']}/{index}".encode(), hashlib.sha256).hexdigest()[:32]
            address = f"/v1/jobs/{fox['id']}/images/{index}"
            assert client.get(address, params={"token": token}).content == content, "an address of 0.1 stays valid"

        apple = jobs["a red apple"]
        assert (apple["state"], apple["images"]) == ("failed", [])
        assert apple["error"] == {"code": "out_of_memory", "message": "the device has 16 GiB"}
        assert jobs["a boat"]["state"] == "cancelled"

        castle = service.wait_state(client, jobs["a castle"]["id"], "done", "failed", "cancelled")
        assert castle["state"] == "done", castle
        assert [image["seed"] for image in castle["images"]] == [5]
        assert client.get(castle["images"][0]["url"]).headers["content-type"] == "image/png"

        assert client.delete(f"/v1/jobs/{fox['id']}").status_code == 200
        assert not (files / "jobs" / "results" / fox["id"]).exists()


# The cache folder


def list_cache(run: RunCli, folder: Path) -> list[dict[str, Any]]:
    done = run("cache", "list", "--json", ANYACCEL_CACHE=str(folder))
    assert done.returncode == 0, done.stderr
    entries: list[dict[str, Any]] = json.loads(done.stdout)["entries"]
    return entries


def check_entry(entries: list[dict[str, Any]]) -> None:
    (entry,) = entries
    assert entry["state"] != "damaged"
    assert (entry["bytes"], entry["took_s"]) == (2600, 12.5)
    assert entry["key"]["pipeline"] == "StableDiffusionPipeline"
    assert entry["key"]["anyaccel"] == "0.1.0"


def test_a_compile_cache_entry_is_listed_exported_and_pruned(files: Path, run_cli_forked: RunCli) -> None:
    folder, archive = files / "cache" / "folder", files / "again.tar.gz"
    check_entry(list_cache(run_cli_forked, folder))
    done = run_cli_forked("cache", "export", str(archive), ANYACCEL_CACHE=str(folder))
    assert done.returncode == 0, done.stderr
    assert archive.stat().st_size > 0
    done = run_cli_forked("cache", "prune", "--all", ANYACCEL_CACHE=str(folder))
    assert done.returncode == 0, done.stderr
    assert list_cache(run_cli_forked, folder) == []


def test_an_exported_compile_cache_is_imported(files: Path, run_cli_forked: RunCli) -> None:
    folder = files / "new"
    archive = str(files / "cache" / "exported.tar.gz")
    done = run_cli_forked("cache", "import", archive, ANYACCEL_CACHE=str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    check_entry(list_cache(run_cli_forked, folder))


def place_and_count() -> None:
    """Print how many of four images a virtual Gaudi runs at a time."""
    import anyaccel
    from anyaccel.recipes import recipes

    with anyaccel.virtual("hpu"):
        options = {"dtype": "float32", "memory": "resident", "vae_tiling": False, "attention_slicing": "max"}
        pipe: Any = anyaccel.place(recipes()["stable-diffusion"].make(), "hpu", **options)
        call = {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "np", "seed": 3}
        assert len(pipe("a fox", num_images_per_prompt=4, **call).images) == 4
    print(json.dumps(pipe.plan.memory_in_use.value.images_per_call))


@NEEDS_RECIPES
@pytest.mark.usefixtures("generate_imported")
def test_a_call_that_ran_out_of_memory_starts_with_the_rule_that_it_needed(files: Path) -> None:
    with_history = {"ANYACCEL_CACHE": str(files / "cache" / "folder")}
    without_history = {"ANYACCEL_CACHE": str(files / "empty")}
    for environment, expected in ((without_history, None), (with_history, 2)):
        done = run_in_fork(place_and_count, ["python"], environment)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == expected, environment


def print_half_precision_costs() -> None:
    """Print the measured cost of half precision; runs in a forked process."""
    from anyaccel.backends.cpu_half_precision_speed import measure_half_precision

    measure_half_precision.cache_clear()  # another test may have measured it already
    print(json.dumps(measure_half_precision()))


@pytest.mark.usefixtures("generate_imported")
def test_the_measured_cost_of_half_precision_is_used(files: Path) -> None:
    """The key contains the CPU, the torch version and the thread count, so the test writes those of this machine."""
    import torch

    folder = files / "cache" / "folder"
    path = folder / "half_precision.json"
    ((key, costs),) = json.loads(path.read_text()).items()
    assert set(costs) == {"bfloat16", "float16"}
    assert key.endswith(f"torch {key.split()[-3]} threads 1")
    own = f"{platform.machine()} {platform.processor()} torch {torch.__version__} threads"
    counts = range(1, (os.cpu_count() or 1) + 1)
    own_costs = {f"{own} {count}": {"bfloat16": 0.01, "float16": 200.0} for count in counts}
    path.write_text(json.dumps({key: costs, **own_costs}))
    done = run_in_fork(print_half_precision_costs, ["python"], {"ANYACCEL_CACHE": str(folder)})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"bfloat16": 0.01, "float16": 200.0}


# Evidence, charts and reports


def test_a_verification_is_read_and_its_digest_is_right() -> None:
    from anyaccel.backends.evidence_files import read_verification

    text = (FILES / "evidence" / "cpu.json").read_text(encoding="utf-8")
    verification = read_verification(text, "cpu.json")
    content = json.loads(text)
    assert (verification.device, verification.virtual) == ("cpu", False)
    assert [finding.claim for finding in verification.findings] == [finding["claim"] for finding in content["findings"]]
    assert [pipeline.recipe for pipeline in verification.pipelines] == ["stable-diffusion"]
    assert verification.to_json() == text, "the same verification is the same file"


def test_the_packaged_verifications_are_on_the_sheets() -> None:
    import anyaccel

    for name in ("cpu", "cuda"):
        claims = anyaccel.sheet(name).claims()
        assert any(getattr(claim, "seen_on", ()) for claim in dict(claims).values()), name


def find_versions(run: RunCli) -> dict[str, str]:
    """Return the versions that a new chart on this machine would have."""
    import anyaccel

    done = run("devices", "--report")
    assert done.returncode == 0, done.stderr
    names = json.loads((FILES / "chart" / "chart.json").read_text())["made"]["versions"]
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    return {"anyaccel": anyaccel.__version__} | {name: lines[name] for name in names if name in lines}


@NEEDS_RECIPES
def test_a_chart_is_continued(files: Path, run_cli_forked: RunCli) -> None:
    """The chart is complete, so no pipeline runs. A chart of other versions is rejected."""
    path = files / "chart" / "chart.json"
    document = json.loads(path.read_text())
    document["made"]["versions"] = find_versions(run_cli_forked)
    path.write_text(json.dumps(document))
    chart = ("chart", "--family", "stable-diffusion", "--device", "mps", "--keep", str(path))
    done = run_cli_forked(*chart, "--json", "--html", str(files / "chart.html"), "--markdown", str(files / "chart.md"))
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)
    saved = json.loads(path.read_text())
    # The reasons for known failures depend on the version that prints the chart.
    for line in [*again["lines"], *document["lines"], *saved["lines"]]:
        for cell in line["cells"].values():
            cell.pop("reason", None)
    assert again["lines"] == document["lines"]
    assert again["sites"] == document["sites"]
    assert saved == document, "nothing was added"
    assert "StableDiffusionPipeline" in (files / "chart.html").read_text(encoding="utf-8")

    document["made"]["versions"]["torch"] = "0.0.1"
    path.write_text(json.dumps(document))
    assert run_cli_forked(*chart).returncode == 2


@pytest.mark.long
@NEEDS_RECIPES
def test_a_report_is_a_baseline(files: Path, run_cli_forked: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(Path(__file__).parent / "unportable_pipeline.py", files)
    monkeypatch.chdir(files)
    report = json.loads((FILES / "check" / "report.json").read_text())
    violation_count = len(report["devices"]["mps"]["violations"])
    check = ("check", "unportable_pipeline:make", "--device", "mps", "--plain", "--json")
    path = str(files / "check" / "report.json")
    monkeypatch.syspath_prepend(files)
    done = run_cli_forked(*check, "--baseline", path)
    assert done.returncode == 0, done.stdout + done.stderr
    (device,) = json.loads(done.stdout)["devices"].values()
    assert device["violations"] == []
    assert device["known"] == violation_count > 0
