"""`anyaccel.generate`: the same pictures each time and alone, their seeds, what is refused, and what is written."""

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
from anyaccel.generation import model_cache
from anyaccel.generation.call_validation import check_image_call
from anyaccel.generation.generate import Result, generate
from anyaccel.generation.image import generate_image
from anyaccel.generation.image_format import read_metadata
from anyaccel.generation.model_cache import load_model, release_model
from anyaccel.generation.output_files import make_stem, read_destination, write_free, write_whole
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
    """Two prompts, two pictures of each."""
    return generate(["a red apple", "a blue boat"], model, seed=7, num_images_per_prompt=2, **CALL)


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Iterator[None]:
    yield
    release_model()


def test_each_picture_is_the_same_as_if_it_had_been_made_alone(result: Result, model: str) -> None:
    assert result.seeds == (7, 8, 7, 8)
    assert len({image.tobytes() for image in result}) == 4
    again = generate(["a blue boat", "a red apple"], model, seed=[8, 7], **CALL)
    assert again[0].tobytes() == result[3].tobytes()
    assert again[1].tobytes() == result[0].tobytes()


def test_the_result_tells_how_it_was_made(result: Result, model: str) -> None:
    assert (len(result), result.images[0].size, result.plan.device) == (4, (16, 16), "cpu:0")
    assert len(result.timings.generate_s) == 4
    assert all(seconds > 0 for seconds in result.timings.generate_s)
    origin = result.origins[1]
    assert (origin.prompt, origin.seed, origin.steps, origin.guidance) == ("a red apple", 8, 2, 7.5)
    assert (origin.width, origin.height, origin.dtype, origin.device) == (16, 16, "float32", "cpu:0")
    assert (origin.model, origin.pipeline, origin.scheduler) == (model, "StableDiffusionPipeline", "PNDMScheduler")
    assert set(origin.versions) == {"anyaccel", "diffusers", "torch", "transformers"}
    assert repr(result) == "Result(4 images, seeds 7, 8, 7, 8, on cpu:0 in float32)"


def test_a_notebook_shows_it(result: Result, tmp_path: Path) -> None:
    (tmp_path / "shown.png").write_bytes(result._repr_png_())
    assert read_metadata(tmp_path / "shown.png") == result.origins
    with Image.open(tmp_path / "shown.png") as sheet:
        assert sheet.width > 2 * 16
        assert sheet.crop((2, 2, 18, 18)).tobytes() == result[0].tobytes()
    shown = Result(result.images[:1], (7,), result.plan, result.timings, result.origins[:1])._repr_html_()
    assert shown.startswith('<img src="data:image/png;base64,')
    assert "a red apple: Result(1 image, seed 7, on cpu:0 in float32)" in shown


def test_a_seed_is_drawn_where_none_is_given(model: str) -> None:
    first, second = (generate("x", model, **CALL) for _ in range(2))
    assert first.seeds != second.seeds
    assert generate("x", model, seed=first.seeds[0], **CALL)[0].tobytes() == first[0].tobytes()


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
def test_a_file_makes_its_picture_again(result: Result, tmp_path: Path, suffix: str) -> None:
    files = result.save(tmp_path / f"apple{suffix}")
    assert [file.name for file in files] == [f"apple-{number}{suffix}" for number in (1, 2, 3, 4)]
    (origin,) = read_metadata(files[3])
    made = generate(**origin.arguments())
    assert made[0].tobytes() == result[3].tobytes()
    assert made.origins == result.origins[3:]


def test_a_fast_picture_is_made_again_as_fast(model: str) -> None:
    call = {**CALL, "num_inference_steps": 8}
    exact, fast = generate("x", model, seed=1, **call), generate("x", model, seed=1, speed="fast", **call)
    assert exact[0].tobytes() != fast[0].tobytes()
    assert (exact.origins[0].speed, fast.origins[0].speed) == ("exact", "fast")
    assert generate(**fast.origins[0].arguments())[0].tobytes() == fast[0].tobytes()


def test_arguments_beyond_the_usual_are_kept(model: str) -> None:
    call: dict[str, Any] = {"negative_prompt": "snow", "height": 24, "width": 16, "guidance_rescale": 0.5}
    made = generate("x", model, seed=1, **CALL, **call)
    assert made[0].size == (16, 24)
    assert made.origins[0].negative_prompt == "snow"
    assert generate(**made.origins[0].arguments())[0].tobytes() == made[0].tobytes()


def test_numbers_of_numpys_are_recorded_as_numbers(model: str, result: Result) -> None:
    made = generate("a red apple", model, "cpu", 7, dtype="float32", num_inference_steps=numpy.int64(2))
    assert made.origins == result.origins[:1]
    assert type(made.origins[0].steps) is int


def test_the_last_model_is_kept_and_only_that(model: str, tmp_path: Path) -> None:
    release_model()
    assert generate("x", model, seed=1, **CALL).timings.load_s > 0
    assert generate("y", model, seed=2, **CALL).timings.load_s == 0
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    assert generate("x", copy, seed=1, **CALL).timings.load_s > 0
    assert len(model_cache._KEPT) == 1
    config = json.loads((copy / "scheduler" / "scheduler_config.json").read_text())
    (copy / "scheduler" / "scheduler_config.json").write_text(json.dumps(config | {"beta_end": 0.02}))
    assert generate("x", copy, seed=1, **CALL).timings.load_s > 0, "the folder has changed"


def test_a_hub_model_is_named_with_its_commit(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the hub's own cache lays it out, so that nothing is downloaded."""
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
    made = generate("a red apple", "org/tiny", seed=7, **CALL)
    assert (made.origins[0].model, made.origins[0].revision) == ("org/tiny", commit)
    assert generate(**made.origins[0].arguments())[0].tobytes() == made[0].tobytes()
    with pytest.raises(ModelError, match="org/tiny cannot be loaded"):
        generate("x", "org/tiny", revision="b" * 40, **CALL)


@pytest.mark.parametrize("device", VIRTUAL)
def test_a_virtual_device_gives_the_same_picture(result: Result, model: str, device: str) -> None:
    def make(_: Any) -> tuple[Any, bool, str]:
        made = generate("a red apple", model, f"virtual:{device}", 7, num_inference_steps=2, dtype="float32")
        return numpy.asarray(made[0]), made.plan.virtual, made.origins[0].device_kind

    pixels, virtual, kind = run_forked(device, make)
    assert virtual
    assert kind == f"virtual:{device}"
    assert numpy.abs(pixels.astype(int) - numpy.asarray(result[0]).astype(int)).max() <= 2


@pytest.mark.parametrize(
    ("arguments", "words", "hint"),
    [
        ({"prompt": 5}, "a prompt is a text", "a red apple"),
        ({"prompt": []}, "a prompt is a text", "a red apple"),
        ({"prompt": "half \udc80"}, "a text in Unicode", "UTF-8"),
        ({"negative_prompt": ["a", "b"]}, "negative_prompt is one text", "give a text"),
        ({"num_images_per_prompt": 0}, "at least one picture", "-n 1"),
        ({"num_inference_steps": 0}, "an integer of at least 1", "num_inference_steps=20"),
        ({"seed": -1}, "a seed must be an integer", "seed=7"),
        ({"seed": 2**64}, "a seed must be an integer", "seed=7"),
        ({"seed": [1, 2]}, "2 seeds were given for 1 image", "one seed for each image"),
        ({"height": 17}, "height must be a multiple of 2 for this model, not 17", "use 16 or 18"),
        ({"height": 0}, "height must be an integer from 1 to 16384 pixels, not 0", "height=512"),
        ({"width": 16.0}, "width must be an integer from 1 to 16384 pixels, not 16.0", "width=512"),
        ({"height": 1}, "height must be a multiple of 2 for this model, not 1", "use 2"),
        ({"num_inference_step": 3}, "takes no num_inference_step", "did you mean num_inference_steps?"),
        ({"generator": None}, "generator is not taken here", "seed="),
        ({"output_type": "np"}, "output_type is not taken here", "PIL"),
        ({"dtype": "int8"}, "a floating type", "float32"),
        ({"dtype": "floot"}, "no number type 'floot'", "did you mean float"),
        ({"device": "nueron"}, "unknown device 'nueron'", "did you mean neuron?"),
        ({"revision": "main"}, "has no revisions", "leave revision out"),
    ],
)
def test_what_cannot_work_is_refused(model: str, arguments: dict[str, Any], words: str, hint: str) -> None:
    asked: dict[str, Any] = {"prompt": "x", "model": model, "seed": 7} | CALL | arguments
    with pytest.raises(UsageError, match=words) as caught:
        generate(**asked)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("recipe", "call", "words"),
    [
        ("latent-consistency", {"negative_prompt": "x"}, "LatentConsistencyModelPipeline takes no negative_prompt"),
        ("ddpm", {}, "DDPMPipeline takes no prompt"),
        ("model-scope", {}, "TextToVideoSDPipeline makes frames, and no pictures"),
        ("stable-diffusion-image-to-image", {}, "begin with a picture and are given none"),
    ],
)
def test_other_kinds_of_pipelines(tmp_path: Path, recipe: str, call: dict[str, Any], words: str) -> None:
    folder = save_recipe(recipe, tmp_path)
    with pytest.raises(UsageError, match=words):
        generate("x", folder, seed=1, **CALL, **call)


def test_a_pipeline_without_a_module_may_make_pictures() -> None:
    """Like one that a program made by `exec` without a `__name__`."""
    names: dict[str, Any] = {"__name__": None}
    exec("class Made:\n    def __call__(self, prompt, width=64): ...", names)
    pipe = names["Made"]()
    check_image_call(pipe, {"width": 64})
    with pytest.raises(UsageError, match="Made takes no height"):
        check_image_call(pipe, {"height": 64})


def test_the_variable_names_the_device_that_auto_means(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYACCEL_DEVICE", "mlu")
    with pytest.raises(DeviceUnavailableError, match=r"mlu is not available \(from ANYACCEL_DEVICE\)"):
        generate("x", model, seed=1)


def test_the_embedded_model_is_called_as_it_was_measured() -> None:
    order = make_request("x", seed=1)
    assert order.model.kind == "embedded"
    assert order.call == CALL_DEFAULTS
    assert make_request("x", "embedded", num_inference_steps=3).call["num_inference_steps"] == 3


class Steps(ProgressListener):
    """Notes what it is told, and ends the work at a step if it is to."""

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


def test_a_listener_hears_of_every_component_and_step(model: str, result: Result, capsys: Any) -> None:
    release_model()
    order = make_request("a red apple", model, "cpu", 7, dtype="float32", num_inference_steps=2)
    heard = Steps()
    loaded = load_model(order, heard)
    picture = generate_image(loaded, "a red apple", 7, order.call, heard)
    assert set(heard.components) == {"vae", "text_encoder", "tokenizer", "unet", "scheduler", ""}
    assert heard.steps[0][0] == 0
    assert heard.steps[-1][0] == heard.steps[-1][1]
    assert picture.image.tobytes() == result[0].tobytes()
    assert capsys.readouterr() == ("", ""), "no bar of a library's is shown beside"


def test_a_picture_can_be_ended_at_a_step_and_the_next_one_is_right(model: str, result: Result) -> None:
    order = make_request("a red apple", model, "cpu", 7, dtype="float32", num_inference_steps=2)
    loaded = load_model(order)
    with pytest.raises(KeyboardInterrupt):
        generate_image(loaded, "a red apple", 7, order.call, Steps(end_at=1))
    assert generate_image(loaded, "a red apple", 7, order.call).image.tobytes() == result[0].tobytes()


@pytest.mark.parametrize(
    ("prompt", "stem"),
    [
        ("A red apple!", "a-red-apple"),
        ("ein grüner Baum 中文", "ein-grüner-baum-中文"),
        ("../../etc/passwd", "etc-passwd"),
        ("", "picture"),
        ("!?\0/", "picture"),
        ("x" * 500, "x" * 60),
        ("中" * 500, "中" * 60),
        ("word " * 100, "-".join(["word"] * 12)),
    ],
)
def test_a_name_from_a_prompt(prompt: str, stem: str) -> None:
    assert make_stem(prompt) == stem
    assert len(make_stem(prompt).encode()) < 200


def test_files_are_named_after_prompt_and_seed_and_not_overwritten(result: Result, tmp_path: Path) -> None:
    names = ["a-red-apple-7.png", "a-red-apple-8.png", "a-blue-boat-7.png", "a-blue-boat-8.png"]
    folder = f"{tmp_path}/new/folder/"
    assert [path.name for path in result.save(folder)] == names
    first = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    assert [path.name for path in result.save(folder)] == [name.replace(".png", "-2.png") for name in names]
    assert [path.name for path in result.save(folder, force=True)] == names
    assert {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name in names} == first
    assert len(list(Path(folder).iterdir())) == 8, "no draft is left"


def test_a_name_that_is_taken_is_refused_before_anything_is_written(result: Result, tmp_path: Path) -> None:
    (tmp_path / "apple-3.png").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"apple-3\.png is there already"):
        result.save(tmp_path / "apple.png")
    assert [path.name for path in tmp_path.iterdir()] == ["apple-3.png"]
    result.save(tmp_path / "apple.png", force=True)
    assert read_metadata(tmp_path / "apple-3.png") == result.origins[2:3]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("picture.bmp", "ends with .png, .jpg, .jpeg or .webp, not .bmp"),
        ("picture", "and this has none"),
        ("missing/picture.png", "there is no folder"),
        ("file.png/picture.png", "cannot be a file: Not a directory"),
        ("file.png/", "is a file, and not a folder"),
        ("folder.png/../folder.png", "cannot be a file|there is no folder"),
        ("n" * 300 + ".png", "cannot be a file: File name too long"),
        ("nul\0.png", "cannot be a file"),
    ],
)
def test_a_place_where_nothing_can_be_written(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "file.png").write_bytes(b"")
    with pytest.raises(UsageError, match=words):
        read_destination(f"{tmp_path}/{name}", pictures=1, sheet=False, force=True)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that even root cannot write into")
def test_a_folder_that_cannot_be_written_into_is_found_by_trying() -> None:
    with pytest.raises(UsageError, match="nothing can be written into /proc"):
        read_destination("/proc/picture.png", pictures=1, sheet=False, force=False)


def test_many_writers_of_one_name_never_overwrite_one_another(tmp_path: Path) -> None:
    wrote: list[Path] = []
    refused: list[bytes] = []

    def write(content: bytes) -> None:
        try:
            write_whole(tmp_path / "one.png", content)
        except FileExistsError:
            refused.append(content)
        wrote.append(write_free(tmp_path / "free.png", content))

    contents = [bytes([number]) * 10_000 for number in range(16)]
    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 15
    assert (tmp_path / "one.png").read_bytes() not in refused
    assert sorted(path.read_bytes() for path in wrote) == contents
    assert len(list(tmp_path.iterdir())) == 17, "no draft is left"


def test_where_there_are_no_hard_links_a_name_is_not_overwritten_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object, target: object) -> None:
        raise PermissionError(1, "Operation not permitted")  # what FAT answers

    monkeypatch.setattr(os, "link", refuse)
    write_whole(tmp_path / "a.png", b"first")
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "a.png", b"second")
    assert (tmp_path / "a.png").read_bytes() == b"first"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files fails in the middle of writing, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
    try:
        with pytest.raises(anyaccel.AnyaccelError, match=r"a\.png could not be written: File too large") as caught:
            write_whole(tmp_path / "a.png", bytes(10_000), force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert caught.value.exit_status == 3
    assert "same seed" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
