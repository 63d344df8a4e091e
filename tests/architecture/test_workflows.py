"""The GitHub workflows are valid, have minimal permissions, and name only existing files and make targets."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))
MAJOR_VERSION = re.compile(r"@(v\d+|release/v\d+)$")
MAKE = re.compile(r"^make((?: +\S+)+)$", re.MULTILINE)
REPOSITORY_PATH = re.compile(r"(?<![\w./-])((?:\.ci|tests|tools|docs)(?:/[\w.-]+)+|constraints\.txt|pyproject\.toml)")


def read(path: Path) -> dict[Any, Any]:
    workflow: dict[Any, Any] = yaml.safe_load(path.read_text())
    # YAML 1.1 reads the key `on` as a boolean.
    workflow["on"] = workflow.pop(True)
    return workflow


def list_steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


def read_make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    targets = {name for line in re.findall(r"^([a-z][a-z -]*):(?!=)", text, re.MULTILINE) for name in line.split()}
    return targets | {".venv/.ready", ".venv/.ready-test", ".venv/.ready-check"}


def test_there_is_one_workflow_for_checks_and_one_for_releases() -> None:
    assert [path.name for path in FILES] == ["ci.yml", "publish.yml"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_workflow_has_triggers_timeouts_and_few_permissions(path: Path) -> None:
    workflow = read(path)
    assert workflow["on"]
    assert workflow["concurrency"]["group"]
    assert workflow["permissions"] in ({}, {"contents": "read"})
    for name, job in workflow["jobs"].items():
        assert "uses" in job or job["timeout-minutes"], name
        allowed = {"id-token": "write"} if name == "publish" else {"contents": "read"}
        assert job.get("permissions", allowed) == allowed, name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_actions_are_pinned_to_a_major_version(path: Path) -> None:
    uses = [step["uses"] for step in list_steps(read(path)) if "uses" in step]
    assert uses
    assert [action for action in uses if not MAJOR_VERSION.search(action)] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_and_make_targets_that_are_named_exist(path: Path) -> None:
    workflow = read(path)
    text = path.read_text()
    named = set(REPOSITORY_PATH.findall(text))
    named |= {job["uses"].removeprefix("./") for job in workflow["jobs"].values() if "uses" in job}
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    scripts = "\n".join(step.get("run", "") for step in list_steps(workflow))
    words = [word for line in MAKE.findall(scripts) for word in line.split()]
    assert {word for word in words if "=" not in word} <= read_make_targets()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_workflow_names_a_package_index(path: Path) -> None:
    # The strings are split, because the check of the whole repository must not find this file.
    index = re.compile("|".join([r"index-" + "url", "py" + r"pi\.org", r"download\.py" + r"torch\.org"]))
    assert not index.search(path.read_text())


def test_every_python_version_that_the_package_claims_is_tested() -> None:
    # Python 3.10 has no tomllib.
    claimed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert claimed
    assert read(FOLDER / "ci.yml")["jobs"]["quick"]["strategy"]["matrix"]["python"] == claimed


def test_a_release_waits_for_the_checks_and_uses_trusted_publishing() -> None:
    jobs = read(FOLDER / "publish.yml")["jobs"]
    assert set(jobs["publish"]["needs"]) == {"check", "build"}
    assert jobs["publish"]["environment"] == "pypi"
    assert "secrets." not in (FOLDER / "publish.yml").read_text()


def test_make_targets_are_read_from_the_makefile() -> None:
    assert {"check", "test", "test-all", "clean"} <= read_make_targets()
    assert "no-such-target" not in read_make_targets()
