"""`explain`: plans and memory forecasts from config files only."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import diffusers
import pytest

import anyaccel
from anyaccel.embedded.model import find_embedded_model
from anyaccel.errors import DoesNotFitError, ModelError, UnknownDeviceError, UsageError
from anyaccel.explanation.device_argument import find_device_target
from anyaccel.explanation.known_models import find_bundled_configs
from anyaccel.explanation.largest_size import choose_largest_side, find_largest_size
from anyaccel.explanation.text import describe_explanation
from anyaccel.recipes import recipes
from anyaccel.tracing.model_folder import read_model_folder
from tests.conftest import RunCli

SD, SDXL = "stable-diffusion-v1-5/stable-diffusion-v1-5", "stabilityai/sdxl-turbo"
FLUX, KLEIN = "black-forest-labs/FLUX.1-schnell", "black-forest-labs/FLUX.2-klein-4B"
GIB = 2**30


def test_explain_prints_json(run_cli_forked: RunCli) -> None:
    done = run_cli_forked("explain", FLUX, "--device", "gaudi2", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["fits"] is True
    assert document["peak_bytes"] == max(document["phases"].values()) < document["capacity_bytes"]
    assert list(document["phases"]) == ["load", "encode", "denoise", "decode"]
    assert document["components"]["transformer"] == pytest.approx(22.149 * GIB, rel=1e-3)
    assert document["components"]["text_encoder_2"] == pytest.approx(8.870 * GIB, rel=1e-3)
    assert document["largest_batch"] > 1
    assert {"name", "value", "reason"} <= set(document["decisions"][0])
    assert any(
        decision["name"] == "memory" and decision["value"] == "everything resident"
        for decision in document["decisions"]
    )
    assert document["download_bytes"] == pytest.approx(31.4 * GIB, rel=1e-2)
    assert "dtypes.int64" not in {limit["name"] for limit in document["limits"]}, "eager mode keeps it on a Gaudi 2"
    assert done.stderr == ""


def test_explain_exits_with_1_if_the_model_does_not_fit(run_cli_forked: RunCli) -> None:
    done = run_cli_forked("explain", "embedded", "--device", "cuda:450MiB", "--memory", "resident")
    assert done.returncode == 1
    assert "does not fit" in done.stdout
    assert "a device with" in done.stdout
    assert "denoise" in done.stdout


def test_klein_is_resident_on_one_trainium_core() -> None:
    plan = anyaccel.explain(KLEIN, "trn2", height=1024, width=1024)
    assert plan.forecast is not None
    assert plan.forecast.fits
    assert str(plan.memory) == "everything resident"
    assert {limit.name for limit in plan.forecast.limits} >= {"dtypes.float64", "random_numbers"}


@pytest.mark.parametrize(
    ("model", "device", "size", "rule"),
    [
        (SD, "mps:8GiB", 768, "everything resident, VAE tiled, attention one head at a time"),
        (FLUX, "gaudi1", 1024, "one model at a time"),
        (FLUX, "mps:16GiB", 1024, "one layer at a time"),
        pytest.param(SD, "mps:16GiB", 512, "everything resident", marks=pytest.mark.slow),
        pytest.param(SD, "mps:16GiB", 768, "everything resident", marks=pytest.mark.slow),
        pytest.param(SD, "mps:64GiB", 512, "everything resident", marks=pytest.mark.slow),
        pytest.param(SD, "mps:64GiB", 768, "everything resident", marks=pytest.mark.slow),
        pytest.param(FLUX, "gaudi2", 1024, "everything resident", marks=pytest.mark.slow),
        pytest.param(FLUX, "gaudi3", 1024, "everything resident", marks=pytest.mark.slow),
        pytest.param(SDXL, "trn2", 512, "everything resident", marks=pytest.mark.slow),
    ],
)
def test_memory_rules_of_the_documented_cases(model: str, device: str, size: int, rule: str) -> None:
    plan = anyaccel.explain(model, device, height=size, width=size)
    assert plan.forecast is not None
    assert plan.forecast.fits
    assert str(plan.memory).startswith(rule)
    largest = {FLUX: {"gaudi1": (3840, 3840), "mps:16GiB": (3072, 3072)}, SD: {"mps:16GiB": (2688, 2688)}}
    assert plan.forecast.largest_size == largest.get(model, {}).get(device, plan.forecast.largest_size)
    for width in (80, 100, 140):
        lines = describe_explanation(plan, model, width)
        # A line may be longer only if it holds a URL, which is not broken.
        assert [line for line in lines if len(line) > width and "https://" not in line] == []
        assert sum("peak" in line for line in lines) >= 1


def find_peak(**arguments: object) -> int:
    plan = anyaccel.explain(SD, "h200", **{"height": 512, "width": 512, **arguments})  # type: ignore[arg-type]
    assert plan.forecast is not None
    return plan.forecast.peak_bytes


def test_the_forecast_matches_the_h200_measurement() -> None:
    """Within 1 % of benchmarks/results/memory_cuda.json."""
    assert find_peak() == pytest.approx(3280 * 2**20, rel=0.01)


@pytest.mark.slow
def test_larger_batches_and_dtypes_need_more_memory() -> None:
    default = find_peak()
    assert default < find_peak(batch=4)
    assert find_peak(dtype="float32") > 1.5 * default
    assert find_peak(memory="component") < default


@pytest.mark.long
def test_attention_slicing_follows_from_the_score_limit() -> None:
    """Above 512 by 512 pixels, attention scores exceed the MPS limit, as the diffusers MPS guide says."""
    small, large = (anyaccel.explain(SD, "mps:16GiB", height=side, width=side) for side in (512, 768))
    assert small.forecast is not None
    assert large.forecast is not None
    assert small.forecast.largest_size == large.forecast.largest_size == (2688, 2688), "for any requested size"
    assert "largest batch at this size by memory: 3; the plan runs 1 at a time" in describe_explanation(small, SD)
    rule = large.attention.value
    assert rule.max_scores is not None
    scores = {plan: next(limit.what for limit in plan.forecast.limits if limit.name == "fused_attention")  # type: ignore[union-attr]
              for plan in (small, large)}  # fmt: skip
    assert scores[small] == "attention over 268,435,456 scores"
    assert scores[large] == "attention over 1,358,954,496 scores"
    assert 268_435_456 < rule.max_scores < 1_358_954_496


def test_a_folder_of_config_files_is_enough(tmp_path: Path) -> None:
    shutil.copytree(find_bundled_configs(SD) or "", tmp_path / "model")
    plan = anyaccel.explain(tmp_path / "model", "a10g", height=512, width=512)
    assert plan.forecast is not None
    assert dict(plan.forecast.components)["unet"] == pytest.approx(1.601 * GIB, rel=0.01)


def test_invalid_folders_raise(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(find_bundled_configs(SD) or "", folder)

    def expect_error(message: str, model: Path = folder) -> None:
        with pytest.raises(ModelError, match=message):
            anyaccel.explain(model, "a10g")

    config, index = folder / "unet" / "config.json", folder / "model_index.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "block_out_channels": "hello"}))
    expect_error(f"cannot build unet from {config}: ValueError")
    config.unlink()
    expect_error(f"requires unet, but {folder / 'unet'} has no config.json")
    index.write_text(json.dumps({**json.loads(index.read_text()), "unet": [1, 2]}))
    expect_error("has an invalid entry for unet")
    index.write_text("{}")
    expect_error("has no _class_name")
    expect_error("is a file", index)


class OwnPipeline(diffusers.StableDiffusionPipeline):
    """A pipeline class that is not part of diffusers."""


def test_a_folder_of_a_pipeline_class_outside_of_diffusers_raises(tmp_path: Path, run_cli_forked: RunCli) -> None:
    shutil.copytree(find_bundled_configs(SD) or "", tmp_path / "model")
    index = tmp_path / "model" / "model_index.json"
    content = json.loads(index.read_text())
    for name in ("OwnPipeline", ["pipeline", "OwnPipeline"]):
        index.write_text(json.dumps(content | {"_class_name": name}))
        with pytest.raises(ModelError, match="OwnPipeline, and explain supports only pipeline classes of") as caught:
            anyaccel.explain(tmp_path / "model", "a10g")
        assert "place(OwnPipeline.from_pretrained(…), device).plan" in caught.value.hint
    done = run_cli_forked("explain", str(tmp_path / "model"))
    assert done.returncode == 2
    assert "anyaccel check" not in done.stderr
    index.write_text(json.dumps(content | {"_class_name": "DiffusionPipeline"}))
    with pytest.raises(ModelError, match="explain has no recipe for it"):
        anyaccel.explain(tmp_path / "model", "a10g")
    # The hint works.
    tiny, kind = cast(Any, recipes()["stable-diffusion"].make()), cast(Any, OwnPipeline)
    pipe = kind(**tiny.components, requires_safety_checker=False)
    assert str(anyaccel.place(pipe, "cpu").plan.memory).startswith("everything resident")


@pytest.mark.parametrize("model", [None, 3, b"folder", ["folder"]])
def test_a_model_that_is_not_a_name_raises(model: Any) -> None:
    with pytest.raises(UsageError, match=f"not an object of the class {type(model).__name__}"):
        anyaccel.explain(model, "mps")


def test_a_loaded_pipeline_raises() -> None:
    pipe: Any = recipes()["stable-diffusion"].make()
    with pytest.raises(UsageError, match="not an object of the class StableDiffusionPipeline") as caught:
        anyaccel.explain(pipe, "mps")
    assert "anyaccel.place(pipe, device).plan" in caught.value.hint


def test_download_size_of_missing_weights(tmp_path: Path) -> None:
    folder = read_model_folder(Path(find_bundled_configs(SD) or ""))
    assert folder.missing_bytes(["unet", "vae"]) == 3438167540 + 334643276, "the default files, not their variants"
    assert folder.missing_bytes(["unet", "unheard_of"]) is None
    assert read_model_folder(find_embedded_model()).missing_bytes(["unet"]) == 0
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    (tmp_path / "transformer").mkdir()
    listed = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    listed.write_text('{"metadata": {"total_size": 7}}')
    assert read_model_folder(tmp_path).missing_bytes(["transformer"]) == 7
    assert read_model_folder(tmp_path).missing_bytes(["transformer", "vae"]) is None


def test_the_embedded_model_on_this_machine() -> None:
    plan = anyaccel.explain("embedded", "cpu")
    assert plan.forecast is not None
    assert plan.forecast.fits
    assert plan.forecast.size == (128, 128)
    # The bars are aligned with the capacity mark, whatever the peak is.
    for share in (0.5, 0.999, 1.0, 1.001, 3.0):
        peak = int(plan.forecast.capacity_bytes * share)
        forecast = replace(plan.forecast, peak_bytes=peak, phases=(("load", 0), ("denoise", peak)))
        lines = describe_explanation(replace(plan, forecast=forecast), "embedded")
        rows = [line for line in lines if line.startswith(("  load ", "  denoise "))]
        edge = next(line.index(mark) for line in lines for mark in "└┘" if mark in line)
        assert {row.index("│") for row in rows} == {edge}
        assert len({len(row.removesuffix("  peak")) for row in rows}) == 1


@pytest.mark.parametrize(
    ("device", "name", "capacity"),
    [
        ("h200", "h200", 150_109_880_320 - 400 * 2**20),
        ("cuda:24GiB", "cuda with 24GiB", 24 * GIB - 400 * 2**20),
        ("mps:16GiB", "mps with 16GiB", 16 * GIB * 2 // 3),
        ("mps:64GiB", "mps with 64GiB", 48 * GIB),
        ("rtx4090", "rtx4090", 24 * GIB - 400 * 2**20),
        ("RTX 4090 laptop", "rtx4090-laptop", 16 * GIB - 400 * 2**20),
        ("rx7900xtx", "rx7900xtx", 24 * GIB),
        ("arc-b580", "arc-b580", 12216 * 2**20),
        ("gaudi1", "gaudi1", 32 * 10**9),
        ("trn2", "trn2", 24 * GIB - 192 * 2**20),
    ],
)
def test_capacity_of_products_and_memory_sizes(device: str, name: str, capacity: int) -> None:
    target = find_device_target(device)
    assert target.name == name
    assert target.capacity_bytes == pytest.approx(capacity, abs=2)


def test_an_unavailable_device_becomes_its_smallest_product() -> None:
    target = find_device_target("hpu")
    assert target.name == "gaudi1"
    assert any("gaudi3" in note for note in target.notes)
    assert find_device_target("rocm").name == "rx7900xtx"
    assert any("`anyaccel devices rocm` lists its products" in note for note in find_device_target("rocm").notes)
    assert any("cannot be used as a torch device" in note for note in find_device_target("inf2").notes)


@pytest.mark.parametrize(
    ("model", "arguments", "error", "message"),
    [
        (SD, {"device": "gaudi9"}, UnknownDeviceError, "gaudi1"),
        (SD, {"device": "tpu:16GiB"}, UnknownDeviceError, "unknown device 'tpu'"),
        (SD, {"device": "cuda:lots"}, UsageError, "neither a device index nor a memory size"),
        (SD, {"device": "h200", "batch": 0}, UsageError, "the batch size must be an integer"),
        (SD, {"device": "mps:64"}, UnknownDeviceError, "did you mean mps:64GiB?"),
        (SD, {"device": "cuda:80"}, UnknownDeviceError, "did you mean cuda:80GiB?"),
        (SD, {"device": "cuda:24.5"}, UsageError, "did you mean cuda:24.5GiB?"),
        (SD, {"device": "gaudi2:16GiB"}, UsageError, "the memory size of gaudi2 is fixed(.|\n)*hpu:16GiB"),
        (SD, {"device": "gaudi2:16"}, UsageError, "hpu:16GiB"),
        (SD, {"device": "virtual:hpu"}, UsageError, "--device hpu"),
        (SD, {"device": "h200", "width": 0}, UsageError, "pixels"),
        (SD, {"device": "h200", "width": 10**9}, UsageError, "width must be an integer from 1 to 16384 pixels"),
        (SD, {"device": "h200", "width": 513, "height": 512}, UsageError, "use 512 or 520"),
        (SD, {"device": "h200", "memory": "fast"}, UsageError, "memory must be one of"),
        (SD, {"device": "mps:16GiB", "memory": "component"}, UsageError, "memory='phase'"),
        (SD, {"device": "h200", "dtype": "int8"}, UsageError, "float64, float32, bfloat16, float16"),
        ("", {"device": "h200"}, ModelError, "the model name is empty"),
        ("/nowhere/model", {"device": "h200"}, ModelError, "neither an existing folder nor a Hub ID"),
        ("nobody/nothing-at-all", {"device": "h200"}, ModelError, "cannot download the config files"),
    ],
)
def test_invalid_arguments_raise(
    model: str, arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        anyaccel.explain(model, **arguments)  # type: ignore[arg-type]


def test_the_largest_size_is_found_in_few_steps() -> None:
    measured = []

    def need(size: tuple[int, int]) -> int:
        measured.append(size)
        return 1000 + size[0] * size[1] ** 3 // 10**6

    for side in (64, 512, 768, 1000, 2048, 8192):
        measured.clear()
        assert find_largest_size(need, (side, side), 10**6) == (896, 896)
        assert len(measured) <= 10, side
    assert find_largest_size(lambda size: 10, (1024, 512), 100) == (4096, 2048)
    assert find_largest_size(lambda size: 1000, (512, 512), 100) is None
    assert find_largest_size(lambda size: None if size[0] > 1536 else 10, (512, 512), 100) == (1536, 1536)


def test_the_largest_tried_side_depends_on_the_default_size() -> None:
    """A small model decodes a large image in thousands of tiles, and tracing them takes minutes."""
    sides = [choose_largest_side(default, is_video=False) for default in ((128, 96), (1024, 1024), None)]
    assert sides == [1024, 4096, 4096]
    assert choose_largest_side((832, 480), is_video=True) == 1536
    plan = anyaccel.explain("embedded", "h200", height=256, width=256)
    assert plan.forecast is not None
    assert plan.forecast.largest_size == (1024, 1024), "8 times the default side, 128 pixels"
    assert "largest single image: 1024 × 1024 (no larger size was tried)" in describe_explanation(plan, "embedded")


def test_the_error_for_insufficient_memory() -> None:
    assert issubclass(DoesNotFitError, RuntimeError)
    assert DoesNotFitError.exit_status == 1


def test_the_command_line_hints_at_its_own_options(run_cli_forked: RunCli) -> None:
    for option, value, hint in (
        ("--batch", "0", "hint: for example --batch 1"),
        ("--size", "0", "hint: use WIDTHxHEIGHT in pixels, for example 512x768"),
    ):
        done = run_cli_forked("explain", SD, option, value)
        assert done.returncode == 2
        assert hint in done.stderr
