"""The option `--weights` of every command that loads a model."""

import json
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.generation.image_format import read_metadata
from anyaccel.generation.metadata import MediaMetadata
from anyaccel.planning.options import WEIGHT_FORMATS
from anyaccel.quantized_weights import quantize
from anyaccel.recipes import recipes
from anyaccel.server.http.responses import describe_model
from anyaccel.server.settings import ServedName, ServerSettings
from anyaccel.server.worker.denoise_progress import StepObserver
from anyaccel.server.worker.job_spec import JobSpec
from anyaccel.server.worker.served_model import ServedModel
from tests.cli.terminal import run_on_terminal
from tests.conftest import NEEDS_RECIPES, RunCli

pytestmark = [NEEDS_RECIPES, pytest.mark.usefixtures("pipelines_imported")]
DEVICE = ("--device", "virtual:mps")
SIDE, STEPS, SEED = 16, 2, 7
MODELS = {"text_encoder", "text_encoder_2", "transformer"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "flux"
    pipe: Any = recipes()["flux"].make()
    pipe.save_pretrained(folder)
    return folder


def read(path: Path) -> tuple[Any, MediaMetadata]:
    (metadata,) = read_metadata(path)
    with Image.open(path) as image:
        return numpy.asarray(image).astype(int), metadata


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    """Return the image of the int8 weights on the CPU."""
    result = anyaccel.generate(
        "a red apple", str(folder), "cpu", SEED, dtype="float32", weights="int8", num_inference_steps=STEPS,
        width=SIDE, height=SIDE,
    )  # fmt: skip
    return numpy.asarray(result[0]).astype(int)


def check(image: Any, metadata: MediaMetadata, expected: Any) -> None:
    assert abs(image - expected).max() <= 1
    assert metadata.weights == "int8"
    assert set(metadata.weight_errors) == MODELS
    assert all(0.004 < error < 0.007 for error in metadata.weight_errors.values())


def test_generate(run_cli_forked: RunCli, folder: Path, tmp_path: Path, expected: Any) -> None:
    options = ("--size", str(SIDE), "--steps", str(STEPS), "--seed", str(SEED), "-o", str(tmp_path / "a.png"))
    done = run_cli_forked("generate", "a red apple", "--model", str(folder), *DEVICE, "--weights", "int8", *options)
    assert done.returncode == 0, done.stderr
    assert "in float32, weights in int8 (virtual device" in done.stderr
    check(*read(tmp_path / "a.png"), expected)
    again = run_cli_forked("generate", "--from", str(tmp_path / "a.png"), "-o", str(tmp_path / "b.png"))
    assert again.returncode == 0, again.stderr
    assert "warning" not in again.stderr
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    other = run_cli_forked(
        "generate", "--from", str(tmp_path / "a.png"), "--weights", "nf4", "-o", str(tmp_path / "c.png")
    )
    assert "warning: the weights were int8 and are now nf4; the image may differ" in other.stderr
    assert read(tmp_path / "c.png")[1].weights == "nf4"


def test_generate_prints_the_plan_with_the_error(run_cli_forked: RunCli, folder: Path) -> None:
    done = run_cli_forked("generate", "--model", str(folder), *DEVICE, "--weights", "fp8", "--explain")
    assert done.returncode == 0, done.stderr
    assert "weights='fp8' was requested; relative error of the weights: text_encoder 2." in " ".join(
        done.stdout.split()
    )


def test_generate_shows_the_progress_on_a_terminal(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = quantize._quantize

    def quantize_slowly(*args: Any) -> Any:
        time.sleep(0.5)
        return original(*args)

    monkeypatch.setattr(quantize, "_quantize", quantize_slowly)
    command = ["generate", "a red apple", "--model", str(folder), "--device", "cpu", "--weights", "int8"]
    screen = run_on_terminal(
        [*command, "-o", str(tmp_path / "a.png")], press=(b"quantizing FluxTransformer2DModel to int8", b"\x03"),
        columns=200,
    )  # fmt: skip
    assert screen.status == 130
    assert "interrupted" in screen.text
    assert "Traceback" not in screen.text
    assert list(tmp_path.iterdir()) == []


def test_batch(run_cli_forked: RunCli, folder: Path, tmp_path: Path, expected: Any) -> None:
    row = {"prompt": "a red apple", "seed": SEED, "num_inference_steps": STEPS, "width": SIDE, "height": SIDE}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    out = tmp_path / "out"
    command = ("batch", str(tmp_path / "rows.jsonl"), "-o", str(out), "--model", str(folder), *DEVICE, "--weights")
    done = run_cli_forked(*command, "int8")
    assert done.returncode == 0, done.stderr
    assert "FluxPipeline on mps:0 in float32, weights in int8" in done.stderr
    (path,) = (out / "images").iterdir()
    check(*read(path), expected)
    other = run_cli_forked(*command, "nf4")
    assert "belongs to a different run: weights was int8 and is now nf4" in other.stderr


def test_serve(folder: Path, expected: Any) -> None:
    settings = ServerSettings(
        models=(ServedName("flux", str(folder)),), data=folder, device="mps", dtype="float32", weights="int8",
        sizes=((SIDE, SIDE),),
    )  # fmt: skip

    def use(accelerator: VirtualAccelerator) -> tuple[Any, MediaMetadata, dict[str, Any]]:
        model = ServedModel(settings.models[0], settings)
        spec = JobSpec(
            task="generate", model="flux", prompt="a red apple", seeds=(SEED,), width=SIDE, height=SIDE,
            num_inference_steps=STEPS,
        )  # fmt: skip
        image, metadata = model.generate(spec, 0, {}, StepObserver(lambda done, total: None))
        return numpy.asarray(image).astype(int), metadata, describe_model(model.facts(), 0)

    image, metadata, facts = run_forked("mps", use)
    check(image, metadata, expected)
    assert facts["weights"] == "int8"


def test_bench_passes_the_format_to_anyaccel_only(run_cli_forked: RunCli, folder: Path) -> None:
    options = ("--dtype", "float32", "--size", str(SIDE), "--steps", "1", "--rounds", "1", "--against", "nothing")
    done = run_cli_forked("bench", str(folder), "--device", "cpu", "--weights", "int8", *options, "--json")
    assert done.returncode == 0, done.stderr
    assert "transformer → int8" in json.dumps(json.loads(done.stdout), ensure_ascii=False)


def test_explain(run_cli_forked: RunCli, folder: Path) -> None:
    options = ("--size", str(SIDE), "--dtype", "float32", "--memory", "resident", "--json")
    plain, int8 = (
        json.loads(run_cli_forked("explain", str(folder), "--device", "mps:1MiB", *options, *weights).stdout)
        for weights in ((), ("--weights", "int8"))
    )
    assert int8["components"]["transformer"] < plain["components"]["transformer"] * 0.6
    assert int8["components"]["vae"] == plain["components"]["vae"]


def test_check(run_cli_forked: RunCli, folder: Path) -> None:
    done = run_cli_forked("check", str(folder), "--device", "mps", "--weights", "nf4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "note: the weights are quantized to nf4, also in the run on the CPU" in done.stdout
    assert "mps (virtual, placed): passes" in done.stdout
    real = run_cli_forked("check", str(folder), *DEVICE, "--weights", "nf4", "--real")
    assert real.returncode == 0, real.stdout + real.stderr
    assert "float32, weights in nf4: right" in real.stdout


def test_check_refuses_what_it_cannot_check(run_cli_forked: RunCli, folder: Path) -> None:
    plain = run_cli_forked("check", str(folder), "--device", "mps", "--weights", "nf4", "--plain")
    assert "plain and weights cannot be combined" in plain.stderr
    pipe: Any = recipes()["ddpm"].make()
    # Its layers have 4 and 16 columns, and a block has 32.
    pipe.unet = type(pipe.unet).from_config({**pipe.unet.config, "block_out_channels": (4, 4), "norm_num_groups": 4})
    with pytest.raises(anyaccel.AnyaccelError, match="has no layers that weights='gguf:Q4_0' can quantize"):
        anyaccel.check(pipe, "mps", weights="gguf:Q4_0")


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "a red apple", "--model"),
        ("explain",),
        ("check",),
        ("bench",),
        ("batch", "-", "-o", "out", "--model"),
    ],
)
def test_an_unknown_format_is_an_error_with_the_list(
    command: tuple[str, ...], run_cli_forked: RunCli, folder: Path
) -> None:
    done = run_cli_forked(*command, str(folder), "--weights", "gguf:Q8_1")
    assert done.returncode == 2, done.stderr
    assert f"weights must be one of {', '.join(WEIGHT_FORMATS)}, not 'gguf:Q8_1'" in done.stderr
    assert "hint: did you mean gguf:Q8_0?" in done.stderr
