"""Pipelines outside of diffusers: classes of the user's package, and `custom_pipeline=` with a Python file."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy
import pytest

import anyaccel
from anyaccel.checking.check import check
from anyaccel.emulator.run_forked import run_forked
from anyaccel.recipes import recipes, run
from tests.conftest import NEEDS_RECIPES
from tests.runtime import custom_pipeline
from tests.runtime.custom_pipeline import CurvedScheduler, Shift, call, make

pytestmark = NEEDS_RECIPES
LIBRARY: Any = diffusers
OwnPipeline: Any = custom_pipeline.OwnPipeline
DEVICES = ["mps", "neuron", "hpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder written by `save_pretrained` of the user's class."""
    folder = tmp_path_factory.mktemp("own")
    make().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `pipeline.py`."""
    folder = tmp_path_factory.mktemp("code")
    shutil.copy(str(custom_pipeline.__file__), folder / "pipeline.py")
    return folder


def load(folder: Path, code: Any, **options: Any) -> Any:
    options = {"custom_pipeline": code, "trust_remote_code": True, **options}
    return anyaccel.DiffusionPipeline.from_pretrained(folder, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_a_class_of_the_user_is_placed(device: str) -> None:
    expected, refined = call(make()), call(make(refiner=Shift(4)))

    def use(_: Any) -> Any:
        pipe = anyaccel.place(make(), device, dtype="float32")
        by_phase = anyaccel.place(make(refiner=Shift(4)), device, dtype="float32", memory="phase")
        assert isinstance(pipe, OwnPipeline)
        assert pipe.shift.device.type == device
        return call(pipe), call(by_phase)

    images = run_forked(device, use)
    assert numpy.abs(images[0] - expected).max() < 1e-4
    assert numpy.abs(images[1] - refined).max() < 1e-4


def test_a_placed_pipeline_is_saved_and_loaded_again(tmp_path: Path) -> None:
    expected = call(make())

    def use(_: Any) -> Any:
        anyaccel.place(make(refiner=Shift(4)), "neuron", dtype="float32").save_pretrained(tmp_path)
        pipe: Any = OwnPipeline.from_pretrained(tmp_path, refiner=None)
        assert isinstance(pipe.scheduler, CurvedScheduler)
        assert OwnPipeline.from_pretrained(tmp_path).refiner is not None
        return call(anyaccel.place(pipe, "neuron", dtype="float32"))

    assert numpy.abs(run_forked("neuron", use) - expected).max() < 1e-4


@pytest.mark.parametrize(
    "loader",
    [
        lambda folder, code: load(folder, str(code), device="mps", dtype="float32"),
        lambda folder, code: load(folder, code / "pipeline.py").to("mps", dtype="float32"),
        lambda folder, code: anyaccel.place(
            LIBRARY.DiffusionPipeline.from_pretrained(folder, custom_pipeline=str(code), trust_remote_code=True), "mps",
            dtype="float32",
        ),
    ],
    ids=["device=", "file", "plain"],
)  # fmt: skip
def test_the_file_of_a_pipeline(loader: Callable[[Path, Path], Any], folder: Path, code: Path) -> None:
    expected = call(make())

    def use(_: Any) -> Any:
        pipe = loader(folder, code)
        assert type(pipe).__name__ == "OwnPipeline"
        assert pipe.unet.device.type == "mps"
        return call(pipe)

    assert numpy.abs(run_forked("mps", use) - expected).max() < 1e-4


def test_the_weights_of_the_file_of_a_pipeline_are_quantized(folder: Path, code: Path) -> None:
    expected = call(make())

    def use(_: Any) -> Any:
        pipe = load(folder, str(code), device="neuron", dtype="float32", weights="int8")
        return pipe.plan.weights.value, call(pipe)

    weights, image = run_forked("neuron", use)
    assert ("unet", "int8") in weights
    assert 0 < numpy.abs(image - expected).max() < 0.1


def test_files_of_the_same_name_are_independent(tmp_path: Path) -> None:
    """Diffusers runs both files in one module."""
    recipe: Any = recipes()["stable-diffusion"]
    recipe.make().save_pretrained(tmp_path)
    for name in ("First", "Second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pipeline.py").write_text(
            f"import diffusers\n\n\nclass {name}(diffusers.StableDiffusionPipeline):\n    pass\n"
        )
        pipe = load(tmp_path, tmp_path / name)
        assert type(pipe).__name__ == name
        assert numpy.array_equal(run(recipe, pipe), run(recipe, recipe.make()))


def make_for_check() -> Any:
    """Return the pipeline and its call arguments."""
    return make(), {"caption": "a fox"}


def test_a_class_of_the_user_is_checked() -> None:
    report = check("tests.runtime.test_custom_pipelines:make_for_check", ["mps"])
    assert report.pipeline == "OwnPipeline"
    assert report.passes, str(report)
    plain = check("tests.runtime.test_custom_pipelines:make_for_check", ["mps"], plain=True)
    lines = {Path(violation.file).name for violation in plain.devices["mps"].of("error")}
    assert "custom_pipeline.py" in lines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n", r"cannot import the pipeline file .*SyntaxError: invalid syntax \(pipeline.py, line 1\)"),
        ("x = 1\n", "defines no subclass of DiffusionPipeline"),
        ("import nothing_like_this\n", r"No module named 'nothing_like_this' \(line 1\)"),
        ("\nraise ValueError('boom')\n", r"ValueError: boom \(line 2\)"),
    ],
)
def test_a_faulty_file_is_named(text: str, message: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "pipeline.py").write_text(text)
    with pytest.raises(anyaccel.AnyaccelError, match=message) as caught:
        load(folder, tmp_path)
    assert str(tmp_path / "pipeline.py") in caught.value.message
    assert caught.value.hint


def test_other_errors_of_custom_pipelines_are_explained(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(anyaccel.AnyaccelError, match="must be a path or a name") as caught:
        load(folder, OwnPipeline)
    assert "from_pretrained of the class" in caught.value.hint
    with pytest.raises(anyaccel.AnyaccelError, match="cannot load") as caught:
        load(folder, "community_pipeline")
    assert "check the name 'community_pipeline'" in caught.value.hint
    (tmp_path / "pipeline.py").write_text(
        "import diffusers\n\n\nclass Own(diffusers.DiffusionPipeline):\n"
        "    def __init__(self, unet, other):\n        super().__init__()\n"
    )
    with pytest.raises(anyaccel.AnyaccelError, match=r"expected .*other") as caught:
        load(folder, tmp_path)
    assert "pass the missing components" in caught.value.hint


def test_missing_files_and_classes_are_named(folder: Path, code: Path, tmp_path: Path) -> None:
    for path in (str(tmp_path / "other.py"), f"{tmp_path}/nowhere", tmp_path, "other.py"):
        with pytest.raises(anyaccel.AnyaccelError, match="does not exist") as caught:
            load(folder, path)
        assert isinstance(caught.value, OSError)
    with pytest.raises(anyaccel.AnyaccelError, match="saved by the pipeline class OwnPipeline") as caught:
        anyaccel.DiffusionPipeline.from_pretrained(folder)
    assert "OwnPipeline.from_pretrained" in caught.value.hint
    with pytest.raises(anyaccel.AnyaccelError, match="would run code") as caught:
        load(folder, code, trust_remote_code=False)
    assert "trust_remote_code=True" in caught.value.hint
