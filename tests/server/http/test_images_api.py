"""The HTTP API, with OpenAI's client and with httpx."""

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


def decode(b64: str | None) -> Image.Image:
    assert b64 is not None
    return Image.open(io.BytesIO(base64.b64decode(b64)))


def max_difference(left: Image.Image, right: Image.Image) -> int:
    pixels = [numpy.asarray(image.convert("RGB")).astype(int) for image in (left, right)]
    return int(numpy.abs(pixels[0] - pixels[1]).max())


def test_images_equal_those_of_the_library(live: Live, tmp_path: Any) -> None:
    response = live.openai().images.generate(prompt="a red apple", n=2, size="128x128", extra_body={"seed": 7})
    assert response.data is not None
    assert [image.seed for image in response.data] == [7, 8]  # type: ignore[attr-defined]
    assert (response.size, response.output_format) == ("128x128", "png")
    expected = anyaccel.generate("a red apple", device="cpu", dtype="float32", seed=7, num_images_per_prompt=2)
    for served, image in zip(response.data, expected.images, strict=True):
        assert max_difference(decode(served.b64_json), image) <= 1
    file = tmp_path / "image.png"
    file.write_bytes(base64.b64decode(response.data[0].b64_json or ""))
    (metadata,) = read_metadata(file)
    assert (metadata.prompt, metadata.seed, metadata.steps) == ("a red apple", 7, 8), "the file has its metadata"


def test_diffusers_parameters_and_openai_formats_are_supported(live: Live) -> None:
    client = live.openai()
    parameters = {"seed": 3, "num_inference_steps": 4, "guidance_scale": 3.0, "negative_prompt": "blue"}
    response = client.images.generate(
        prompt="a fox", size="64x128", output_format="webp", output_compression=50, user="u", extra_body=parameters
    )
    assert response.data is not None
    image = decode(response.data[0].b64_json)
    assert (image.format, image.size) == ("WEBP", (64, 128))
    linked = client.images.generate(prompt="a fox", response_format="url", output_format="jpeg", extra_body={"seed": 1})
    assert linked.data is not None
    url = str(linked.data[0].url)
    fetched = httpx.get(url, timeout=60)
    assert (fetched.status_code, fetched.headers["content-type"]) == (200, "image/jpeg"), (
        "no key is needed for a signed URL"
    )
    assert httpx.get(url[:-1] + ("0" if url[-1] != "0" else "1"), timeout=60).status_code == 401
    assert httpx.get(url.partition("?")[0], timeout=60).status_code == 401


def test_previews_are_streamed_while_denoising(live: Live) -> None:
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
    pixels = [numpy.asarray(decode(event.b64_json).convert("RGB")).astype(float) for event in first]
    errors = [float(((preview - pixels[-1]) ** 2).mean()) for preview in pixels[:-1]]
    assert errors[0] > errors[1] > errors[2], "each preview must be closer to the final image than the previous one"
    assert errors[2] < 500
    assert events[-1].seed in (3, 4)  # type: ignore[union-attr]


def test_edits_start_from_an_image(live: Live) -> None:
    client = live.openai()
    response = client.images.generate(prompt="a red apple", extra_body={"seed": 7})
    assert response.data is not None
    apple = base64.b64decode(response.data[0].b64_json or "")
    weak, strong = (
        client.images.edit(
            image=("apple.png", apple), prompt="a green tree", extra_body={"seed": 1, "strength": strength}
        ).data
        for strength in (0.3, 1.0)
    )
    assert weak is not None
    assert strong is not None
    before = numpy.asarray(Image.open(io.BytesIO(apple)).convert("RGB")).astype(float)
    changes = [
        float(numpy.abs(numpy.asarray(decode(edit[0].b64_json).convert("RGB")) - before).mean())
        for edit in (weak, strong)
    ]
    assert changes[0] < changes[1], "a higher strength changes more"
    slow: dict[str, Any] = {"extra_body": {"num_inference_steps": 40}}
    events = list(client.images.edit(image=apple, prompt="a tree", stream=True, partial_images=1, **slow))
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]
    with pytest.raises(openai.BadRequestError, match="; use at least 10 steps"):
        client.images.edit(image=apple, prompt="a tree", extra_body={"strength": 0.1})
    with pytest.raises(openai.BadRequestError, match="does not support the task 'inpaint'"):
        client.images.edit(image=apple, mask=apple, prompt="a tree")


@pytest.mark.parametrize(
    ("parameters", "error_type", "code", "param"),
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
def test_errors_follow_openai_s_format(
    live: Live, parameters: dict[str, Any], error_type: type[openai.APIStatusError], code: str, param: str | None
) -> None:
    with pytest.raises(error_type) as caught:
        live.openai().images.generate(**parameters)
    assert caught.value.code == code
    if param is not None:
        assert caught.value.param == param


def test_models_and_status_are_reported(live: Live) -> None:
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
        for path in ("/", "/page.css", "/results.css", "/page.js", "/running.js"):
            assert "default-src 'none'" in http.get(path).headers["content-security-policy"]


def test_a_client_cannot_access_jobs_of_another_key(live: Live) -> None:
    with pytest.raises(openai.AuthenticationError):
        live.openai("wrong").images.generate(prompt="x")
    with live.http() as alice, live.http(BOB) as bob:
        job = alice.post("/v1/jobs", json={"prompt": "a dog", "num_inference_steps": 2}).json()["id"]
        for response in (bob.get(f"/v1/jobs/{job}"), bob.post(f"/v1/jobs/{job}/cancel"), bob.delete(f"/v1/jobs/{job}")):
            assert response.status_code == 404
        assert job not in [other["id"] for other in bob.get("/v1/jobs").json()["data"]]
        live.wait_state(alice, job, "done")
        assert bob.get(f"/v1/jobs/{job}/images/0").status_code == 404
        assert alice.get(f"/v1/jobs/{job}/images/0").headers["content-type"] == "image/png"


def test_job_events_cancellation_and_deletion(live: Live) -> None:
    with live.http() as http:
        long = http.post("/v1/jobs", json={"prompt": "a dog", "num_inference_steps": 2000})
        assert long.status_code == 202
        job = long.json()["id"]
        live.wait_state(http, job, "running")
        assert http.delete(f"/v1/jobs/{job}").status_code == 409
        kinds: list[str] = []
        with http.stream("GET", f"/v1/jobs/{job}/events") as events:
            for line in events.iter_lines():
                kinds += [line.removeprefix("event: ")] if line.startswith("event: ") else []
                if kinds[-1:] == ["step"] and line.startswith("data: "):
                    step = json.loads(line.removeprefix("data: "))
                    assert set(step) == {"index", "done", "total"}
                    assert (step["index"], step["total"]) == (0, 2000)
                if kinds.count("step") == 2:
                    cancelled = http.post(f"/v1/jobs/{job}/cancel").json()
                    assert cancelled["state"] in ("cancelling", "cancelled")
        assert kinds[0] == "state"
        assert kinds[-1] == "state"
        ended = http.get(f"/v1/jobs/{job}").json()
        assert (ended["state"], ended["images"]) == ("cancelled", [])
        metrics = http.get("/metrics").text
        assert http.post(f"/v1/jobs/{job}/cancel").json()["state"] == "cancelled"
        line = next(line for line in metrics.splitlines() if 'state="cancelled"' in line)
        assert line in http.get("/metrics").text, "a job is counted once"
        assert ended["ended_at"] - ended["started_at"] < 60
        assert http.delete(f"/v1/jobs/{job}").json()["deleted"] is True
        assert http.get(f"/v1/jobs/{job}").status_code == 404


def test_requests_with_the_same_idempotency_key_share_a_job(live: Live) -> None:
    headers = {"Idempotency-Key": f"once {time.time()}"}
    body = {"prompt": "a bird", "seed": 4, "num_inference_steps": 2}
    with live.http() as http:
        first = http.post("/v1/images/generations", json=body, headers=headers)
        again = http.post("/v1/images/generations", json=body, headers=headers)
        assert first.json() == again.json()
        assert first.headers["anyaccel-job"] == again.headers["anyaccel-job"]
        random_seed = {"Idempotency-Key": f"random seed {time.time()}"}
        responses = [
            http.post(
                "/v1/images/generations", json={"prompt": "a bird", "num_inference_steps": 2}, headers=random_seed
            )
            for _ in range(2)
        ]
        assert responses[0].json() == responses[1].json(), "a random seed is not part of the request"
        other = http.post("/v1/images/generations", json={**body, "seed": 5}, headers=headers)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")


def test_the_queue_is_bounded_and_concurrent_clients_get_their_own_images(live: Live) -> None:
    with live.http() as http:
        jobs, rejected = [], None
        for number in range(12):
            response = http.post("/v1/jobs", json={"prompt": "a dog", "num_inference_steps": 2000, "seed": number})
            if response.status_code == 429:
                rejected = response
                break
            jobs.append(response.json()["id"])
        assert rejected is not None
        assert rejected.json()["error"]["code"] == "queue_full"
        assert int(rejected.headers["retry-after"]) >= 1
        assert len(jobs) <= 5, "two running and three queued"
        for job in jobs:
            http.post(f"/v1/jobs/{job}/cancel")
        for job in jobs:
            live.wait_state(http, job, "cancelled")
    with ThreadPoolExecutor(3) as threads:
        parameters = {"seed": 5, "num_inference_steps": 4}
        prompts = ["a red apple", "a cat", "a rocket"]
        responses = list(
            threads.map(lambda text: live.openai().images.generate(prompt=text, extra_body=parameters), prompts)
        )
    for text, generated in zip(prompts, responses, strict=True):
        expected = anyaccel.generate(
            text, device="cpu", dtype="float32", seed=5, num_inference_steps=4, width=64, height=64
        )
        assert generated.data is not None
        assert max_difference(decode(generated.data[0].b64_json), expected.images[0]) <= 1


def test_a_disconnected_client_cancels_its_job(live: Live) -> None:
    body = {"prompt": f"disconnected {time.time()}", "num_inference_steps": 2000}
    with live.http() as http:
        request = http.build_request("POST", "/v1/images/generations", json=body)
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        address = urlsplit(live.address)
        with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=60) as client:
            client.sendall(f"POST {request.url.path} HTTP/1.1\r\n{head}\r\n".encode() + request.read())
            end, matching = time.monotonic() + 60, list[dict[str, Any]]()
            while not matching:
                assert time.monotonic() < end
                jobs = http.get("/v1/jobs").json()["data"]
                matching = [job for job in jobs if job["request"]["prompt"] == body["prompt"]]
        live.wait_state(http, matching[0]["id"], "cancelled")


def _wait_for_batch_metrics(live: Live, http: httpx.Client) -> str:
    """Return the metrics after the worker has reported batches and the service has logged a request."""
    end = time.monotonic() + 60
    while True:
        metrics = http.get("/metrics").text
        counts = [line for line in metrics.splitlines() if line.startswith("anyaccel_round_calls_count")]
        if counts and float(counts[0].split()[1]) and any(line.startswith("{") for line in list(live.lines)):
            return metrics
        assert time.monotonic() < end, counts
        time.sleep(0.1)


def test_metrics_and_logs_contain_no_prompts_or_keys(live: Live) -> None:
    secret = "a purple zeppelin"
    live.openai().images.generate(prompt=secret, user="somebody", extra_body={"num_inference_steps": 2})
    with live.http() as http:
        metrics = _wait_for_batch_metrics(live, http)
    for name in (
        "anyaccel_jobs_queued", "anyaccel_jobs_running", "anyaccel_images_total", "anyaccel_step_seconds_count",
        "anyaccel_round_calls_count", "anyaccel_worker_memory_bytes", "anyaccel_http_requests_total",
        'anyaccel_jobs_ended_total{code="",state="done"}',
    ):  # fmt: skip
        assert name in metrics
    lines = [json.loads(line) for line in list(live.lines) if line.startswith("{")]
    assert all({"path", "status", "seconds", "job", "request"} <= set(line) for line in lines)
    output = metrics + "\n".join(live.lines)
    for text in ("zeppelin", "alice", "somebody"):
        assert text not in output
