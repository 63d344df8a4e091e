"""`anyaccel.generate`: reproducible images, seeds, rejected arguments and written files."""

import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

import anyaccel
from anyaccel.embedded.model import CALL_DEFAULTS
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import DeviceUnavailableError, ModelError, UsageError
from anyaccel.generation import model_loading
from anyaccel.generation.call_validation import check_image_call
from anyaccel.generation.generate import Result, generate
from anyaccel.generation.image_format import read_metadata
from anyaccel.generation.media import generate_one
from anyaccel.generation.model_loading import load_model, release_model
from anyaccel.generation.output_files import make_stem, read_destination, write_output_file, write_unique
from anyaccel.generation.request import make_request
from anyaccel.progress import ProgressListener
from anyaccel.recipes import recipes
from tests.conftest import NEEDS_RECIPES

pytestmark = NEEDS_RECIPES
CALL: dict[str, Any] = {"num_inference_steps": 2, "device": "cpu", "dtype": "float32"}
VIRTUAL = ["neuron", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hpu", "mps", "xpu", "npu", "mlu"))]


def save_recipe(name: str, folder: Path) -> str:
    pipe: Any = recipes()[name].make()
    pipe.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_recipe("stable-diffusion", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def result(model: str) -> Result:
    """Two prompts with two images each."""
    return generate(["a red apple", "a blue boat"], model, seed=7, num_images_per_prompt=2, **CALL)


@pytest.fixture(scope="module", autouse=True)
def _release() -> Iterator[None]:
    yield
    release_model()


def test_image_equals_the_same_image_generated_alone(result: Result, model: str) -> None:
    assert result.seeds == (7, 8, 7, 8)
    assert len({image.tobytes() for image in result}) == 4
    again = generate(["a blue boat", "a red apple"], model, seed=[8, 7], **CALL)
    assert again[0].tobytes() == result[3].tobytes()
    assert again[1].tobytes() == result[0].tobytes()


def test_result_contains_metadata(result: Result, model: str) -> None:
    assert (len(result), result.images[0].size, result.plan.device) == (4, (16, 16), "cpu:0")
    assert len(result.timings.generate_s) == 4
    assert all(seconds > 0 for seconds in result.timings.generate_s)
    metadata = result.metadata[1]
    assert (metadata.prompt, metadata.seed, metadata.steps, metadata.guidance) == ("a red apple", 8, 2, 7.5)
    assert (metadata.width, metadata.height, metadata.dtype, metadata.device) == (16, 16, "float32", "cpu:0")
    assert metadata.model == model
    assert (metadata.pipeline, metadata.scheduler) == ("StableDiffusionPipeline", "PNDMScheduler")
    assert set(metadata.versions) == {"anyaccel", "diffusers", "torch", "transformers"}
    assert repr(result) == "Result(4 images, seeds 7, 8, 7, 8, on cpu:0 in float32)"


def test_notebook_shows_the_result(result: Result, tmp_path: Path) -> None:
    (tmp_path / "shown.png").write_bytes(result._repr_png_() or b"")
    assert read_metadata(tmp_path / "shown.png") == result.metadata
    with Image.open(tmp_path / "shown.png") as sheet:
        assert sheet.width > 2 * 16
        assert sheet.crop((2, 2, 18, 18)).tobytes() == result[0].tobytes()
    shown = Result(result.images[:1], (7,), result.plan, result.timings, result.metadata[:1])._repr_html_()
    assert shown.startswith('<img src="data:image/png;base64,')
    assert "a red apple: Result(1 image, seed 7, on cpu:0 in float32)" in shown


def test_contact_sheet_shows_all_images(result: Result) -> None:
    assert result.contact_sheet().width > 2 * 16
    single = Result(result.images[:1], (7,), result.plan, result.timings, result.metadata[:1])
    assert single.contact_sheet() is single.images[0]


def test_seed_is_random_by_default(model: str) -> None:
    first, second = (generate("x", model, **CALL) for _ in range(2))
    assert first.seeds != second.seeds
    assert generate("x", model, seed=first.seeds[0], **CALL)[0].tobytes() == first[0].tobytes()


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
def test_file_reproduces_its_image(result: Result, tmp_path: Path, suffix: str) -> None:
    files = result.save(tmp_path / f"apple{suffix}")
    assert [file.name for file in files] == [f"apple-{number}{suffix}" for number in (1, 2, 3, 4)]
    (metadata,) = read_metadata(files[3])
    again = generate(**metadata.arguments())
    assert again[0].tobytes() == result[3].tobytes()
    assert again.metadata == result.metadata[3:]


def test_speed_level_is_reproduced(model: str) -> None:
    call = {**CALL, "num_inference_steps": 8}
    exact, fast = generate("x", model, seed=1, **call), generate("x", model, seed=1, speed="fast", **call)
    assert exact[0].tobytes() != fast[0].tobytes()
    assert (exact.metadata[0].speed, fast.metadata[0].speed) == ("exact", "fast")
    assert generate(**fast.metadata[0].arguments())[0].tobytes() == fast[0].tobytes()


def test_further_arguments_are_recorded(model: str) -> None:
    call: dict[str, Any] = {"negative_prompt": "snow", "height": 24, "width": 16, "guidance_rescale": 0.5}
    first = generate("x", model, seed=1, **CALL, **call)
    assert first[0].size == (16, 24)
    assert first.metadata[0].negative_prompt == "snow"
    assert generate(**first.metadata[0].arguments())[0].tobytes() == first[0].tobytes()


def test_a_list_is_a_tuple_for_an_argument_that_requires_one(tmp_path: Path) -> None:
    model = save_recipe("stable-diffusion-xl", tmp_path)
    size: dict[str, Any] = {"width": 64, "height": 64, "seed": 1}
    plain, large = (
        generate("x", model, target_size=target, **size, **CALL)[0].tobytes() for target in ((64, 64), [512, 512])
    )
    assert plain != large
    assert generate("x", model, target_size=(512, 512), **size, **CALL)[0].tobytes() == large


def test_numpy_scalars_are_recorded_as_python_scalars(model: str, result: Result) -> None:
    again = generate("a red apple", model, "cpu", 7, dtype="float32", num_inference_steps=numpy.int64(2))
    assert again.metadata == result.metadata[:1]
    assert type(again.metadata[0].steps) is int


def test_only_the_last_model_is_cached(model: str, tmp_path: Path) -> None:
    release_model()
    assert generate("x", model, seed=1, **CALL).timings.load_s > 0
    assert generate("y", model, seed=2, **CALL).timings.load_s == 0
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    assert generate("x", copy, seed=1, **CALL).timings.load_s > 0
    assert len(model_loading._CACHE) == 1
    config = json.loads((copy / "scheduler" / "scheduler_config.json").read_text())
    (copy / "scheduler" / "scheduler_config.json").write_text(json.dumps(config | {"beta_end": 0.02}))
    assert generate("x", copy, seed=1, **CALL).timings.load_s > 0, "the folder has changed since it was cached"


def test_hub_model_is_recorded_with_its_commit(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the layout of the hub cache, so nothing is downloaded."""
    commit = "a" * 40
    repository = tmp_path / "models--org--tiny"
    shutil.copytree(model, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for module in ("huggingface_hub.constants", "diffusers.utils.constants", "transformers.utils.hub"):
        for name in ("HF_HUB_CACHE", "HF_MODULES_CACHE"):
            monkeypatch.setattr(f"{module}.{name}", str(tmp_path), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("diffusers.pipelines.pipeline_utils.HF_HUB_OFFLINE", True, raising=False)
    first = generate("a red apple", "org/tiny", seed=7, **CALL)
    assert (first.metadata[0].model, first.metadata[0].revision) == ("org/tiny", commit)
    assert generate(**first.metadata[0].arguments())[0].tobytes() == first[0].tobytes()
    with pytest.raises(ModelError, match="cannot load org/tiny"):
        generate("x", "org/tiny", revision="b" * 40, **CALL)


@pytest.mark.parametrize("device", VIRTUAL)
def test_virtual_device_generates_the_same_image(result: Result, model: str, device: str) -> None:
    def make(_: Any) -> tuple[Any, bool, str]:
        first = generate("a red apple", model, f"virtual:{device}", 7, num_inference_steps=2, dtype="float32")
        return numpy.asarray(first[0]), first.plan.virtual, first.metadata[0].device_kind

    pixels, virtual, kind = run_forked(device, make)
    assert virtual
    assert kind == f"virtual:{device}"
    assert numpy.abs(pixels.astype(int) - numpy.asarray(result[0]).astype(int)).max() <= 2


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ({"prompt": 5}, "the prompt must be a string", "a red apple"),
        ({"prompt": []}, "the prompt must be a string", "a red apple"),
        ({"prompt": "half \udc80"}, "the prompt is not valid Unicode", "UTF-8"),
        ({"negative_prompt": ["a", "b"]}, "negative_prompt must be one string", "blurry"),
        ({"num_images_per_prompt": 0}, "images per prompt must be a positive integer", "-n 1"),
        ({"num_inference_steps": 0}, "a positive integer", "num_inference_steps=20"),
        ({"seed": -1}, "a seed must be an integer", "seed=7"),
        ({"seed": 2**64}, "a seed must be an integer", "seed=7"),
        ({"seed": [1, 2]}, "got 2 seeds for 1 image", "one seed per image"),
        ({"height": 17}, "height must be a multiple of 2 for this model, not 17", "use 16 or 18"),
        ({"height": 0}, "height must be an integer from 1 to 16384 pixels, not 0", "height=512"),
        ({"width": 16.0}, "width must be an integer from 1 to 16384 pixels, not 16.0", "width=512"),
        ({"height": 1}, "height must be a multiple of 2 for this model, not 1", "use 2"),
        (
            {"num_inference_step": 3},
            "does not accept the argument num_inference_step",
            "did you mean num_inference_steps?",
        ),
        ({"generator": None}, "does not accept the argument generator", "seed="),
        ({"output_type": "np"}, "does not accept the argument output_type", "PIL"),
        ({"dtype": "int8"}, "a floating-point dtype", "float32"),
        ({"dtype": "floot"}, "unknown dtype 'floot'", "did you mean float"),
        ({"device": "nueron"}, "unknown device 'nueron'", "did you mean neuron?"),
        ({"revision": "main"}, "which is not a Hub model", "omit the revision"),
    ],
)
def test_invalid_arguments_are_rejected(model: str, arguments: dict[str, Any], message: str, hint: str) -> None:
    call: dict[str, Any] = {"prompt": "x", "model": model, "seed": 7} | CALL | arguments
    with pytest.raises(UsageError, match=message) as caught:
        generate(**call)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("recipe", "call", "message"),
    [
        (
            "latent-consistency",
            {"negative_prompt": "x"},
            "LatentConsistencyModelPipeline does not accept the argument negative_prompt",
        ),
        ("ddpm", {}, "DDPMPipeline does not accept a prompt"),
        ("stable-diffusion-image-to-image", {}, r"StableDiffusionImg2ImgPipeline requires image .*\n.*--image PATH"),
        ("marigold-depth", {}, "generates .*, not images, video or audio"),
    ],
)
def test_unsuitable_pipelines_are_rejected(tmp_path: Path, recipe: str, call: dict[str, Any], message: str) -> None:
    folder = save_recipe(recipe, tmp_path)
    with pytest.raises(UsageError, match=message):
        generate("x", folder, seed=1, **CALL, **call)


def test_pipeline_without_a_module_is_accepted() -> None:
    """For example, a class created by `exec` without a `__name__`."""
    names: dict[str, Any] = {"__name__": None}
    exec("class Pipeline:\n    def __call__(self, prompt, width=64): ...", names)
    pipe = names["Pipeline"]()
    check_image_call(pipe, {"width": 64})
    with pytest.raises(UsageError, match="Pipeline does not accept the argument height"):
        check_image_call(pipe, {"height": 64})


def test_environment_variable_sets_the_auto_device(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYACCEL_DEVICE", "mlu")
    with pytest.raises(DeviceUnavailableError, match=r"mlu is not available \(from ANYACCEL_DEVICE\)"):
        generate("x", model, seed=1)


def test_embedded_model_has_its_own_call_defaults() -> None:
    request = make_request("x", seed=1)
    assert request.model.kind == "embedded"
    assert request.call == CALL_DEFAULTS
    assert make_request("x", "embedded", num_inference_steps=3).call["num_inference_steps"] == 3


class RecordingListener(ProgressListener):
    """Records progress events; raises KeyboardInterrupt at step `end_at`."""

    def __init__(self, end_at: int | None = None) -> None:
        self.steps: list[tuple[int, int | None]] = []
        self.components: list[str] = []
        self.end_at = end_at

    def on_component(self, done: int, total: int, name: str) -> None:
        self.components.append(name)

    def on_step(self, done: int, total: int | None) -> None:
        self.steps.append((done, total))
        if done == self.end_at:
            raise KeyboardInterrupt


def test_listener_receives_every_component_and_step(model: str, result: Result, capsys: Any) -> None:
    release_model()
    request = make_request("a red apple", model, "cpu", 7, dtype="float32", num_inference_steps=2)
    listener = RecordingListener()
    loaded = load_model(request, listener)
    generated = generate_one(loaded, "a red apple", 7, request.call, listener)
    assert set(listener.components) == {"vae", "text_encoder", "tokenizer", "unet", "scheduler", ""}
    assert listener.steps[0][0] == 0
    assert listener.steps[-1][0] == listener.steps[-1][1]
    assert generated.image.tobytes() == result[0].tobytes()
    assert capsys.readouterr() == ("", ""), "diffusers and transformers must not print progress bars"


def test_image_after_an_interrupted_one_is_correct(model: str, result: Result) -> None:
    request = make_request("a red apple", model, "cpu", 7, dtype="float32", num_inference_steps=2)
    loaded = load_model(request)
    with pytest.raises(KeyboardInterrupt):
        generate_one(loaded, "a red apple", 7, request.call, RecordingListener(end_at=1))
    assert generate_one(loaded, "a red apple", 7, request.call).image.tobytes() == result[0].tobytes()


@pytest.mark.parametrize(
    ("prompt", "stem"),
    [
        ("A red apple!", "a-red-apple"),
        ("ein grüner Baum 中文", "ein-grüner-baum-中文"),
        ("../../etc/passwd", "etc-passwd"),
        ("", "image"),
        ("!?\0/", "image"),
        ("x" * 500, "x" * 60),
        ("中" * 500, "中" * 60),
        ("word " * 100, "-".join(["word"] * 12)),
    ],
)
def test_file_stem_of_a_prompt(prompt: str, stem: str) -> None:
    assert make_stem(prompt) == stem
    assert len(make_stem(prompt).encode()) < 200


def test_files_are_named_by_prompt_and_seed_and_not_overwritten(result: Result, tmp_path: Path) -> None:
    names = ["a-red-apple-7.png", "a-red-apple-8.png", "a-blue-boat-7.png", "a-blue-boat-8.png"]
    folder = f"{tmp_path}/new/folder/"
    assert [path.name for path in result.save(folder)] == names
    first = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    assert [path.name for path in result.save(folder)] == [name.replace(".png", "-2.png") for name in names]
    assert [path.name for path in result.save(folder, force=True)] == names
    assert {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name in names} == first
    assert len(list(Path(folder).iterdir())) == 8, "temporary files are removed"


def test_existing_file_is_rejected_before_anything_is_written(result: Result, tmp_path: Path) -> None:
    (tmp_path / "apple-3.png").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"apple-3\.png already exists"):
        result.save(tmp_path / "apple.png")
    assert [path.name for path in tmp_path.iterdir()] == ["apple-3.png"]
    result.save(tmp_path / "apple.png", force=True)
    assert read_metadata(tmp_path / "apple-3.png") == result.metadata[2:3]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("image.bmp", r"image\.bmp has the unknown suffix '\.bmp'\nhint: .*known: \.png, \.jpg, \.jpeg, \.webp"),
        ("image", "image has no suffix"),
        ("missing/image.png", r"the folder .* does not exist"),
        ("file.png/image.png", "is not a valid file name: Not a directory"),
        ("file.png/", "is a file, not a folder"),
        ("folder.png/../folder.png", r"is not a valid file name|the folder .* does not exist"),
        ("n" * 300 + ".png", "is not a valid file name: File name too long"),
        ("nul\0.png", "is not a valid file name"),
    ],
)
def test_invalid_destination_is_rejected(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file.png").write_bytes(b"")
    with pytest.raises(UsageError, match=message):
        read_destination(f"{tmp_path}/{name}", images=1, sheet=False, force=True)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, a folder that even root cannot write to")
def test_read_only_folder_is_detected_by_writing() -> None:
    with pytest.raises(UsageError, match="the folder /proc is not writable"):
        read_destination("/proc/image.png", images=1, sheet=False, force=False)


def test_concurrent_writers_never_overwrite_each_other(tmp_path: Path) -> None:
    written: list[Path] = []
    rejected: list[bytes] = []

    def write(content: bytes) -> None:
        try:
            write_output_file(tmp_path / "one.png", content)
        except FileExistsError:
            rejected.append(content)
        written.append(write_unique(tmp_path / "free.png", content))

    contents = [bytes([number]) * 10_000 for number in range(16)]
    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(rejected) == 15
    assert (tmp_path / "one.png").read_bytes() not in rejected
    assert sorted(path.read_bytes() for path in written) == contents
    assert len(list(tmp_path.iterdir())) == 17, "temporary files are removed"


def test_file_is_not_overwritten_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: object, target: object) -> None:
        raise PermissionError(1, "Operation not permitted")  # FAT file systems have no hard links

    monkeypatch.setattr(os, "link", fail)
    write_output_file(tmp_path / "a.png", b"first")
    with pytest.raises(FileExistsError):
        write_output_file(tmp_path / "a.png", b"second")
    assert (tmp_path / "a.png").read_bytes() == b"first"
    assert len(list(tmp_path.iterdir())) == 1


def test_full_disk_leaves_no_file(tmp_path: Path) -> None:
    """A file size limit makes a write fail halfway, like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
    try:
        with pytest.raises(anyaccel.AnyaccelError, match=r"cannot write .*a\.png: File too large") as caught:
            write_output_file(tmp_path / "a.png", bytes(10_000), force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert caught.value.exit_status == 3
    assert "same seed" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
