"""Requests generated from the OpenAPI schema, valid and invalid: none causes a server error.

ANYACCEL_SCHEMA_EXAMPLES=300 pytest tests/server/http/test_schema.py   # more requests for each endpoint
"""

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from anyaccel.recipes import recipes
from tests.conftest import NEEDS_RECIPES
from tests.server.conftest import ALICE
from tests.server.live import Live

EXAMPLES = int(os.environ.get("ANYACCEL_SCHEMA_EXAMPLES", "12"))
KEY = {"Authorization": f"Bearer {ALICE}"}
OPERATIONS = [
    ("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/metrics"), ("GET", "/v1/status"), ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"), ("POST", "/v1/images/generations"), ("POST", "/v1/images/edits"),
    ("POST", "/v1/jobs"), ("GET", "/v1/jobs"), ("GET", "/v1/jobs/{name}"), ("GET", "/v1/jobs/{name}/events"),
    ("GET", "/v1/jobs/{name}/images/{index}"), ("POST", "/v1/jobs/{name}/cancel"), ("DELETE", "/v1/jobs/{name}"),
    ("GET", "/v1/jobs/{name}/files/{file}"), ("POST", "/v1/videos"), ("GET", "/v1/videos"),
    ("GET", "/v1/videos/{video_id}"), ("GET", "/v1/videos/{video_id}/content"), ("DELETE", "/v1/videos/{video_id}"),
    ("POST", "/v1/videos/{video_id}/remix"), ("POST", "/v1/audio/speech"), ("GET", "/v1/loras"),
    ("POST", "/v1/loras"), ("DELETE", "/v1/loras/{lora}"),
]  # fmt: skip

TYPED_OPERATIONS = [
    ("POST", "/v1/images/generations"),
    ("POST", "/v1/images/edits"),
    ("POST", "/v1/jobs"),
    ("GET", "/v1/jobs"),
    ("POST", "/v1/videos"),
    ("GET", "/v1/videos"),
    ("POST", "/v1/audio/speech"),
]
"""Operations with arguments that can have a wrong type; the others have only strings or none."""
CASES = [(*operation, "positive") for operation in OPERATIONS] + [
    (*operation, "negative") for operation in TYPED_OPERATIONS
]
SETTINGS: dict[str, Any] = {
    "deadline": None, "database": None, "suppress_health_check": list(HealthCheck), "derandomize": True,
}  # fmt: skip
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]


@pytest.fixture(scope="module")
def schema(live: Live) -> Any:
    return schemathesis.openapi.from_url(f"{live.address}/openapi.json", headers=KEY, timeout=60)


def test_the_schema_lists_every_endpoint(schema: Any) -> None:
    operations = {(result.ok().method.upper(), result.ok().path) for result in schema.get_all_operations()}
    assert operations == set(OPERATIONS)


@pytest.mark.parametrize(
    ("method", "path", "mode"), CASES, ids=[f"{mode} {method} {path}" for method, path, mode in CASES]
)
def test_no_request_causes_a_server_error(live: Live, schema: Any, method: str, path: str, mode: str) -> None:
    strategy = schema[path][method].as_strategy(generation_mode=schemathesis.GenerationMode(mode))
    statuses: list[int] = []

    @given(case=strategy)
    @settings(max_examples=EXAMPLES, **SETTINGS)
    def send(case: Any) -> None:
        # Without waiting for the images, so the queue also fills up.
        response = case.call(headers={**KEY, "Prefer": "respond-async"}, timeout=60)
        statuses.append(response.status_code)
        case.validate_response(response, checks=CHECKS)

    send()
    assert statuses
    with live.http() as http:
        for job in http.get("/v1/jobs").json()["data"]:
            if job["state"] in ("queued", "running"):
                http.post(f"/v1/jobs/{job['id']}/cancel")
                live.wait_state(http, job["id"], "cancelled", "done", "failed")


MEDIA_MODELS = {"images": "stable-diffusion", "videos": "wan", "audio": "stable-audio"}
MEDIA_OPERATIONS = {
    ("POST", "/v1/images/generations"): "images", ("POST", "/v1/images/edits"): "images",
    ("POST", "/v1/videos"): "videos", ("POST", "/v1/videos/{video_id}/remix"): "videos",
    ("GET", "/v1/videos/{video_id}"): "videos", ("GET", "/v1/videos/{video_id}/content"): "videos",
    ("GET", "/v1/jobs/{name}"): "audio", ("GET", "/v1/jobs/{name}/events"): "images",
    ("GET", "/v1/jobs/{name}/images/{index}"): "images", ("GET", "/v1/jobs/{name}/files/{file}"): "videos",
    ("POST", "/v1/audio/speech"): "audio", ("POST", "/v1/jobs"): "videos",
}  # fmt: skip
"""Operations that reach a model or a result, with the model."""
SMALL: dict[str, dict[str, Any]] = {
    "images": {"num_inference_steps": 1, "size": "32x32"},
    "videos": {"num_inference_steps": 1, "size": "32x32", "num_frames": 5},
    "audio": {"num_inference_steps": 1, "seconds": 1.0},
}


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("models")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about weight_norm in a VAE for audio
        for name, recipe in MEDIA_MODELS.items():
            pipe: Any = recipes()[recipe].make()
            pipe.save_pretrained(folder / name)
    limits = [f"--limit={text}" for text in ("max_steps=4", "max_n=2", "max_frames=9", "max_audio_s=2")]
    service = Live(
        tmp_path_factory.mktemp("data"), *(f"{name}={folder / name}" for name in MEDIA_MODELS), "--device", "cpu",
        "--dtype", "float32", "--sizes", "32x32", *limits,
    )  # fmt: skip
    yield service
    assert service.end() == 0


@pytest.fixture(scope="module")
def results(media: Live) -> dict[str, str]:
    """A finished job of each model."""
    with media.http() as http:
        jobs = {
            name: http.post("/v1/jobs", json={"prompt": "x", "model": name, **SMALL[name]}).json()["id"]
            for name in MEDIA_MODELS
        }
        for job in jobs.values():
            media.wait_state(http, job, "done")
    return jobs


@pytest.mark.long
@NEEDS_RECIPES
@pytest.mark.parametrize(("method", "path"), list(MEDIA_OPERATIONS), ids=map(" ".join, MEDIA_OPERATIONS))
def test_no_request_that_reaches_a_model_causes_a_server_error(
    media: Live, results: dict[str, str], method: str, path: str
) -> None:
    """The models are tiny, and most of the generated requests are changed so that they accept them."""
    schema = schemathesis.openapi.from_url(f"{media.address}/openapi.json", timeout=60)
    model, statuses = MEDIA_OPERATIONS[method, path], list[int]()

    @given(case=schema[path][method].as_strategy(), kept=st.integers(0, 9), waits=st.booleans())
    @settings(max_examples=EXAMPLES, phases=[Phase.generate], **SETTINGS)
    def send(case: Any, kept: int, waits: bool) -> None:
        parameters = {"name": results[model], "video_id": results[model], "index": 0, "file": "0.mp4"}
        case.path_parameters = {**case.path_parameters, **{name: parameters[name] for name in case.path_parameters}}
        if isinstance(case.body, dict) and kept and not path.endswith("remix"):
            known = [name for name in SCHEMA_FIELDS if name in case.body][-kept:]
            required = {name: case.body[name] for name in ("prompt", "input", "image") if name in case.body}
            case.body = {**{name: case.body[name] for name in known}, **required, "model": model, **SMALL[model]}
        response = case.call(headers={} if waits else {"Prefer": "respond-async"}, timeout=120)
        statuses.append(response.status_code)
        case.validate_response(response, checks=CHECKS)

    send()
    assert min(statuses) < 300, "a request was accepted"


SCHEMA_FIELDS = (
    "style", "user", "moderation", "fps", "background", "quality", "stream", "partial_images", "output_compression",
    "output_format", "response_format", "strength", "guidance_scale", "negative_prompt", "seed", "n",
)  # fmt: skip
