"""Served models: tasks, LoRA adapters, stopped and failing calls, and the model cache."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from anyaccel.errors import UsageError
from anyaccel.generation.call_validation import pick_images
from anyaccel.progress import StoppedError
from anyaccel.recipes import recipes
from anyaccel.runtime.pipeline import DiffusionPipeline
from anyaccel.server.batching.adapter_lock import AdapterLock
from anyaccel.server.http import image_request
from anyaccel.server.http.image_request import EditRequest
from anyaccel.server.settings import ServedName, ServerLimits, ServerSettings
from anyaccel.server.worker.denoise_progress import StepObserver
from anyaccel.server.worker.job_inputs import read_inputs
from anyaccel.server.worker.job_spec import JobSpec
from anyaccel.server.worker.model_cache import ModelCache
from anyaccel.server.worker.served_model import ServedModel, UnsafeContentError
from tests.runtime.placement.sweeps import raise_from_device

SIZE = 64


def make_settings(folder: Path, **options: Any) -> ServerSettings:
    return ServerSettings(
        models=(ServedName("tiny", str(folder)),), data=folder, device="cpu", dtype="float32", sizes=((SIZE, SIZE),),
        max_batch=4, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(folder: Path) -> ServedModel:
    settings = make_settings(folder)
    return ServedModel(settings.models[0], settings)


def make_job_spec(**fields: Any) -> JobSpec:
    values: dict[str, Any] = {"task": "generate", "model": "tiny", "prompt": "a cat", "seeds": (7,), "width": SIZE}
    return JobSpec(**{**values, "height": SIZE, "num_inference_steps": 4, **fields})


def ignore_step(done: int, total: int) -> None:
    return


def pixels(image: Any) -> Any:
    return numpy.asarray(image.convert("RGB")).astype(int)


def run_single(folder: Path, seed: int = 7, **call: Any) -> Any:
    """Return the pixels of the image that the library generates without a service."""
    pipe = DiffusionPipeline.from_pretrained(str(folder))
    pipe.set_progress_bar_config(disable=True)
    pipe.to("cpu", dtype="float32")
    output = pipe(prompt="a cat", seed=seed, num_inference_steps=4, width=SIZE, height=SIZE, **call)
    return pixels(pick_images(pipe, output)[0])


def test_supported_tasks_are_detected_and_run(model: ServedModel, folder: Path) -> None:
    facts = model.facts()
    assert facts.tasks == ("generate", "edit", "inpaint")
    assert facts.max_concurrent == 4
    assert facts.batched["unet"]
    assert facts.defaults == {task: model._find_defaults(pipe) for task, pipe in model.pipes.items()}
    image, metadata = model.generate(make_job_spec(), 0, {}, StepObserver(ignore_step))
    assert abs(pixels(image) - run_single(folder)).max() <= 1
    assert (metadata.seed, metadata.steps, metadata.width) == (7, 4, SIZE)
    grey = Image.new("RGB", (32, 32), "grey")
    left = Image.new("L", (SIZE, SIZE), 0)
    left.paste(255, (0, 0, SIZE // 2, SIZE))
    inputs = {"image": [grey], "mask_image": [left]}
    painted, metadata = model.generate(
        make_job_spec(task="inpaint", strength=1.0), 0, inputs, StepObserver(ignore_step)
    )
    assert isinstance(painted, Image.Image)
    assert painted.size == (SIZE, SIZE)
    assert metadata.unrecorded == ("image", "mask_image")


def test_each_task_has_the_defaults_of_its_pipeline(model: ServedModel) -> None:
    # As those of FLUX.1: 3.5 for FluxPipeline, 7.0 for FluxImg2ImgPipeline.
    class Edit:
        def __call__(self, image: Any, guidance_scale: float = 7.0, num_inference_steps: int = 3) -> None: ...

    defaults = {"generate": model._find_defaults(model.pipes["generate"]), "edit": model._find_defaults(Edit())}
    facts = replace(model.facts(), defaults=defaults)
    edit = image_request.make_job_spec(
        EditRequest(prompt="a cat"), "edit", {"tiny": facts}, ServerLimits(), (SIZE, SIZE)
    )
    assert (edit.guidance_scale, edit.num_inference_steps) == (7.0, 3)


def test_sdxl_supports_edits(tmp_path: Path) -> None:
    # The default strength of its image-to-image pipeline is 0.3.
    recipes()["stable-diffusion-xl"].make().save_pretrained(tmp_path)  # type: ignore[attr-defined]
    settings = make_settings(tmp_path)
    facts = ServedModel(settings.models[0], settings).facts()
    assert facts.tasks == ("generate", "edit", "inpaint")
    assert facts.defaults["edit"]["strength"] == 0.3
    for steps, strength in ((3, 1.0), (4, 0.3)):
        edit = EditRequest(prompt="a cat", num_inference_steps=steps)
        spec = image_request.make_job_spec(edit, "edit", {"tiny": facts}, ServerLimits(), (SIZE, SIZE))
        assert spec.strength == strength


def test_stopping_a_call_does_not_affect_others(model: ServedModel, folder: Path) -> None:
    stop = threading.Event()

    def stop_early(done: int, total: int) -> None:
        if done == 2:
            stop.set()

    with ThreadPoolExecutor(2) as threads:
        stopped = threads.submit(
            model.generate, make_job_spec(seeds=(1,)), 0, {}, StepObserver(stop_early, is_stopped=stop.is_set)
        )
        other = threads.submit(model.generate, make_job_spec(), 0, {}, StepObserver(ignore_step))
        with pytest.raises(StoppedError):
            stopped.result(180)
        assert abs(pixels(other.result(180)[0]) - run_single(folder)).max() <= 1
    assert model.lock.is_idle()


def test_a_call_that_runs_out_of_memory_is_repeated_exclusively(model: ServedModel, folder: Path) -> None:
    assert model.shared is not None
    batched = model.shared.forwards["unet"]
    lock = model.lock
    original_run, failures = batched.run, list[int]()

    def run(sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not failures:  # the first call fails only after the second one has acquired the lock
            with lock.changed:
                assert lock.changed.wait_for(lambda: lock.holders == 2, timeout=120)
        if len(failures) < 2 or len(sample) > 2:
            failures.append(len(sample))
            raise_from_device(torch.OutOfMemoryError("out of memory"))
        return original_run(sample, *args, **kwargs)

    batched.run = run  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as threads:
        images = list(
            threads.map(
                lambda seed: model.generate(make_job_spec(seeds=(seed,)), 0, {}, StepObserver(ignore_step))[0], (7, 8)
            )
        )
    assert len(failures) >= 2
    assert abs(pixels(images[0]) - run_single(folder)).max() <= 1
    assert abs(pixels(images[1]) - run_single(folder, 8)).max() <= 1
    assert model.shared is not None, "the model must be shared again afterwards"
    assert model.max_concurrent == 4


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
def test_an_image_with_nan_is_recomputed(model: ServedModel, folder: Path) -> None:
    assert model.shared is not None
    batched = model.shared.forwards["vae.decoder"]
    original_run, failures = batched.run, list[bool]()

    def run(sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original_run(sample, *args, **kwargs)
        if not failures:
            failures.append(True)
            return result * float("nan")
        return result

    batched.run = run  # type: ignore[method-assign]
    image, _ = model.generate(make_job_spec(), 0, {}, StepObserver(ignore_step))
    assert failures
    assert abs(pixels(image) - run_single(folder)).max() <= 1
    assert model.shared is not None


def test_an_image_rejected_by_the_safety_checker_raises(model: ServedModel) -> None:
    pipeline_class = type(model.pipe)
    original = pipeline_class.run_safety_checker
    try:
        pipeline_class.run_safety_checker = lambda self, image, device, dtype: (image, [True])
        with pytest.raises(UnsafeContentError):
            model.generate(make_job_spec(), 0, {}, StepObserver(ignore_step))
    finally:
        pipeline_class.run_safety_checker = original


def test_adapters_are_switched_between_calls(folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig

    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.unet.add_adapter(LoraConfig(r=2, lora_alpha=8, target_modules=["to_q", "to_v"]))
    for name, parameter in pipe.unet.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    from diffusers.utils.state_dict_utils import convert_state_dict_to_diffusers
    from peft.utils import get_peft_model_state_dict

    convert: Any = convert_state_dict_to_diffusers
    weights = convert(get_peft_model_state_dict(pipe.unet))
    pipe.save_lora_weights(tmp_path, unet_lora_layers=weights)
    settings = make_settings(folder, loras=(ServedName("ink", str(tmp_path)),))
    model = ServedModel(settings.models[0], settings)
    assert model.facts().loras == ("ink",)
    specs = [
        make_job_spec(),
        make_job_spec(lora="ink"),
        make_job_spec(),
        make_job_spec(lora="ink"),
        make_job_spec(lora="ink", lora_scale=0),
    ]
    with ThreadPoolExecutor(4) as threads:
        images = list(
            threads.map(lambda spec: pixels(model.generate(spec, 0, {}, StepObserver(ignore_step))[0]), specs)
        )
    expected = run_single(folder)
    assert abs(images[0] - expected).max() <= 1
    assert abs(images[2] - expected).max() <= 1
    assert abs(images[1] - expected).max() > 5
    assert abs(images[1] - images[3]).max() <= 1
    assert abs(images[4] - expected).max() <= 1


def test_the_least_recently_used_model_is_evicted(folder: Path) -> None:
    names = tuple(ServedName(name, str(folder)) for name in ("one", "two", "three"))
    settings = ServerSettings(
        models=names, data=folder, device="cpu", dtype="float32", max_models=2, sizes=((SIZE, SIZE),)
    )
    loaded: list[str] = []

    def load(served: ServedName, speed: str) -> Any:
        loaded.append(served.name)
        return ServedModel(served, settings)

    cache = ModelCache(settings, load)
    for name in ("one", "two", "one"):
        with cache.using(name) as model:
            model.generate(make_job_spec(model=name), 0, {}, StepObserver(ignore_step))
    with cache.using("one"), cache.using("three"):
        assert {name for name, _ in cache.models} == {"one", "three"}, "a model in use is not evicted"
    assert loaded == ["one", "two", "three"]


def test_a_model_waiting_for_memory_is_not_starved(folder: Path) -> None:
    names = tuple(ServedName(name, str(folder)) for name in ("one", "two"))
    settings = ServerSettings(
        models=names, data=folder, device="cpu", dtype="float32", max_models=1, sizes=((SIZE, SIZE),)
    )
    cache = ModelCache(settings, lambda served, speed: ServedModel(served, settings))
    ending, started = threading.Event(), threading.Event()

    def use_one() -> None:
        while not ending.is_set():
            with cache.using("one"):
                started.set()
                ending.wait(0.05)

    with ThreadPoolExecutor(3) as threads:
        users = [threads.submit(use_one) for _ in range(2)]
        assert started.wait(180)
        with pytest.raises(StoppedError), cache.using("two", is_stopped=lambda: True):
            pass
        assert not cache.evicting
        with cache.using("two"):
            assert set(cache.models) == {("two", "exact")}
            ending.set()
        for user in users:
            user.result(180)
    with pytest.raises(UsageError, match="no longer served"), cache.using("gone"):
        pass


def test_input_images_are_converted_correctly(tmp_path: Path) -> None:
    rotated = Image.new("RGB", (4, 2), "red")
    exif = Image.Exif()
    exif[0x0112] = 6
    rotated.save(tmp_path / "rotated.jpg", exif=exif)
    ramp = Image.fromarray(numpy.linspace(0, 65535, 16).astype("uint16").reshape(4, 4))
    ramp.save(tmp_path / "16bit.png")
    Image.new("RGBA", (2, 2), (0, 0, 0, 0)).save(tmp_path / "transparent.png")
    names = ("rotated.jpg", "16bit.png", "transparent.png")
    images = read_inputs({f"image.{index}": str(tmp_path / name) for index, name in enumerate(names)})["image"]
    assert images[0].size == (2, 4)
    grey = numpy.asarray(images[1])[..., 0].flatten()
    assert abs(grey.astype(int) - numpy.linspace(0, 255, 16)).max() <= 1
    assert images[2].getpixel((0, 0)) == (255, 255, 255)


def test_the_adapter_lock_is_first_in_first_out() -> None:
    switched: list[str | None] = []
    lock, order = AdapterLock(2, switched.append), []
    acquired = threading.Event()
    proceed = threading.Event()

    def hold(name: str, adapter: str | None, exclusive: bool = False) -> None:
        with lock.acquire(adapter, exclusive=exclusive):
            order.append(name)
            acquired.set()
            proceed.wait(120)

    threads = []
    for name, adapter, exclusive in (("a", None, False), ("b", None, False), ("c", "ink", False), ("d", None, True)):
        threads.append(threading.Thread(target=hold, args=(name, adapter, exclusive)))
        threads[-1].start()
        while name in ("a", "b") and name not in order:
            acquired.wait(0.01)
        while name in ("c", "d") and len(lock.waiting) < (1 if name == "c" else 2):
            acquired.wait(0.01)
    assert order == ["a", "b"]
    with pytest.raises(StoppedError), lock.acquire(is_stopped=lambda: True):
        pass
    proceed.set()
    for thread in threads:
        thread.join(120)
    assert order == ["a", "b", "c", "d"]
    assert switched == ["ink", None]
    assert lock.is_idle()
