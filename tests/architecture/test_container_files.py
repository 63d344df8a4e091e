"""Dockerfile and compose.yaml: the files, options and paths in them exist. No image is built."""

import json
import re
from typing import Any

import yaml
from typer.main import get_command

from anyaccel.cli.main import app
from tests.conftest import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())


def test_copied_files_exist_and_are_in_the_build_context() -> None:
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()}
    assert {"pyproject.toml", "src"} <= copied
    assert [name for name in sorted(copied) if not (ROOT / name).exists()] == []
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied <= sent


def test_the_entry_point_uses_options_that_the_command_has() -> None:
    (line,) = re.findall(r"^ENTRYPOINT (.+)$", DOCKERFILE, re.MULTILINE)
    arguments = json.loads(line)
    assert arguments[:4] == ["python3", "-m", "anyaccel", "serve"]
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {option for parameter in serve.params for option in parameter.opts}
    assert {argument for argument in arguments if argument.startswith("--")} <= options


def test_every_service_has_its_own_volume_and_port() -> None:
    services = COMPOSE["services"].values()
    for field in ("volumes", "ports"):
        values = [value.rpartition(":")[0] for service in services for value in service[field]]
        assert len(set(values)) == len(values) == len(COMPOSE["services"]), field
    assert set(COMPOSE["volumes"]) == {value.split(":")[0] for service in services for value in service["volumes"]}
    for service in services:
        assert "ANYACCEL_API_KEYS" in service["environment"]
