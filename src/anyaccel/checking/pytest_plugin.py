"""The pytest plugin: tests on virtual accelerators, a process each, or a whole suite on one.

    @pytest.mark.accelerator("mps", "neuron")
    def test_it_runs(accelerator):
        make_pipeline().to(accelerator.device)(…)
        accelerator.ledger.assert_clean("error")

    pytest --accelerator hpu        a whole suite, somebody else's too, with a virtual Gaudi in the process
    pytest --accelerator-real       the marked tests on the real devices that are here; the others are skipped

A process has one virtual accelerator. Marked tests run in processes that are forked from a second pytest, which has
collected the same tests and computed nothing: a fork of the first one would wait for ever for torch's threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.runner import runtestprotocol

from anyaccel.processes.json_line_worker import JsonLineWorker, connecting_to_parent

if TYPE_CHECKING:
    import torch

    from anyaccel.emulator.ledger import Ledger

__all__ = ["Accelerator"]

_NAME = "_accelerator_name"
_MARKER = "accelerator"
_ACTIVE = pytest.StashKey[Any]()
_WHOLE = pytest.StashKey["Ledger"]()
"""What the whole run has met; the accelerator's own ledger is each test's."""
_STACK = pytest.StashKey[ExitStack]()
_SECOND = pytest.StashKey["_SecondPytest"]()
_TIMEOUT_S = 3600.0
_MOST_TOLD = 4000
"""Characters of what a process printed before it ended."""


@dataclass(frozen=True)
class Accelerator:
    """What the fixture gives."""

    name: str
    device: torch.device
    virtual: bool
    ledger: Ledger
    """What the test asked of the device that it cannot do; empty on real hardware, which tells by its errors."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("anyaccel", "accelerators, virtual ones unless you ask for real ones")
    group.addoption("--accelerator", metavar="NAME", help="run the whole suite with this virtual accelerator")
    group.addoption("--accelerator-strict", action="store_true", help="raise where the device would")
    group.addoption("--accelerator-real", action="store_true", help="run the marked tests on real devices")
    group.addoption("--accelerator-second", action="store_true", help="used by the plugin itself")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Have the device before the first line of the suite is imported."""
    name = early_config.known_args_namespace.accelerator
    if name:
        if early_config.known_args_namespace.accelerator_real:
            raise pytest.UsageError("--accelerator is virtual, and does not go with --accelerator-real")
        _check_device(name)
        # What diffusers' own test utilities, and suites after their pattern, look at.
        os.environ.setdefault("DIFFUSERS_TEST_DEVICE", name)
        _activate(early_config, name, strict=early_config.known_args_namespace.accelerator_strict)


def _check_device(name: object) -> None:
    from anyaccel.backends.registry import load_registry
    from anyaccel.errors import nearest

    known = [backend.name for backend in load_registry().backends.values() if backend.sheet.can_be_virtual]
    if name not in known:
        raise pytest.UsageError(f"no virtual accelerator is called {name!r}; {nearest(str(name), known)}")


def _activate(config: pytest.Config, name: str, **options: Any) -> None:
    from anyaccel.emulator.activation import virtual
    from anyaccel.emulator.ledger import Ledger

    stack = ExitStack()
    config.stash[_WHOLE] = Ledger()
    config.stash[_ACTIVE] = stack.enter_context(virtual(name, **options))
    config.stash[_STACK] = stack


def pytest_configure(config: pytest.Config) -> None:
    """Tell pytest of the marker."""
    words = "accelerator(*names, strict=False, count=1, memory=None): run the test once a virtual accelerator"
    config.addinivalue_line("markers", words)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let go of the device, and of the second pytest."""
    if _STACK in config.stash:
        config.stash[_STACK].close()
    if _SECOND in config.stash:
        config.stash[_SECOND].close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Once a device that the marker names."""
    marker = metafunc.definition.get_closest_marker(_MARKER)
    if marker is None:
        return
    _check_marker(marker, metafunc.definition.nodeid, real=metafunc.config.getoption("--accelerator-real"))
    if not metafunc.config.getoption("--accelerator"):
        metafunc.fixturenames.append(_NAME)
        metafunc.parametrize(_NAME, marker.args, ids=[str(name) for name in marker.args])


def _check_marker(marker: pytest.Mark, where: str, *, real: bool) -> None:
    if not marker.args:
        raise pytest.UsageError(f'{where}: name a device: @pytest.mark.accelerator("mps")')
    unknown = set(marker.kwargs) - {"strict", "count", "memory"}
    if unknown:
        raise pytest.UsageError(f"{where}: the marker takes strict, count and memory, not {', '.join(sorted(unknown))}")
    for name in marker.args if not real else ():
        _check_device(name)


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> Accelerator:
    """The device of a test with the marker `accelerator`, or of the whole run with `--accelerator`."""
    active = request.config.stash.get(_ACTIVE, None)
    if active is not None:
        return Accelerator(active.name, active.device(), True, active.ledger)
    name = _name_of(request.node)
    if name is None:
        pytest.fail('the fixture accelerator needs @pytest.mark.accelerator("mps"), or pytest --accelerator mps')
    return _open_real(name)


def _open_real(name: str) -> Accelerator:
    from anyaccel.backends.device import open_device
    from anyaccel.emulator.ledger import Ledger
    from anyaccel.errors import DeviceUnavailableError

    try:
        opened = open_device(name)
    except DeviceUnavailableError as error:
        pytest.skip(error.message)
    return Accelerator(opened.sheet.name, opened.torch_device, False, Ledger())


def _name_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get(_NAME)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Run a marked test in a process of its own."""
    config = item.config
    if config.stash.get(_ACTIVE, None) is not None and config.getoption("--accelerator"):
        _pass_over_others(item, config.stash[_ACTIVE].name)
    if _name_of(item) is None or config.getoption("--accelerator-second") or config.getoption("--accelerator-real"):
        return None
    if _SECOND not in config.stash:
        config.stash[_SECOND] = _SecondPytest(config)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for content in config.stash[_SECOND].run(item.nodeid):
        report = config.hook.pytest_report_from_serializable(config=config, data=content)
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _pass_over_others(item: pytest.Item, device: str) -> None:
    """Where the whole suite runs on one device, a test that is marked for others alone does not run there."""
    marker = item.get_closest_marker(_MARKER)
    if marker is not None and device not in marker.args:
        item.add_marker(pytest.mark.skip(reason=f"it is marked for {', '.join(map(str, marker.args))}, not {device}"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin each test with an empty ledger, and as strict as its marker says."""
    active = item.config.stash.get(_ACTIVE, None)
    if active is None or not item.config.getoption("--accelerator"):
        return
    _collect(item.config)
    marker = item.get_closest_marker(_MARKER)
    asked = marker.kwargs.get("strict") if marker is not None else None
    active.strict = item.config.getoption("--accelerator-strict") if asked is None else bool(asked)


def _collect(config: pytest.Config) -> None:
    active = config.stash[_ACTIVE]
    config.stash[_WHOLE].absorb(active.ledger.rows())
    active.ledger.clear()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a worker of pytest-xdist: hand the ledger over to the process that prints it."""
    config = session.config
    if _ACTIVE in config.stash and config.getoption("--accelerator"):
        _collect(config)
        if hasattr(config, "workeroutput"):
            config.workeroutput["anyaccel"] = [asdict(row) for row in config.stash[_WHOLE].rows()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist has ended: take its ledger in."""
    from anyaccel.emulator.ledger import LedgerRow

    rows = getattr(node, "workeroutput", {}).get("anyaccel", [])
    if rows and _WHOLE in node.config.stash:
        node.config.stash[_WHOLE].absorb([LedgerRow(**row) for row in rows])


class _SecondPytest(JsonLineWorker):
    """The other process, as the first one sees it: it is asked for a test and answers with reports."""

    def __init__(self, config: pytest.Config) -> None:
        without_xdist = ["-n0"] if config.pluginmanager.hasplugin("xdist") else []
        words = [*map(str, config.invocation_params.args), *without_xdist, "--accelerator-second"]
        super().__init__("pytest", *words, cwd=config.invocation_params.dir, env={"OMP_NUM_THREADS": "1"})

    def run(self, nodeid: str) -> list[dict[str, Any]]:
        """The reports of one test."""
        try:
            answer: list[dict[str, Any]] = self.request(nodeid)
        except EOFError:
            status = self.close()
            raise pytest.UsageError(
                f"the second pytest, which runs {nodeid}, ended with status {status}; "
                "see what `pytest --collect-only` says with OMP_NUM_THREADS=1. The last of what it printed:\n"
                + self.stderr[-_MOST_TOLD:]
            ) from None
        return answer


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """In the second pytest: run the tests that are asked for, each in a fork."""
    if not session.config.getoption("--accelerator-second"):
        return None
    items = {item.nodeid: item for item in session.items}
    with connecting_to_parent() as (nodeids, answer):
        for nodeid in nodeids:
            answer(_run_forked(items[nodeid]))
    return True


def _run_forked(item: pytest.Item) -> list[dict[str, Any]]:
    from anyaccel.processes.forked_call import call_in_fork

    name = _name_of(item)
    marker = item.get_closest_marker(_MARKER)
    assert name is not None
    assert marker is not None
    options: dict[str, Any] = {"strict": item.config.getoption("--accelerator-strict"), **marker.kwargs}

    def run() -> list[dict[str, Any]]:
        _activate(item.config, name, **options)
        return list(_serialize(item))

    try:
        return call_in_fork(run, name=item.nodeid, timeout_s=_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - whatever ended the process is the test's report
        return [_describe_end(item, error)]


def _serialize(item: pytest.Item) -> Iterator[dict[str, Any]]:
    for report in runtestprotocol(item, log=False, nextitem=None):
        yield item.config.hook.pytest_report_to_serializable(config=item.config, report=report)


def _describe_end(item: pytest.Item, error: Exception) -> dict[str, Any]:
    report = pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=f"the test's process ended before the test did: {type(error).__name__}: {error}",
        when="call",
    )
    content: dict[str, Any] = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
    return content


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What the whole suite asked of the device that it cannot do."""
    active = config.stash.get(_ACTIVE, None)
    if active is None or not config.getoption("--accelerator"):
        return
    terminalreporter.section(f"{active.sheet.title} (virtual)")
    terminalreporter.write_line(str(config.stash[_WHOLE]))
