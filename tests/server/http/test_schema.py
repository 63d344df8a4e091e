"""Requests generated from the OpenAPI schema, valid and invalid: none causes a server error."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from tests.server.conftest import ALICE
from tests.server.live import Live

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
    @settings(max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True)
    def send(case: Any) -> None:
        # Without waiting for the images, so the queue also fills up.
        response = case.call(headers={**KEY, "Prefer": "respond-async"}, timeout=60)
        statuses.append(response.status_code)
        case.validate_response(response, checks=[not_a_server_error, status_code_conformance, content_type_conformance])

    send()
    assert statuses
    with live.http() as http:
        for job in http.get("/v1/jobs").json()["data"]:
            if job["state"] in ("queued", "running"):
                http.post(f"/v1/jobs/{job['id']}/cancel")
                live.wait_state(http, job["id"], "cancelled", "done", "failed")
