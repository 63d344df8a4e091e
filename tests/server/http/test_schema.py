"""Requests made up from the service's own description, right ones and wrong ones: none is answered with a fault."""

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
    ("GET", "/v1/jobs/{name}/images/{place}"), ("POST", "/v1/jobs/{name}/cancel"), ("DELETE", "/v1/jobs/{name}"),
]  # fmt: skip

HAVE_KINDS = [
    ("POST", "/v1/images/generations"),
    ("POST", "/v1/images/edits"),
    ("POST", "/v1/jobs"),
    ("GET", "/v1/jobs"),
]
"""Where an argument can be of the wrong kind: the others take a text or nothing."""
CASES = [(*one, "positive") for one in OPERATIONS] + [(*one, "negative") for one in HAVE_KINDS]


@pytest.fixture(scope="module")
def schema(live: Live) -> Any:
    return schemathesis.openapi.from_url(f"{live.address}/openapi.json", headers=KEY, timeout=60)


def test_the_description_names_every_endpoint(schema: Any) -> None:
    found = {(one.ok().method.upper(), one.ok().path) for one in schema.get_all_operations()}
    assert found == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path", "mode"), CASES, ids=[f"{mode} {a} {b}" for a, b, mode in CASES])
def test_nothing_is_answered_with_a_fault(live: Live, schema: Any, method: str, path: str, mode: str) -> None:
    strategy = schema[path][method].as_strategy(generation_mode=schemathesis.GenerationMode(mode))
    answers: list[int] = []

    @given(case=strategy)
    @settings(max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True)
    def ask(case: Any) -> None:
        # Answered at once, so that a queue that is full is tried too.
        answer = case.call(headers={**KEY, "Prefer": "respond-async"}, timeout=60)
        answers.append(answer.status_code)
        case.validate_response(answer, checks=[not_a_server_error, status_code_conformance, content_type_conformance])

    ask()
    assert answers
    with live.http() as http:
        for job in http.get("/v1/jobs").json()["data"]:
            if job["state"] in ("queued", "running"):
                http.post(f"/v1/jobs/{job['id']}/cancel")
                live.wait_state(http, job["id"], "cancelled", "done", "failed")
