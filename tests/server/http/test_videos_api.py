"""Videos and audio with OpenAI's client, from tiny models: Wan, LTX-2 (videos with audio) and Stable Audio."""

import base64
import io
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy
import openai
import pytest
from PIL import Image

from anyaccel.generation.generate import generate
from anyaccel.generation.model_loading import release_model
from anyaccel.media.decode import decode_audio, decode_video, read_document
from anyaccel.media.encode import encode
from anyaccel.recipes import recipes
from tests.conftest import NEEDS_RECIPES
from tests.generation.models import save_motion_module
from tests.server.live import Live

pytestmark = [
    NEEDS_RECIPES,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning"),
]
MODELS = {"wan": "wan", "ltx": "ltx-2", "audio": "stable-audio", "wan-image": "wan-image-to-video"}
LONG: dict[str, Any] = {"prompt": "a dog", "num_inference_steps": 2000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about weight_norm in a VAE for audio
        for name, recipe in MODELS.items():
            pipe: Any = recipes()[recipe].make()
            pipe.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def videos(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    models = [*(f"{name}={folder / name}" for name in MODELS), f"emoji={save_motion_module()}"]
    limits = [f"--limit={text}" for text in ("max_steps=2000", "max_frames=33", "max_video_pixels=40000")]
    live = Live(
        tmp_path_factory.mktemp("data"), *models, "--device", "cpu", "--dtype", "float32", "--sizes", "32x32",
        "--api-key", "one", "--api-key", "two", *limits, key="one",
    )  # fmt: skip
    yield live
    assert live.end() == 0


def make_png(width: int, height: int, color: str = "red") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, height), color).save(stream, "PNG")
    return stream.getvalue()


def write_form(values: dict[str, Any]) -> list[tuple[str, tuple[None, str]]]:
    """Return the fields of a multipart form as OpenAI's client writes them."""
    return [
        (f"{name}[]" if isinstance(value, list) else name, (None, str(item)))
        for name, value in values.items()
        for item in (value if isinstance(value, list) else [value])
    ]


def read_video(content: bytes) -> Any:
    return decode_video(content, max_frames=100, max_pixels=10**6)


def test_a_video_equals_the_one_of_the_library(videos: Live, folder: Path, tmp_path: Path) -> None:
    client: Any = videos.openai()
    video = client.videos.create_and_poll(
        prompt="a red fox", model="wan", seconds="0.5", size="32x32", poll_interval_ms=200,
        extra_body={"seed": 7, "num_inference_steps": 2, "guidance_scale": 4.0},
    )  # fmt: skip
    assert (video.status, video.progress, video.error) == ("completed", 100, None)
    assert (video.object, video.model, video.size, video.prompt) == ("video", "wan", "32x32", "a red fox")
    # 0.5 seconds with 16 frames per second, rounded to a number that the tiny VAE supports.
    assert video.seconds == "0.5625"
    assert video.completed_at >= video.created_at
    assert video.expires_at > video.completed_at
    file = tmp_path / "video.mp4"
    file.write_bytes(client.videos.download_content(video.id).content)
    decoded = read_video(file.read_bytes())
    assert (len(decoded), decoded.fps, decoded.width, decoded.height) == (9, 16, 32, 32)
    expected = generate(
        "a red fox", folder / "wan", device="cpu", dtype="float32", seed=7, frames=9, width=32, height=32,
        num_inference_steps=2, guidance_scale=4.0,
    ).videos[0]  # fmt: skip
    release_model()
    for frame, other in zip(decoded.frames, read_video(encode(expected, ".mp4")).frames, strict=True):
        assert numpy.array_equal(frame, other)
    document = json.loads(read_document(file) or "")
    assert (document["prompt"], document["seed"], document["frames"]) == ("a red fox", 7, 9)
    for variant, media_type, size in (("thumbnail", "image/webp", (32, 32)), ("spritesheet", "image/jpeg", None)):
        response = client.videos.download_content(video.id, variant=variant)
        image = Image.open(io.BytesIO(response.content))
        assert response.response.headers["content-type"] == media_type
        assert size is None or image.size == size
    client.videos.delete(video.id)


def test_a_video_with_audio_and_its_remix(videos: Live) -> None:
    client: Any = videos.openai()
    body = {"num_inference_steps": 2, "seed": 3, "num_frames": 9, "fps": 24, "spatio_temporal_guidance_blocks": [1]}
    video = client.videos.create_and_poll(prompt="rain", model="ltx", size="32x32", extra_body=body)
    assert video.status == "completed", video.error
    decoded = read_video(client.videos.download_content(video.id).content)
    assert decoded.audio is not None
    assert (len(decoded), decoded.fps) == (9, 24)
    remix = client.videos.remix(video.id, prompt="a storm")
    assert remix.status == "queued" or remix.status == "in_progress"
    done = client.videos.poll(remix.id, poll_interval_ms=200)
    assert (done.status, done.remixed_from_video_id, done.prompt) == ("completed", video.id, "a storm")
    assert (done.seed, done.num_frames, done.fps) == (3, 9, 24)
    assert client.videos.download_content(remix.id).content != client.videos.download_content(video.id).content
    with pytest.raises(openai.BadRequestError, match="seed"):
        client.videos.remix(video.id, prompt="a storm", extra_body={"seed": 4})


@pytest.mark.parametrize("model", ["ltx", "wan-image"])
def test_a_video_starts_from_an_image(videos: Live, model: str) -> None:
    client: Any = videos.openai()
    extra: dict[str, Any] = {"num_inference_steps": 1, "seed": 3, "num_frames": 5}
    if model == "ltx":
        extra |= {"spatio_temporal_guidance_blocks": [1], "image_crf": 0}
    call = {"prompt": "rain", "model": model, "size": "32x32", "extra_body": extra}
    png = make_png(60, 30)
    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    video = client.videos.create_and_poll(input_reference=("a.png", png), poll_interval_ms=200, **call)
    assert video.status == "completed", video.error
    contents = [client.videos.download_content(video.id).content]
    with videos.http() as http:
        # The client does not send objects as `input_reference`, although its types allow them (openai 3.49).
        body = {name: value for name, value in call.items() if name != "extra_body"}
        requests: list[dict[str, Any]] = [
            {"json": {**body, **extra, "input_reference": {"image_url": url}}},
            {"files": write_form({**body, **extra, "input_reference[image_url]": url})},
        ]
        for request in requests:
            response = http.post("/v1/videos", **request)
            assert response.status_code == 200, response.text
            video = client.videos.poll(response.json()["id"], poll_interval_ms=200)
            contents.append(client.videos.download_content(video.id).content)
        job = http.post("/v1/jobs", json={**body, **extra, "inputs": {"image": url}}).json()
        done = videos.wait_state(http, job["id"], "done", "failed")
        (result,) = done["videos"]
        contents.append(http.get(result["url"]).content)
        assert (result["num_frames"], result["width"], done["images"]) == (5, 32, [])
        # The URL has a token, and the image of another URL of the job cannot be read with it.
        assert httpx.get(f"{videos.address}{result['url']}", timeout=60).content == contents[-1]
        stolen = result["thumbnail_url"].partition("?")[0] + "?" + result["url"].partition("?")[2]
        assert httpx.get(f"{videos.address}{stolen}", timeout=60).status_code == 401
    assert all(content == contents[0] for content in contents), "a file, a form, JSON and a job give the same video"
    remix = client.videos.remix(video.id, prompt="rain")
    assert client.videos.poll(remix.id, poll_interval_ms=200).status == "completed"
    assert client.videos.download_content(remix.id).content == contents[0], "the image is kept for a remix"


def test_the_duration_sets_the_frame_rate_of_the_embedded_model(videos: Live) -> None:
    client: Any = videos.openai()
    call = {"prompt": "a cat growing", "model": "emoji", "size": "32x32"}
    extra = {"num_inference_steps": 1, "seed": 3}
    video = client.videos.create_and_poll(seconds="4", poll_interval_ms=200, extra_body=extra, **call)
    assert video.status == "completed", video.error
    assert (video.seconds, video.num_frames, video.fps) == ("4", 16, 4)
    decoded = read_video(client.videos.download_content(video.id).content)
    assert (len(decoded), decoded.fps) == (16, 4)
    remix = client.videos.remix(video.id, prompt="a cat shrinking")
    done = client.videos.poll(remix.id, poll_interval_ms=200)
    assert (done.status, done.num_frames, done.fps) == ("completed", 16, 4)
    short = client.videos.create_and_poll(poll_interval_ms=200, extra_body={**extra, "num_frames": 8}, **call)
    assert (short.status, short.num_frames, short.fps, short.seconds) == ("completed", 8, 8, "1")
    for arguments in ({"num_frames": 7}, {"num_frames": 16, "fps": 10, "seconds": "2"}, {"seconds": "1", "fps": 7}):
        with pytest.raises(openai.BadRequestError, match=r"8 to 16 frames, not 7|either seconds or num_frames"):
            client.videos.create(extra_body={**extra, **arguments}, **call)


def test_audio_with_the_speech_endpoint_and_as_a_job(videos: Live) -> None:
    client: Any = videos.openai()
    extra = {"seconds": 2.0, "num_inference_steps": 2, "seed": 1}
    call = {"model": "audio", "input": "rain", "voice": "alloy", "extra_body": extra}
    response = client.audio.speech.create(response_format="flac", **call)
    assert response.response.headers["content-type"] == "audio/flac"
    audio = decode_audio(response.content, max_seconds=100)
    assert audio.rate == 8
    assert audio.seconds == pytest.approx(2.0, abs=0.3)
    assert client.audio.speech.create(**call).content.startswith(b"RIFF"), "the default is WAV"
    with videos.http() as http:
        body = {"model": "audio", "prompt": "rain", "output_format": "flac", **extra}
        job = http.post("/v1/jobs", json=body).json()["id"]
        (result,) = videos.wait_state(http, job, "done", "failed")["audios"]
        assert http.get(result["url"]).content == response.content
        assert http.get(result["waveform_url"]).headers["content-type"] == "image/webp"
        assert http.get(f"/v1/videos/{job}").status_code == 404
    for change, param in (
        ({"response_format": "mp3"}, "response_format"), ({"speed": 2.0}, "speed"),
        ({"extra_body": {"seconds": 10**4}}, "seconds"), ({"extra_body": {"sedonds": 1}}, "sedonds"),
        ({"model": "wan"}, "model"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as caught:
            client.audio.speech.create(**{**call, **change})
        assert caught.value.param == param


def test_lists_have_pages(videos: Live) -> None:
    client: Any = videos.openai("two")
    body = {"num_inference_steps": 1, "num_frames": 3}
    ids = [
        client.videos.create_and_poll(prompt=f"{index}", size="32x32", poll_interval_ms=100, extra_body=body).id
        for index in range(3)
    ]
    assert [video.id for video in client.videos.list(limit=2)] == ids[::-1], "the client reads all pages"
    assert [video.id for video in client.videos.list(limit=2, order="asc")] == ids
    with videos.http("two") as http:
        page = http.get("/v1/videos", params={"limit": 2}).json()
        assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[2], ids[1], True)
        rest = http.get("/v1/videos", params={"limit": 2, "after": ids[1]}).json()
        assert ([video["id"] for video in rest["data"]], rest["has_more"]) == ([ids[0]], False)
        assert len(http.get("/v1/jobs").json()["data"]) == 3
    with videos.http("one") as http:
        assert http.get(f"/v1/videos/{ids[0]}").status_code == 404, "of another key"
        assert http.get(f"/v1/videos/{ids[0]}/content").status_code == 404
    deleted = client.videos.delete(ids[0])
    assert (deleted.id, deleted.deleted, deleted.object) == (ids[0], True, "video.deleted")
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(ids[0])


def test_parts_of_a_file_can_be_fetched(videos: Live) -> None:
    client: Any = videos.openai()
    body = {"num_inference_steps": 1, "num_frames": 3}
    video = client.videos.create_and_poll(prompt="x", size="32x32", poll_interval_ms=100, extra_body=body)
    content = client.videos.download_content(video.id).content
    with videos.http() as http:
        path = f"/v1/videos/{video.id}/content"
        part = http.get(path, headers={"Range": "bytes=10-19"})
        assert (part.status_code, part.content) == (206, content[10:20])
        assert part.headers["content-range"] == f"bytes 10-19/{len(content)}"
        assert http.get(path, headers={"Range": f"bytes={len(content)}-"}).status_code == 416


def test_an_unfinished_video_is_polled_and_cancelled(videos: Live) -> None:
    client: Any = videos.openai()
    with videos.http() as http:
        response = http.post("/v1/videos", json={**LONG, "size": "32x32", "num_frames": 3})
        video = response.json()["id"]
        waiting = http.post("/v1/videos", json={**LONG, "size": "32x32", "num_frames": 3}).json()["id"]
        videos.wait_state(http, video, "running")
        shown = http.get(f"/v1/videos/{video}")
        assert shown.json()["status"] == "in_progress"
        assert int(shown.headers["openai-poll-after-ms"]) > 0
        assert http.get(f"/v1/videos/{waiting}").json()["status"] == "queued", "one video runs at a time"
        assert http.get(f"/v1/videos/{video}/content").json()["error"]["code"] == "video_not_ready"
        assert http.delete(f"/v1/videos/{video}").status_code == 409
        with pytest.raises(openai.ConflictError, match="completed video"):
            client.videos.remix(video, prompt="x")
        for job in (waiting, video):
            http.post(f"/v1/jobs/{job}/cancel")
            videos.wait_state(http, job, "cancelled")
        ended = client.videos.retrieve(video)
        assert (ended.status, ended.error.code) == ("failed", "cancelled")
        assert "openai-poll-after-ms" not in http.get(f"/v1/videos/{video}").headers


@pytest.mark.parametrize(
    ("call", "code", "param"),
    [
        ({"seconds": "9"}, "too_long", "seconds"),
        ({"seconds": "-1"}, "invalid_value", "seconds"),
        ({"seconds": "long"}, "invalid_value", "seconds"),
        ({"seconds": "nan"}, "invalid_value", "seconds"),
        ({"extra_body": {"num_frames": 10**6}}, "too_long", "seconds"),
        ({"size": "64x64", "seconds": "1"}, "too_long", "seconds"),
        ({"extra_body": {"fps": 5e-324}}, "invalid_value", "fps"),
        ({"extra_body": {"fps": 60, "output_format": "gif"}}, "invalid_value", "fps"),
        ({"size": "33x32"}, "invalid_size", "size"),
        ({"size": "wide"}, "invalid_size", "size"),
        ({"model": "sora-2"}, "model_not_found", "model"),
        ({"extra_body": {"num_inference_steps": 10**6}}, "too_large", "num_inference_steps"),
        ({"extra_body": {"max_sequence_length": 10**9}}, "too_large", "max_sequence_length"),
        ({"extra_body": {"max_sequence_length": "many"}}, "invalid_value", "max_sequence_length"),
        ({"extra_body": {"guidance_scale_2": [1.0]}}, "invalid_value", "guidance_scale_2"),
        ({"extra_body": {"latents": [1.0]}}, "unsupported_parameter", "latents"),
        ({"extra_body": {"output_type": "latent"}}, "unsupported_parameter", "output_type"),
        ({"extra_body": {"guidence": 3}}, "unknown_parameter", "guidence"),
        ({"input_reference": {"image_url": "http://127.0.0.1:1/a.png"}}, "unsupported_url", "input_reference"),
        ({"input_reference": {"image_url": "file:///etc/passwd"}}, "unsupported_url", "input_reference"),
        ({"input_reference": {"image_url": "data:image/png;base64,!!"}}, "invalid_image", "input_reference"),
        ({"input_reference": {"image_url": "data:image/png;base64,AAAA"}}, "invalid_image", "image"),
        ({"input_reference": {"file_id": "file-1"}}, "unsupported_parameter", "input_reference"),
        ({"input_reference": ("a.png", b"GIF89a")}, "invalid_image", "image"),
        ({"input_reference": ("a.png", make_png(32, 32)), "model": "wan"}, "unsupported_task", "model"),
    ],
)
def test_invalid_requests_are_rejected(videos: Live, call: dict[str, Any], code: str, param: str) -> None:
    body = {"prompt": "x", "size": "32x32", **call}
    if isinstance(call.get("input_reference"), dict):
        with videos.http() as http:
            response = http.post("/v1/videos", json=body)
        assert 400 <= response.status_code < 500
        assert (response.json()["error"]["code"], response.json()["error"]["param"]) == (code, param)
        return
    client: Any = videos.openai()
    with pytest.raises(openai.APIStatusError) as caught:
        client.videos.create(**body)
    assert 400 <= caught.value.status_code < 500
    assert (caught.value.code, caught.value.param) == (code, param)


def test_unsupported_routes_say_so(videos: Live) -> None:
    client: Any = videos.openai()
    calls: list[Any] = [
        lambda: client.videos.edit(prompt="x", video=b"x"),
        lambda: client.videos.extend(prompt="x", seconds="4", video=b"x"),
        lambda: client.videos.create_character(name="x", video=b"x"),
        lambda: client.videos.get_character("x"),
    ]
    for call in calls:
        with pytest.raises(openai.InternalServerError, match="not supported") as caught:
            call()
        assert caught.value.status_code == 501
    with pytest.raises(openai.BadRequestError, match="no model of this service generates images"):
        client.images.generate(prompt="x")
    with pytest.raises(openai.BadRequestError, match="send the request to /v1/videos"):
        client.images.generate(prompt="x", model="wan")


def test_a_deleted_file_is_reported(videos: Live) -> None:
    client: Any = videos.openai()
    body = {"num_inference_steps": 1, "num_frames": 3}
    video = client.videos.create_and_poll(prompt="x", size="32x32", poll_interval_ms=100, extra_body=body)
    (videos.data / "results" / video.id / "0.mp4").unlink()
    with pytest.raises(openai.NotFoundError, match="expired"):
        client.videos.download_content(video.id)


def test_an_idempotency_key_submits_one_video(videos: Live) -> None:
    headers = {"Idempotency-Key": f"video {time.time()}"}
    body = {"prompt": "x", "size": "32x32", "num_frames": 3, "num_inference_steps": 1}
    with videos.http() as http:
        first, again = (http.post("/v1/videos", json=body, headers=headers).json()["id"] for _ in range(2))
        assert first == again
        other = http.post("/v1/videos", json={**body, "prompt": "y"}, headers=headers)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
