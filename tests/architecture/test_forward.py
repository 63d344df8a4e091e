"""Only `forward_overrides` assigns a module's forward, and plans are never reassigned."""

import re

import pytest

from tests.conftest import SOURCE

FORWARD = re.compile(r"\.forward\s*=(?!=)|\[\"forward\"\]\s*=(?!=)|setattr\([^,]+,\s*\"forward\"")
PLAN = re.compile(r"\.plan\s*=(?!=)|object\.__setattr__\([^)]*plan")
EXCEPTIONS = {
    "forward_overrides.py": "implements overrides",
    "runtime/placement/group_offload.py": "restores the forward that diffusers' hooks replaced",
    "explanation/memory_estimate.py": "an attribute of another class, set in its __init__",
}


def find_offenders(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{name}: {line.strip()}"
        for path in sorted(SOURCE.rglob("*.py"))
        if (name := str(path.relative_to(SOURCE))) not in EXCEPTIONS
        for line in path.read_text().splitlines()
        if pattern.search(line)
    ]


def test_only_forward_overrides_assigns_a_forward() -> None:
    assert find_offenders(FORWARD) == [], "use forward_overrides.set_override"


def test_plans_are_not_reassigned() -> None:
    assert find_offenders(PLAN) == [], "record later events in plan.report"


@pytest.mark.parametrize(
    "line", ["model.forward = wrap(model)", 'vars(model)["forward"] = run', 'setattr(a.b, "forward", f)']
)
def test_check_finds_a_forward_assignment(line: str) -> None:
    assert FORWARD.search(line)


@pytest.mark.parametrize("line", ["placement.plan = replace(plan, dtype=chosen)"])
def test_check_finds_a_plan_assignment(line: str) -> None:
    assert PLAN.search(line)
