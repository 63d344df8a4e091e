"""What every test can use."""

import os

# Tests fork processes for virtual devices: torch must not have started threads before.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import atexit
import logging
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import pytest
from packaging.version import Version

from anyaccel.backends.registry import build_registry
from anyaccel.storage.atomic_write import atomic_write

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell: tests interrupt their children
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "anyaccel"

ALL_SHEETS = [sheet for backend in build_registry([]).backends.values() for sheet in backend.sheets]

NEEDS_RECIPES = pytest.mark.skipif(
    Version(version("diffusers")) < Version("0.42") or Version(version("transformers")) < Version("5"),
    reason="the recipes require diffusers 0.42 and transformers 5, which do not support Python 3.10",
)


LONGEST = ("cluster/serve/test_start.py", "server/test_run_server.py")
"""Run first, so that the end of the test run does not wait for one of them."""
LIVE = tuple(
    f"{name}.py"
    for name in (
        "cluster/batch/test_start", "cluster/serve/test_start", "runtime/distributed/test_parallel",
        "server/http/test_bad_input", "server/http/test_images_api", "server/http/test_schema",
        "server/http/test_web_page", "server/test_load", "server/test_run_server", "server/worker/test_virtual",
    )
)  # fmt: skip
"""Here processes, sockets and a browser must meet in time, on a machine that others use too: a test that fails is tried
once more, and the summary names it (docs/decisions/0011-second-try.md). Nowhere else."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--last-first`, to find tests that need what another has left behind, or suffer from it."""
    parser.addoption("--last-first", action="store_true", help="run the tests in the opposite order")


def pytest_configure() -> None:
    """Refuse gradients in the tests' own process: torch counts the devices at its first one and never again.

    Virtual devices that are forked later could compute none, whichever test they are for. In a fork a test may.
    """
    import torch

    run_backward, own = torch.autograd.graph._engine_run_backward, os.getpid()

    def refuse(*args: Any, **kwargs: Any) -> Any:
        assert os.getpid() != own, "a gradient in the tests' own process: compute it in a fork, or without gradients"
        return run_backward(*args, **kwargs)

    for module in (torch.autograd, torch.autograd.graph):
        module._engine_run_backward = refuse  # type: ignore[attr-defined]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Bring the tests into order, and mark those that may be tried twice."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONGEST))
    for item in items:
        if item.path.as_posix().endswith(LIVE):
            item.add_marker(pytest.mark.flaky(reruns=1))
    if config.getoption("--last-first"):
        items.reverse()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Look for the tools that a test needs before its fixtures start anything.

    The test is skipped from here, so that all tests without one tool are one line of the summary.
    """
    needed = {mark.args[0] for mark in item.iter_markers("needs_tool")}
    for tool in needed | ({"browser"} & set(getattr(item, "fixturenames", ()))):
        from tests.tools import require_tool  # not importable where a foreign suite borrows this file

        require_tool(tool)


class Kept:
    """What is computed once for all workers of a run, by name.

    Nobody waits: what two workers ask for in the same moment is computed twice.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, name: str) -> Any:
        """What is kept under the name; None where nothing is yet."""
        path = self.folder / f"{name}.pickle"
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def keep(self, name: str, value: object) -> None:
        """Keep it for whoever asks next."""
        atomic_write(self.folder / f"{name}.pickle", pickle.dumps(value))


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """What the workers of this run have computed already."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kept"
    folder.mkdir(exist_ok=True)
    return Kept(folder)


RunCli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_cli() -> RunCli:
    """Run the command line in a process of its own, as a user does."""

    def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ANYACCEL_")}
        return subprocess.run(
            [sys.executable, "-m", "anyaccel", *arguments],
            env=kept | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    return run


@pytest.fixture(scope="session")
def pipelines_imported() -> None:
    """Import every pipeline once, for tests that fork: each of their processes would import what it needs anew."""
    import diffusers

    from anyaccel.recipes import recipes

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what libraries say of themselves when they are imported
        for recipe in recipes().values():
            getattr(diffusers, recipe.pipeline, None)


@pytest.fixture(scope="session")
def compiler_imported() -> None:
    """Let torch's compiler import what it needs and read its sources once, before processes are forked."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SiLU())
    with torch.no_grad():
        torch.compile(model, backend="eager", fullgraph=True, dynamic=False)(torch.ones(1, 2))
    torch._dynamo.reset()


def run_in_fork(
    work: Callable[[], object], arguments: list[str], environment: Mapping[str, str], timeout_s: int = 600
) -> "subprocess.CompletedProcess[str]":
    """What a program writes and how it ends, in a fork of this process in which torch is imported already.

    Only for what does not depend on the start of a process: it has streams, arguments and variables of its own.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as none:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, of which none is torch's
            process = os.fork()
        if process == 0:
            _run_here(work, arguments, environment, (none.fileno(), out.fileno(), err.fileno()), timeout_s)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode())
    return subprocess.CompletedProcess(arguments, status, *texts)


def _run_here(
    work: Callable[[], object],
    arguments: list[str],
    environment: Mapping[str, str],
    files: tuple[int, ...],
    limit_s: int,
) -> NoReturn:
    """What the fork does; it never comes back."""
    status = 3
    try:
        signal.alarm(limit_s)
        for number, file in enumerate(files):
            os.dup2(file, number)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        for name in [name for name in os.environ if name.startswith("ANYACCEL_")]:
            del os.environ[name]
        os.environ.update(environment)
        sys.argv = arguments
        logging.getLogger().handlers.clear()  # pytest's
        atexit._clear()  # what the tests' own process would do at its end
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        work()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - as a program would end
        traceback.print_exc()
        status = 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@pytest.fixture
def run_cli_forked() -> RunCli:
    """Run the command line in a fork of this process: for what does not depend on how a process starts."""
    from anyaccel.cli.main import main

    def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        return run_in_fork(main, ["anyaccel", *arguments], environment)

    return run
