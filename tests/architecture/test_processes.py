"""Only `processes/` starts processes."""

import ast
from collections.abc import Iterator

import pytest

from tests.conftest import SOURCE
from tests.source_trees import parse

STARTING: dict[str, set[str] | None] = {
    "subprocess": None,
    "multiprocessing": {"Process", "Pool", "get_context"},
    "multiprocessing.context": None,
    "concurrent.futures": {"ProcessPoolExecutor"},
    "torch.multiprocessing": {"Process", "Pool", "get_context", "spawn", "start_processes"},
    "os": {"fork", "forkpty", "system", "popen", "posix_spawn", "spawnv", "spawnve", "execv", "execve"},
    "pty": None,
}
"""The names that start a process, by module; None for all names."""

EXCEPTIONS = {
    "backends/machine.py": "runs sysctl to detect Rosetta",
    "verification/verify.py": "runs git to read the commit",
    "cluster/torchrun_on_ray.py": "a Ray actor runs the user's program",
}


def find_starts(code: str) -> Iterator[str]:
    """Yield the dotted names in a module that start a process."""
    for node in ast.walk(parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module:
            used = [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Attribute):
            used = [(ast.unparse(node.value), node.attr)]
        else:
            continue
        for module, name in used:
            names = STARTING.get(module, set())
            if names is None or name in names:
                yield f"{module}.{name}"


def test_only_the_processes_package_starts_processes() -> None:
    found = {
        name: sorted(set(starts))
        for path in sorted(SOURCE.rglob("*.py"))
        if (name := path.relative_to(SOURCE).as_posix()).split("/")[0] != "processes"
        and (starts := list(find_starts(path.read_text())))
    }
    offenders = {name: starts for name, starts in found.items() if name not in EXCEPTIONS}
    assert offenders == {}, "use call_in_fork, JsonLineWorker or PipeWorker of anyaccel.processes"
    assert found.keys() == EXCEPTIONS.keys(), "remove exceptions that are no longer needed"
    assert all("Popen" not in start for starts in found.values() for start in starts), (
        "exceptions may only use subprocess.run"
    )


@pytest.mark.parametrize(
    "code",
    [
        "subprocess.Popen(['ls'])",
        "from subprocess import run",
        "multiprocessing.get_context('spawn')",
        "from multiprocessing import Process",
        "pid = os.fork()",
        "from concurrent.futures import ProcessPoolExecutor",
    ],
)
def test_check_finds_process_starts(code: str) -> None:
    assert list(find_starts(code))


def test_check_ignores_other_code() -> None:
    assert not list(find_starts("import os\nfrom multiprocessing.connection import Connection\nos.kill(1, 9)"))
