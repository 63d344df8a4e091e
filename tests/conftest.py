"""Fixtures and hooks shared by all tests."""

import os

# Tests fork processes for virtual devices, so torch must not start threads first.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import atexit
import gc
import logging
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import pytest
from packaging.version import Version

from anyaccel.backends.registry import build_registry
from anyaccel.storage.atomic_write import atomic_write

gc.disable()  # until all tests are collected: imports create many objects and free few

# Shells start background jobs with SIGINT ignored, and child processes inherit that. Tests interrupt their children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests must not use the user's cache: its outcomes and measurements change plans. Child processes inherit the variable.
OWN_CACHE = None if "ANYACCEL_CACHE" in os.environ else tempfile.mkdtemp(prefix="anyaccel_cache_")
if OWN_CACHE is not None:
    os.environ["ANYACCEL_CACHE"] = OWN_CACHE
CACHE_OWNER = os.getpid()
# Nor the user's configuration file.
os.environ["ANYACCEL_CONFIG"] = os.devnull

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "anyaccel"

ALL_SHEETS = [sheet for backend in build_registry([]).backends.values() for sheet in backend.sheets]

NEEDS_RECIPES = pytest.mark.skipif(
    Version(version("diffusers")) < Version("0.42") or Version(version("transformers")) < Version("5"),
    reason="the recipes require diffusers 0.42 and transformers 5, which do not support Python 3.10",
)


LONGEST = ("cluster/serve/test_start.py", "server/test_run_server.py")
"""Test files that take the longest. They run first."""
LIVE = tuple(
    f"{name}.py"
    for name in (
        "cluster/batch/test_start", "cluster/serve/test_start", "runtime/distributed/test_parallel",
        "server/http/test_bad_input", "server/http/test_images_api", "server/http/test_schema",
        "server/http/test_web_page", "server/test_load", "server/test_run_server", "server/worker/test_virtual",
    )
)  # fmt: skip
"""Test files that wait for processes, sockets or a browser and may time out on a busy machine. A failed test is retried
once and listed in the summary (docs/decisions/0011-retrying-tests.md). No other tests are retried."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--last-first`, which finds tests that depend on the order of the tests."""
    parser.addoption("--last-first", action="store_true", help="run the tests in reverse order")


def pytest_configure() -> None:
    """Make tests fail if they compute gradients in the pytest process.

    torch counts the devices only once, when a process computes its first gradient. Virtual devices that are forked
    afterwards cannot compute gradients. Tests may compute gradients in a forked process.
    """
    import torch

    run_backward, pytest_pid = torch.autograd.graph._engine_run_backward, os.getpid()

    def run_backward_in_fork(*args: Any, **kwargs: Any) -> Any:
        assert os.getpid() != pytest_pid, "gradient computed in the pytest process: use a fork or torch.no_grad()"
        return run_backward(*args, **kwargs)

    for module in (torch.autograd, torch.autograd.graph):
        module._engine_run_backward = run_backward_in_fork  # type: ignore[attr-defined]


def pytest_unconfigure() -> None:
    """Delete the cache folder of the tests."""
    if OWN_CACHE is not None and os.getpid() == CACHE_OWNER:
        shutil.rmtree(OWN_CACHE, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests, and mark those that may be retried."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONGEST))
    for item in items:
        if item.path.as_posix().endswith(LIVE):
            item.add_marker(pytest.mark.flaky(reruns=1))
    if config.getoption("--last-first"):
        items.reverse()


def pytest_collection_finish() -> None:
    """Exclude the imported libraries and the tests from garbage collection, which would take 0.5 s each time."""
    with suppress(ImportError):
        import hypothesis  # noqa: F401 - its import warns about random generators that the collector does not see
    if "PYTEST_XDIST_WORKER" in os.environ:
        import_pipelines()  # most workers need them; a fork that imports them itself takes seconds longer
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test if a required tool is missing, before its fixtures start anything.

    Tests that are skipped here for the same reason share one line of the summary.
    """
    needed = {mark.args[0] for mark in item.iter_markers("needs_tool")}
    for tool in needed | ({"browser"} & set(getattr(item, "fixturenames", ()))):
        from tests.tools import require_tool  # not importable if another test suite uses this file

        require_tool(tool)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Make a test fail if it starts a virtual device in the pytest process, where all later tests would have it."""
    activation = sys.modules.get("anyaccel.emulator.activation")
    if activation is not None and activation._STARTED and "virtual device" not in REPORTED:
        REPORTED.add("virtual device")
        pytest.fail("the test started a virtual device in the pytest process: use a fork", pytrace=False)


REPORTED: set[str] = set()
"""Faults that are reported only for the test that causes them."""


class SharedCache:
    """Cache of named values that all pytest-xdist workers of a run share.

    There is no locking: if two workers need a value at the same time, both compute it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, name: str) -> Any:
        """Return the value with this name; None if it is not cached yet."""
        path = self.folder / f"{name}.pickle"
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def keep(self, name: str, value: object) -> None:
        """Cache a value under a name."""
        atomic_write(self.folder / f"{name}.pickle", pickle.dumps(value))


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> SharedCache:
    """Values that the workers of this run have already computed."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared_cache"
    folder.mkdir(exist_ok=True)
    return SharedCache(folder)


def inherit_environment() -> dict[str, str]:
    """Return the environment variables for a new process: without anyaccel's, except the test files' own."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ANYACCEL_") or name in ("ANYACCEL_CACHE", "ANYACCEL_CONFIG")
    }


RunCli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_cli() -> RunCli:
    """Run the command line in a new process, as a user does."""

    def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "anyaccel", *arguments],
            env=inherit_environment() | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    return run


def import_pipelines() -> None:
    """Import every pipeline, and everything that is imported when one is placed and called."""
    import diffusers

    import anyaccel
    from anyaccel.recipes import recipes, run

    logging.disable(logging.WARNING)  # transformers logs which optional libraries are missing
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # import-time warnings of libraries
        for recipe in recipes().values():
            getattr(diffusers, recipe.pipeline, None)
        if not NEEDS_RECIPES.args[0]:
            recipe = recipes()["stable-diffusion"]
            run(recipe, anyaccel.place(recipe.make(), "cpu", dtype="float32"))
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="session")
def pipelines_imported() -> None:
    """Import every pipeline once; otherwise, each forked process would import its pipelines again."""
    import_pipelines()
    gc.freeze()


@pytest.fixture(scope="session")
def compiler_imported() -> None:
    """Run torch.compile once before processes are forked, so that they inherit its imports and caches."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SiLU())
    with torch.no_grad():
        torch.compile(model, backend="eager", fullgraph=True, dynamic=False)(torch.ones(1, 2))
    torch._dynamo.reset()


def run_in_fork(
    work: Callable[[], object], arguments: list[str], environment: Mapping[str, str], timeout_s: int = 600
) -> "subprocess.CompletedProcess[str]":
    """Run a program in a fork of this process, where torch is already imported; return its output and exit status.

    The fork has its own streams, arguments and environment variables. Do not use it to test the start of a process.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as empty:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads; none of them is torch's
            process = os.fork()
        if process == 0:
            _run_here(work, arguments, environment, (empty.fileno(), out.fileno(), err.fileno()), timeout_s)
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
    """Run the program in the forked process and exit."""
    status = 3
    try:
        signal.alarm(limit_s)
        for descriptor, file in enumerate(files):
            os.dup2(file, descriptor)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        inherited = inherit_environment()
        os.environ.clear()
        os.environ.update({**inherited, **environment})
        sys.argv = arguments
        logging.getLogger().handlers.clear()  # added by pytest
        atexit._clear()  # exit handlers of the pytest process
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        work()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - print the traceback like the interpreter
        traceback.print_exc()
        status = 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@pytest.fixture
def run_cli_forked() -> RunCli:
    """Run the command line in a fork of this process, for tests that do not depend on the start of a process."""
    from anyaccel.cli.main import main

    def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        return run_in_fork(main, ["anyaccel", *arguments], environment)

    return run
