"""A model as the worker serves it: its tasks, its adapters, and calls that do not go as planned."""

import threading
from concurrent.futures import ThreadPoolExecutor
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
from anyaccel.server.batching.model_lock import AdapterLock
from anyaccel.server.settings import ServedName, ServerSettings
from anyaccel.server.worker.denoise_progress import Watcher
from anyaccel.server.worker.job_spec import JobSpec
from anyaccel.server.worker.model_cache import ModelCache
from anyaccel.server.worker.served_model import RefusedError, ServedModel

SIZE = 64


def make_settings(folder: Path, **more: Any) -> ServerSettings:
    return ServerSettings(
        models=(ServedName("tiny", str(folder)),), data=folder, device="cpu", dtype="float32", sizes=((SIZE, SIZE),),
        max_batch=4, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(folder: Path) -> ServedModel:
    settings = make_settings(folder)
    return ServedModel(settings.models[0], settings)


def make_job_spec(**more: Any) -> JobSpec:
    values: dict[str, Any] = {"task": "generate", "model": "tiny", "prompt": "a cat", "seeds": (7,), "width": SIZE}
    return JobSpec(**{**values, "height": SIZE, "num_inference_steps": 4, **more})


def look(done: int, total: int) -> None:
    return


def pixels(image: Image.Image) -> Any:
    return numpy.asarray(image.convert("RGB")).astype(int)


def alone(folder: Path, seed: int = 7, **call: Any) -> Any:
    pipe = DiffusionPipeline.from_pretrained(str(folder))
    pipe.set_progress_bar_config(disable=True)
    pipe.to("cpu", dtype="float32")
    made = pipe(prompt="a cat", seed=seed, num_inference_steps=4, width=SIZE, height=SIZE, **call)
    return pixels(pick_images(pipe, made)[0])


def test_its_tasks_are_those_that_run(model: ServedModel, folder: Path) -> None:
    facts = model.facts()
    assert facts.tasks == ("generate", "edit", "inpaint")
    assert facts.at_once == 4
    assert facts.joins["unet"]
    image, origin = model.make(make_job_spec(), 0, {}, Watcher(look))
    assert abs(pixels(image) - alone(folder)).max() <= 1
    assert (origin.seed, origin.steps, origin.width) == (7, 4, SIZE)
    grey = Image.new("RGB", (32, 32), "grey")
    left = Image.new("L", (SIZE, SIZE), 0)
    left.paste(255, (0, 0, SIZE // 2, SIZE))
    inputs = {"image": grey, "mask_image": left}
    painted, origin = model.make(make_job_spec(task="inpaint", strength=1.0), 0, inputs, Watcher(look))
    assert painted.size == (SIZE, SIZE)
    assert origin.unrecorded == ("image", "mask_image")


def test_one_that_is_stopped_leaves_the_others_alone(model: ServedModel, folder: Path) -> None:
    stop = threading.Event()

    def end_early(done: int, total: int) -> None:
        if done == 2:
            stop.set()

    with ThreadPoolExecutor(2) as threads:
        stopped = threads.submit(
            model.make, make_job_spec(seeds=(1,)), 0, {}, Watcher(end_early, is_stopped=stop.is_set)
        )
        going = threads.submit(model.make, make_job_spec(), 0, {}, Watcher(look))
        with pytest.raises(StoppedError):
            stopped.result(180)
        assert abs(pixels(going.result(180)[0]) - alone(folder)).max() <= 1
    assert model.turnstile.is_idle()


def test_memory_that_runs_out_is_answered_as_in_the_library(model: ServedModel, folder: Path) -> None:
    assert model.shared is not None
    meeting = model.shared.meetings["unet"]
    turnstile = model.turnstile
    plain, failures = meeting.run, list[int]()

    def run(sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not failures:  # the first to come fails when the other is inside as well, however late that is
            with turnstile.changed:
                assert turnstile.changed.wait_for(lambda: turnstile.inside == 2, timeout=120)
        if len(failures) < 2 or len(sample) > 2:
            failures.append(len(sample))
            raise torch.OutOfMemoryError("no memory for this")
        return plain(sample, *args, **kwargs)

    meeting.run = run  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(lambda seed: model.make(make_job_spec(seeds=(seed,)), 0, {}, Watcher(look))[0], (7, 8)))
    assert len(failures) >= 2
    assert abs(pixels(made[0]) - alone(folder)).max() <= 1
    assert abs(pixels(made[1]) - alone(folder, 8)).max() <= 1
    assert model.shared is not None, "it is shared again"
    assert model.at_once == 4


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
def test_a_picture_that_is_not_finite_does_not_take_others_down(model: ServedModel, folder: Path) -> None:
    assert model.shared is not None
    meeting = model.shared.meetings["vae.decoder"]
    plain, broken = meeting.run, list[bool]()

    def run(sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = plain(sample, *args, **kwargs)
        if not broken:
            broken.append(True)
            return result * float("nan")
        return result

    meeting.run = run  # type: ignore[method-assign]
    image, _ = model.make(make_job_spec(), 0, {}, Watcher(look))
    assert broken
    assert abs(pixels(image) - alone(folder)).max() <= 1
    assert model.shared is not None


def test_what_a_safety_checker_refuses_is_an_error_of_its_own(model: ServedModel) -> None:
    kind = type(model.pipe)
    plain = kind.run_safety_checker
    try:
        kind.run_safety_checker = lambda self, image, device, dtype: (image, [True])
        with pytest.raises(RefusedError):
            model.make(make_job_spec(), 0, {}, Watcher(look))
    finally:
        kind.run_safety_checker = plain


def test_adapters_are_switched_when_nobody_is_inside(folder: Path, tmp_path: Path) -> None:
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
    asked = [
        make_job_spec(),
        make_job_spec(lora="ink"),
        make_job_spec(),
        make_job_spec(lora="ink"),
        make_job_spec(lora="ink", lora_scale=0),
    ]
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda work: pixels(model.make(work, 0, {}, Watcher(look))[0]), asked))
    plain = alone(folder)
    assert abs(made[0] - plain).max() <= 1
    assert abs(made[2] - plain).max() <= 1
    assert abs(made[1] - plain).max() > 5
    assert abs(made[1] - made[3]).max() <= 1
    assert abs(made[4] - plain).max() <= 1


def test_the_model_used_longest_ago_leaves(folder: Path) -> None:
    names = tuple(ServedName(name, str(folder)) for name in ("one", "two", "three"))
    settings = ServerSettings(
        models=names, data=folder, device="cpu", dtype="float32", max_models=2, sizes=((SIZE, SIZE),)
    )
    loaded: list[str] = []

    def load(served: ServedName) -> Any:
        loaded.append(served.name)
        return ServedModel(served, settings)

    shelf = ModelCache(settings, load)
    for name in ("one", "two", "one"):
        with shelf.using(name) as model:
            model.make(make_job_spec(model=name), 0, {}, Watcher(look))
    with shelf.using("one"), shelf.using("three"):
        assert set(shelf.models) == {"one", "three"}, "the one in use stays, the older one leaves"
    assert loaded == ["one", "two", "three"]


def test_a_model_that_waits_for_room_is_not_passed_for_ever(folder: Path) -> None:
    names = tuple(ServedName(name, str(folder)) for name in ("one", "two"))
    settings = ServerSettings(
        models=names, data=folder, device="cpu", dtype="float32", max_models=1, sizes=((SIZE, SIZE),)
    )
    shelf = ModelCache(settings, lambda served: ServedModel(served, settings))
    ending, begun = threading.Event(), threading.Event()
    loop_over = 0

    def use_one() -> None:
        nonlocal loop_over
        while not ending.is_set():
            with shelf.using("one"):
                begun.set()
                ending.wait(0.05)
                loop_over += 1

    with ThreadPoolExecutor(3) as threads:
        users = [threads.submit(use_one) for _ in range(2)]
        assert begun.wait(180)
        with pytest.raises(StoppedError), shelf.using("two", is_stopped=lambda: True):
            pass
        assert not shelf.making_room
        with shelf.using("two"):
            assert set(shelf.models) == {"two"}
            ending.set()
        for user in users:
            user.result(180)
    with pytest.raises(UsageError, match="no longer served"), shelf.using("gone"):
        pass


def test_pictures_are_read_as_they_are_meant(tmp_path: Path) -> None:
    from anyaccel.server.worker.worker import _read_pictures

    turned = Image.new("RGB", (4, 2), "red")
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.jpg", exif=exif)
    ramp = Image.fromarray(numpy.linspace(0, 65535, 16).astype("uint16").reshape(4, 4))
    ramp.save(tmp_path / "deep.png")
    Image.new("RGBA", (2, 2), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    read = _read_pictures({name: str(tmp_path / name) for name in ("turned.jpg", "deep.png", "clear.png")})
    assert read["turned.jpg"].size == (2, 4)
    grey = numpy.asarray(read["deep.png"])[..., 0].flatten()
    assert abs(grey.astype(int) - numpy.linspace(0, 255, 16)).max() <= 1
    assert read["clear.png"].getpixel((0, 0)) == (255, 255, 255)


def test_turns_are_taken_in_order() -> None:
    switched: list[str | None] = []
    turnstile, order = AdapterLock(2, switched.append), []
    inside = threading.Event()
    go_on = threading.Event()

    def enter(name: str, adapter: str | None, alone: bool = False) -> None:
        with turnstile.entering(adapter, alone=alone):
            order.append(name)
            inside.set()
            go_on.wait(120)

    threads = []
    for name, adapter, by_itself in (("a", None, False), ("b", None, False), ("c", "ink", False), ("d", None, True)):
        threads.append(threading.Thread(target=enter, args=(name, adapter, by_itself)))
        threads[-1].start()
        while name in ("a", "b") and name not in order:
            inside.wait(0.01)
        while name in ("c", "d") and len(turnstile.waiting) < (1 if name == "c" else 2):
            inside.wait(0.01)
    assert order == ["a", "b"]
    with pytest.raises(StoppedError), turnstile.entering(is_stopped=lambda: True):
        pass
    go_on.set()
    for thread in threads:
        thread.join(120)
    assert order == ["a", "b", "c", "d"]
    assert switched == ["ink", None]
    assert turnstile.is_idle()
