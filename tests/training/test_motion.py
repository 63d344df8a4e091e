"""Training of the motion module: scenes, the judge of videos, and the files that training writes."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import diffusers as plain
import numpy as np
import pytest
import torch
from PIL import Image

from anyaccel.embedded.judge import BACKGROUNDS, load_judge
from anyaccel.embedded.model import find_embedded_model
from anyaccel.embedded.motion import MOTIONS, find_motion_module, load_video_pipeline
from anyaccel.embedded.vocabulary import find_unknown_words
from anyaccel.errors import ModelError
from anyaccel.processes.forked_call import call_in_fork
from training.__main__ import main
from training.motion.evaluate import choose_scenes, judge_scenes
from training.motion.judge import is_turnable, judge_video, moves_as
from training.motion.model import VideoModel
from training.motion.scenes import VideoScene, draw_video_scene, plain_scene, render_video
from training.motion.tracks import KINDS, make_track
from training.prepare import load_things
from training.scenes import Composer

diffusers: Any = plain  # diffusers has no complete type annotations
THINGS = load_things()
INDEX = {thing.name: index for index, thing in enumerate(THINGS)}


@pytest.fixture(scope="module")
def composer() -> Composer:
    """Return a composer with the judge's small glyphs, which needs no font."""
    small = (load_judge().glyphs * 255).round().astype(np.uint8)
    large = [Image.fromarray(tile).convert("RGBa").resize((128, 128)).convert("RGBA") for tile in small]
    return Composer(np.stack([np.asarray(tile) for tile in large]), torch.device("cpu"))


def render(composer: Composer, name: str, motion: str, background: str = "white", seed: int = 0) -> list[Image.Image]:
    track = make_track(motion, 16, random.Random(seed))
    return render_video(composer, VideoScene("", INDEX[name], motion, track, background))


@pytest.mark.parametrize("motion", KINDS)
def test_a_thing_stays_in_the_image(motion: str) -> None:
    for seed in range(50):
        x, y, size, _, opacity = make_track(motion, 16, random.Random(seed)).T
        if motion != "spin":
            for center in (x, y):
                assert (center - size / 2).min() >= 0
                assert (center + size / 2).max() <= 128
        assert opacity.min() >= 0
        assert opacity.max() <= 1


def test_captions_name_the_motion_and_the_background() -> None:
    rng = random.Random(2)
    scenes = [draw_video_scene(THINGS, rng) for _ in range(1500)]
    assert set(Counter(scene.motion for scene in scenes)) == set(KINDS)
    for scene in scenes:
        if scene.motion in MOTIONS:
            assert any(words in scene.caption for words in MOTIONS[scene.motion])
        if scene.background != "white":
            assert scene.background.replace("grey", "gray") in scene.caption.replace("grey", "gray")
        assert find_unknown_words(scene.caption) == []


def test_wordings_belong_to_one_motion() -> None:
    counts = Counter(words for wordings in MOTIONS.values() for words in wordings)
    assert max(counts.values()) == 1


def test_captions_are_not_truncated() -> None:
    from transformers import CLIPTokenizer

    tokenizer: Any = CLIPTokenizer.from_pretrained(find_embedded_model() / "tokenizer")
    rng = random.Random(4)
    captions = [draw_video_scene(THINGS, rng).caption for _ in range(1500)]
    assert np.mean([len(row) > 32 for row in tokenizer(captions).input_ids]) < 0.002


@pytest.mark.parametrize("motion", KINDS)
def test_the_judge_accepts_the_motion_and_no_other(composer: Composer, motion: str) -> None:
    frames = render(composer, "rocket", motion, "light green")
    assert judge_video(frames, "rocket", motion).correct
    # Measuring angles is slow, so only the motions that could be mistaken for a rotation are tried.
    requests = [other for other in KINDS if other != "spin" or motion in ("spin", "still", "shake")]
    assert [request for request in requests if moves_as(frames, "rocket", request)] == [motion]


@pytest.mark.parametrize("motion", ["left", "fade"])
def test_the_judge_rejects_another_thing(composer: Composer, motion: str) -> None:
    verdict = judge_video(render(composer, "guitar", motion), "rocket", motion)
    assert not verdict.same_thing
    assert not verdict.correct


def test_the_judge_rejects_a_thing_that_changes(composer: Composer) -> None:
    frames = render(composer, "rocket", "left")
    frames[8:] = render(composer, "cat", "left")[8:]
    verdict = judge_video(frames, "rocket", "left")
    assert verdict.recognized == (True,) * 8 + (False,) * 8
    assert not verdict.correct


def test_the_judge_rejects_videos_with_frames_in_the_wrong_order(composer: Composer) -> None:
    frames = render(composer, "rocket", "left")
    assert not moves_as(frames[::-1], "rocket", "left")
    assert moves_as(frames[::-1], "rocket", "right")
    random.Random(0).shuffle(frames)
    assert not moves_as(frames, "rocket", "left")


@pytest.mark.parametrize("motion", KINDS)
def test_the_judge_rejects_empty_videos(motion: str) -> None:
    frames = [Image.new("RGB", (128, 128), BACKGROUNDS["white"])] * 16
    verdict = judge_video(frames, "rocket", motion)
    assert not verdict.correct
    assert not verdict.same_thing


def test_only_some_things_are_turnable() -> None:
    assert is_turnable("rocket")
    assert not is_turnable("sun")
    scenes = choose_scenes(THINGS, ("spin",), 2, ("sun", "rocket"))
    assert [scene.thing for scene in scenes] == [INDEX["rocket"]]


def test_the_evaluation_counts_correct_videos(composer: Composer) -> None:
    """Evaluate a perfect model, and one whose videos do not move."""
    scenes = [plain_scene(THINGS, INDEX["rocket"], motion, random.Random(0)) for motion in ("left", "grow")]
    figures = judge_scenes(THINGS, scenes, lambda scene, seed: render_video(composer, scene))
    assert figures["all"] == {"videos": 2, "correct": 1.0, "same_thing": 1.0, "moves": 1.0}
    assert figures["missed"] == []
    figures = judge_scenes(THINGS, scenes, lambda scene, seed: render(composer, "rocket", "still"))
    assert figures["all"] == {"videos": 2, "correct": 0.0, "same_thing": 1.0, "moves": 0.0}
    assert [missed["caption"] for missed in figures["missed"]] == [scene.caption for scene in scenes]


def test_a_folder_without_a_motion_module_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not part of this version") as raised:
        load_video_pipeline(tmp_path)
    assert "--model" in raised.value.hint


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> tuple[VideoModel, Path]:
    """Return a video model with random updates, and the folder to which it was saved."""
    torch.manual_seed(0)
    model, folder = VideoModel(rank=2), tmp_path_factory.mktemp("motion")
    with torch.no_grad():
        for parameter in model.trained:
            if not parameter.any():
                parameter.normal_(std=0.02)
    model.save(folder)
    return model, folder


def predict(unet: Any, text_encoder: Any) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 8, 2, 16, 16, generator=generator)
    with torch.no_grad():
        embeddings = text_encoder(torch.arange(100, 132)[None])[0]
        return embeddings, unet(latents, torch.tensor([500]), embeddings.repeat(2, 1, 1)).sample


def test_an_untrained_motion_module_does_not_change_the_image_model() -> None:
    model = VideoModel()
    pipe = diffusers.DiffusionPipeline.from_pretrained(find_embedded_model())
    latents, embeddings = torch.randn(1, 8, 2, 16, 16), torch.randn(1, 32, 192)
    with torch.no_grad():
        video = model.unet(latents, torch.tensor([500]), embeddings.repeat(2, 1, 1)).sample
        image = pipe.unet(latents[:, :, 1], torch.tensor([500]), embeddings).sample
    torch.testing.assert_close(video[:, :, 1], image, atol=1e-4, rtol=1e-4)


def test_the_saved_module_computes_the_same(module: tuple[VideoModel, Path]) -> None:
    model, folder = module
    assert find_motion_module(folder) == folder
    pipe = load_video_pipeline(folder)
    assert type(pipe) is diffusers.AnimateDiffPipeline
    expected = predict(model.unet, model.text_encoder)
    for actual, wanted in zip(predict(pipe.unet, pipe.text_encoder), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=5e-3, rtol=5e-3)  # the file is float16


def test_plain_diffusers_and_peft_load_the_module(module: tuple[VideoModel, Path]) -> None:
    _, folder = module
    adapter = diffusers.MotionAdapter.from_pretrained(folder)
    pipe = diffusers.AnimateDiffPipeline.from_pretrained(find_embedded_model(), motion_adapter=adapter)
    pipe.load_lora_weights(folder)
    ours = load_video_pipeline(folder)
    expected = predict(ours.unet, ours.text_encoder)
    for actual, wanted in zip(predict(pipe.unet, pipe.text_encoder), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-4)


def test_the_module_is_smaller_than_15_megabytes(module: tuple[VideoModel, Path]) -> None:
    model, _ = module
    motion = sum(p.numel() for name, p in model.unet.named_parameters() if "motion_modules" in name)
    assert 4_500_000 < motion < 5_500_000
    assert 2 * sum(parameter.numel() for parameter in VideoModel().trained) < 15_000_000


@pytest.mark.slow
def test_the_commands_train_stop_resume_and_evaluate(tmp_path: Path) -> None:
    """Run a few steps with videos of two frames, in child processes (see test_train.py)."""
    data, out, results = tmp_path / "data", tmp_path / "out", tmp_path / "motion.json"
    data.mkdir()
    small = (load_judge().glyphs * 255).round().astype(np.uint8)
    np.savez(data / "glyphs.npz", glyphs=np.pad(small, ((0, 0), (40, 40), (40, 40), (0, 0))))
    train = ["motion", "--data", str(data), "--out", str(out), "--device", "cpu", "--batch", "1", "--workers", "0"]
    train += ["--frames", "2", "--scenes", "1", "--things", "rocket", "--motions", "left", "--minutes", "0.1"]
    assert call_in_fork(lambda: main([*train, "--stop-after-minutes", "0.0001"])) == 1
    assert (out / "motion.pt").is_file()
    assert call_in_fork(lambda: main(train)) == 0
    assert find_motion_module(out / "motion") == out / "motion"
    assert json.loads((out / "log.jsonl").read_text().splitlines()[0])["stage"] == "motion"
    evaluate = ["motion-evaluate", "--model", str(out / "motion"), "--device", "cpu", "--videos", "1", "--frames", "2"]
    evaluate += ["--things", "rocket", "--motions", "left", "--save", str(tmp_path), "--json", str(results)]
    assert call_in_fork(lambda: main(evaluate)) == 0
    assert json.loads(results.read_text())["left"]["videos"] == 1
    assert len(list(tmp_path.glob("*.gif"))) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["motion", "--data", "missing"], "no glyphs"),
        (["motion-evaluate", "--motions", "sideways"], "unknown motion 'sideways'"),
        (["motion-evaluate", "--json", "missing/a.json"], "does not exist"),
        (["motion-install", "missing"], "not part of this version"),
    ],
)
def test_wrong_arguments_are_rejected(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
