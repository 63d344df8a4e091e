"""The API, as OpenAI's own client and a plain one use it."""

import base64
import io
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy
import openai
import pytest
from PIL import Image

import anyaccel
from anyaccel.generation.image_format import read_metadata
from tests.server.conftest import BOB
from tests.server.live import Live


def read(b64: str | None) -> Image.Image:
    assert b64 is not None
    return Image.open(io.BytesIO(base64.b64decode(b64)))


def differ(one: Image.Image, other: Image.Image) -> int:
    pixels = [numpy.asarray(image.convert("RGB")).astype(int) for image in (one, other)]
    return int(numpy.abs(pixels[0] - pixels[1]).max())


def test_a_picture_is_the_one_that_the_library_makes(live: Live, tmp_path: Any) -> None:
    made = live.openai().images.generate(prompt="a red apple", n=2, size="128x128", extra_body={"seed": 7})
    assert made.data is not None
    assert [picture.seed for picture in made.data] == [7, 8]  # type: ignore[attr-defined]
    assert (made.size, made.output_format) == ("128x128", "png")
    here = anyaccel.generate("a red apple", device="cpu", dtype="float32", seed=7, num_images_per_prompt=2)
    for there, image in zip(made.data, here.images, strict=True):
        assert differ(read(there.b64_json), image) <= 1
    file = tmp_path / "picture.png"
    file.write_bytes(base64.b64decode(made.data[0].b64_json or ""))
    (origin,) = read_metadata(file)
    assert (origin.prompt, origin.seed, origin.steps) == ("a red apple", 7, 8), "the file carries its recipe"


def test_parameters_of_diffusers_and_formats_of_openai(live: Live) -> None:
    client = live.openai()
    asked = {"seed": 3, "num_inference_steps": 4, "guidance_scale": 3.0, "negative_prompt": "blue"}
    made = client.images.generate(
        prompt="a fox", size="64x128", output_format="webp", output_compression=50, user="u", extra_body=asked
    )
    assert made.data is not None
    image = read(made.data[0].b64_json)
    assert (image.format, image.size) == ("WEBP", (64, 128))
    linked = client.images.generate(prompt="a fox", response_format="url", output_format="jpeg", extra_body={"seed": 1})
    assert linked.data is not None
    url = str(linked.data[0].url)
    fetched = httpx.get(url, timeout=60)
    assert (fetched.status_code, fetched.headers["content-type"]) == (200, "image/jpeg"), "the address is the key"
    assert httpx.get(url[:-1] + ("0" if url[-1] != "0" else "1"), timeout=60).status_code == 401
    assert httpx.get(url.partition("?")[0], timeout=60).status_code == 401


def test_previews_come_while_it_denoises(live: Live) -> None:
    stream = live.openai().images.generate(
        prompt="a cat", stream=True, partial_images=3, n=2, extra_body={"seed": 3, "num_inference_steps": 24}
    )
    events = list(stream)
    kinds = [event.type.removeprefix("image_generation.") for event in events]
    assert kinds.count("partial_image") == 6
    assert kinds.count("completed") == 2
    assert kinds[0] == "partial_image"
    first = [event for event in events if event.index == 0]  # type: ignore[union-attr]
    assert [getattr(event, "partial_image_index", None) for event in first] == [0, 1, 2, None]
    images = [read(event.b64_json) for event in first]
    means = [numpy.asarray(image.convert("RGB")).astype(float) for image in images]
    off = [float(((one - means[-1]) ** 2).mean()) for one in means[:-1]]
    assert off[0] > off[1] > off[2], "each is nearer to the picture than the one before"
    assert off[2] < 500
    assert events[-1].seed in (3, 4)  # type: ignore[union-attr]


def test_edits_begin_with_a_picture(live: Live) -> None:
    client = live.openai()
    made = client.images.generate(prompt="a red apple", extra_body={"seed": 7})
    assert made.data is not None
    apple = base64.b64decode(made.data[0].b64_json or "")
    little, much = (
        client.images.edit(
            image=("apple.png", apple), prompt="a green tree", extra_body={"seed": 1, "strength": strength}
        ).data
        for strength in (0.3, 1.0)
    )
    assert little is not None
    assert much is not None
    before = numpy.asarray(Image.open(io.BytesIO(apple)).convert("RGB")).astype(float)
    changes = [
        float(numpy.abs(numpy.asarray(read(one[0].b64_json).convert("RGB")) - before).mean()) for one in (little, much)
    ]
    assert changes[0] < changes[1], "the more strength, the less is left of the picture"
    slow: dict[str, Any] = {"extra_body": {"num_inference_steps": 40}}
    events = list(client.images.edit(image=apple, prompt="a tree", stream=True, partial_images=1, **slow))
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]
    with pytest.raises(openai.BadRequestError, match="are none: take at least 10 steps"):
        client.images.edit(image=apple, prompt="a tree", extra_body={"strength": 0.1})
    with pytest.raises(openai.BadRequestError, match="no pipeline to inpaint"):
        client.images.edit(image=apple, mask=apple, prompt="a tree")


@pytest.mark.parametrize(
    ("asked", "kind", "code", "param"),
    [
        ({"prompt": ""}, openai.BadRequestError, "invalid_value", "prompt"),
        ({"prompt": "x", "size": "10000x10000"}, openai.BadRequestError, "invalid_size", "size"),
        ({"prompt": "x", "size": "100x100"}, openai.BadRequestError, "invalid_size", "size"),
        ({"prompt": "x", "size": "wide"}, openai.BadRequestError, "invalid_size", "size"),
        ({"prompt": "x", "model": "dall-e-3"}, openai.NotFoundError, "model_not_found", "model"),
        ({"prompt": "x", "n": 99}, openai.BadRequestError, "too_large", "n"),
        ({"prompt": "x", "extra_body": {"sed": 3}}, openai.BadRequestError, "unknown_parameter", "sed"),
        ({"prompt": "x", "extra_body": {"seed": "3"}}, openai.BadRequestError, "invalid_value", "seed"),
        ({"prompt": "x", "extra_body": {"num_inference_steps": 10**6}}, openai.BadRequestError, "too_large", None),
        ({"prompt": "x", "extra_body": {"lora": "ink"}}, openai.BadRequestError, "unknown_lora", "lora"),
        ({"prompt": "x" * 9000}, openai.BadRequestError, "string_too_long", "prompt"),
    ],
)
def test_errors_are_those_of_openai(
    live: Live, asked: dict[str, Any], kind: type[openai.APIStatusError], code: str, param: str | None
) -> None:
    with pytest.raises(kind) as caught:
        live.openai().images.generate(**asked)
    assert caught.value.code == code
    if param is not None:
        assert caught.value.param == param


def test_models_and_state_are_told(live: Live) -> None:
    client = live.openai()
    (model,) = client.models.list()
    assert model.id == client.models.retrieve("embedded").id == "embedded"
    assert model.joined == ["vae.decoder", "text_encoder", "unet"]  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("../secret")
    with live.http() as http:
        assert http.get("/healthz").json() == {"status": "alive"}
        assert http.get("/readyz").status_code == 200
        status = http.get("/v1/status").json()
        assert (status["state"], status["limits"]["max_queue"]) == ("ready", 3)
        assert "StableDiffusionPipeline on cpu:0" in status["models"][0]["plan"]
        for path in ("/", "/page.css", "/page.js"):
            assert "default-src 'none'" in http.get(path).headers["content-security-policy"]


def test_keys_tell_owners_apart(live: Live) -> None:
    with pytest.raises(openai.AuthenticationError):
        live.openai("wrong").images.generate(prompt="x")
    with live.http() as alice, live.http(BOB) as bob:
        job = alice.post("/v1/jobs", json={"prompt": "a dog", "num_inference_steps": 2}).json()["id"]
        for answer in (bob.get(f"/v1/jobs/{job}"), bob.post(f"/v1/jobs/{job}/cancel"), bob.delete(f"/v1/jobs/{job}")):
            assert answer.status_code == 404
        assert job not in [one["id"] for one in bob.get("/v1/jobs").json()["data"]]
        live.wait_state(alice, job, "done")
        assert bob.get(f"/v1/jobs/{job}/images/0").status_code == 404
        assert alice.get(f"/v1/jobs/{job}/images/0").headers["content-type"] == "image/png"


def test_jobs_are_listened_to_cancelled_and_deleted(live: Live) -> None:
    with live.http() as http:
        long = http.post("/v1/jobs", json={"prompt": "a dog", "num_inference_steps": 2000})
        assert long.status_code == 202
        job = long.json()["id"]
        live.wait_state(http, job, "running")
        assert http.delete(f"/v1/jobs/{job}").status_code == 409
        seen: list[str] = []
        with http.stream("GET", f"/v1/jobs/{job}/events") as events:
            for line in events.iter_lines():
                seen += [line.removeprefix("event: ")] if line.startswith("event: ") else []
                if seen.count("step") == 2:
                    asked = http.post(f"/v1/jobs/{job}/cancel").json()
                    assert asked["state"] in ("cancelling", "cancelled")
        assert seen[0] == "state"
        assert seen[-1] == "state"
        told = http.get(f"/v1/jobs/{job}").json()
        assert (told["state"], told["images"]) == ("cancelled", [])
        figures = http.get("/metrics").text
        assert http.post(f"/v1/jobs/{job}/cancel").json()["state"] == "cancelled"
        line = next(one for one in figures.splitlines() if 'state="cancelled"' in one)
        assert line in http.get("/metrics").text, "it is not counted twice"
        assert told["ended_at"] - told["started_at"] < 60
        assert http.delete(f"/v1/jobs/{job}").json()["deleted"] is True
        assert http.get(f"/v1/jobs/{job}").status_code == 404


def test_the_same_key_is_the_same_job(live: Live) -> None:
    named = {"Idempotency-Key": f"once {time.time()}"}
    asked = {"prompt": "a bird", "seed": 4, "num_inference_steps": 2}
    with live.http() as http:
        first = http.post("/v1/images/generations", json=asked, headers=named)
        again = http.post("/v1/images/generations", json=asked, headers=named)
        assert first.json() == again.json()
        assert first.headers["anyaccel-job"] == again.headers["anyaccel-job"]
        drawn = {"Idempotency-Key": f"drawn {time.time()}"}
        seeds = [
            http.post("/v1/images/generations", json={"prompt": "a bird", "num_inference_steps": 2}, headers=drawn)
            for _ in range(2)
        ]
        assert seeds[0].json() == seeds[1].json(), "a seed that was drawn is not asked for"
        other = http.post("/v1/images/generations", json={**asked, "seed": 5}, headers=named)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")


def test_the_queue_is_bounded_and_many_clients_get_their_own_pictures(live: Live) -> None:
    with live.http() as http:
        jobs, refused = [], None
        for number in range(12):
            answer = http.post("/v1/jobs", json={"prompt": "a dog", "num_inference_steps": 2000, "seed": number})
            if answer.status_code == 429:
                refused = answer
                break
            jobs.append(answer.json()["id"])
        assert refused is not None
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        assert len(jobs) <= 5, "two run and three wait"
        for job in jobs:
            http.post(f"/v1/jobs/{job}/cancel")
        for job in jobs:
            live.wait_state(http, job, "cancelled")
    with ThreadPoolExecutor(3) as threads:
        asked = {"seed": 5, "num_inference_steps": 4}
        prompts = ["a red apple", "a cat", "a rocket"]
        made = list(threads.map(lambda text: live.openai().images.generate(prompt=text, extra_body=asked), prompts))
    for text, one in zip(prompts, made, strict=True):
        here = anyaccel.generate(text, device="cpu", dtype="float32", seed=5, num_inference_steps=4)
        assert one.data is not None
        assert differ(read(one.data[0].b64_json), here.images[0]) <= 1


def test_a_client_that_leaves_stops_its_work(live: Live) -> None:
    asked = {"prompt": f"left {time.time()}", "num_inference_steps": 2000}
    with live.http() as http:
        body = http.build_request("POST", "/v1/images/generations", json=asked)
        head = "".join(f"{name}: {value}\r\n" for name, value in body.headers.items())
        address = urlsplit(live.address)
        with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=60) as client:
            client.sendall(f"POST {body.url.path} HTTP/1.1\r\n{head}\r\n".encode() + body.read())
            end, mine = time.monotonic() + 60, list[dict[str, Any]]()
            while not mine:
                assert time.monotonic() < end
                found = http.get("/v1/jobs").json()["data"]
                mine = [one for one in found if one["request"]["prompt"] == asked["prompt"]]
        live.wait_state(http, mine[0]["id"], "cancelled")


def _wait_for_rounds(live: Live, http: httpx.Client) -> str:
    """The figures, when the worker has told of its rounds, and a line of the log has come."""
    end = time.monotonic() + 60
    while True:
        figures = http.get("/metrics").text
        rounds = [line for line in figures.splitlines() if line.startswith("anyaccel_round_calls_count")]
        if rounds and float(rounds[0].split()[1]) and any(line.startswith("{") for line in list(live.lines)):
            return figures
        assert time.monotonic() < end, rounds
        time.sleep(0.1)


def test_figures_and_lines_tell_of_no_prompt(live: Live) -> None:
    secret = "a purple zeppelin"
    live.openai().images.generate(prompt=secret, user="somebody", extra_body={"num_inference_steps": 2})
    with live.http() as http:
        figures = _wait_for_rounds(live, http)
    for name in (
        "anyaccel_jobs_queued", "anyaccel_jobs_running", "anyaccel_images_total", "anyaccel_step_seconds_count",
        "anyaccel_round_calls_count", "anyaccel_worker_memory_bytes", "anyaccel_http_requests_total",
        'anyaccel_jobs_ended_total{code="",state="done"}',
    ):  # fmt: skip
        assert name in figures
    lines = [json.loads(line) for line in list(live.lines) if line.startswith("{")]
    assert all({"path", "status", "seconds", "job", "request"} <= set(line) for line in lines)
    everything = figures + "\n".join(live.lines)
    for word in ("zeppelin", "alice", "somebody"):
        assert word not in everything
