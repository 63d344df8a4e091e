"""pytest plugin that runs tests on virtual or real accelerators.

A test with the `accelerator` marker runs once per listed device, each time in its own process. With
`--accelerator`, the whole test suite runs on one device.

    @pytest.mark.accelerator("mps", "neuron")
    def test_it_runs(accelerator):
        make_pipeline().to(accelerator.device)(…)
        accelerator.ledger.assert_clean("error")

    pytest --accelerator hpu        run any suite, without changes, on a virtual Gaudi
    pytest --accelerator-real       run the marked tests on real devices; skip missing devices

A process can have only one virtual accelerator. Marked tests run in forks of a second pytest
process, which collects the same tests but runs none of them itself. A fork of the first process
could deadlock on torch's threads: https://github.com/pytorch/pytorch/issues/17199
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

    from anyaccel.emulator.limit_ledger import Ledger

__all__ = ["Accelerator"]

# Fixture name through which a marked test is parametrized.
_NAME = "_accelerator_name"
_MARKER = "accelerator"
_ACTIVE = pytest.StashKey[Any]()
# Ledger of the whole run; the ledger of the accelerator is cleared before each test.
_TOTAL = pytest.StashKey["Ledger"]()
_STACK = pytest.StashKey[ExitStack]()
_SECOND = pytest.StashKey["_SecondPytest"]()
_TIMEOUT_S = 3600.0
# Characters of the output of a dead process to show.
_MAX_OUTPUT = 4000


@dataclass(frozen=True)
class Accelerator:
    """Value of the `accelerator` fixture: the device, and a ledger of the limits that the test hit."""

    name: str
    device: torch.device
    virtual: bool
    ledger: Ledger
    """Limits that the test hit. Empty on real hardware, which raises by itself."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's `--accelerator` options."""
    group = parser.getgroup("anyaccel", "virtual and real accelerators")
    group.addoption("--accelerator", metavar="NAME", help="run the whole suite with this virtual accelerator")
    group.addoption("--accelerator-strict", action="store_true", help="raise an error where the real device would")
    group.addoption("--accelerator-real", action="store_true", help="run the marked tests on real devices")
    group.addoption("--accelerator-second", action="store_true", help="internal: run the marked tests in this process")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Activate the virtual device from `--accelerator` before pytest imports the test suite."""
    name = early_config.known_args_namespace.accelerator
    if name:
        if early_config.known_args_namespace.accelerator_real:
            raise pytest.UsageError(
                "--accelerator and --accelerator-real cannot be combined: --accelerator selects a virtual device"
            )
        _check_device(name)
        # diffusers.utils.testing_utils and suites modeled on it read this variable.
        os.environ.setdefault("DIFFUSERS_TEST_DEVICE", name)
        _activate(early_config, name, strict=early_config.known_args_namespace.accelerator_strict)


def _check_device(name: object) -> None:
    from anyaccel.backends.registry import load_registry
    from anyaccel.errors import nearest

    names = [backend.name for backend in load_registry().backends.values() if backend.sheet.can_be_virtual]
    if name not in names:
        raise pytest.UsageError(f"unknown virtual accelerator {name!r}; {nearest(str(name), names)}")


def _activate(config: pytest.Config, name: str, **options: Any) -> None:
    from anyaccel.emulator.activation import virtual
    from anyaccel.emulator.limit_ledger import Ledger

    stack = ExitStack()
    config.stash[_TOTAL] = Ledger()
    config.stash[_ACTIVE] = stack.enter_context(virtual(name, **options))
    config.stash[_STACK] = stack


def pytest_configure(config: pytest.Config) -> None:
    """Register the `accelerator` marker."""
    marker = "accelerator(*names, strict=False, count=1, memory=None): run the test once per virtual accelerator"
    config.addinivalue_line("markers", marker)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Deactivate the virtual device and stop the second pytest process."""
    if _STACK in config.stash:
        config.stash[_STACK].close()
    if _SECOND in config.stash:
        config.stash[_SECOND].close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test with the devices listed in its `accelerator` marker."""
    marker = metafunc.definition.get_closest_marker(_MARKER)
    if marker is None:
        return
    _check_marker(marker, metafunc.definition.nodeid, real=metafunc.config.getoption("--accelerator-real"))
    # With --accelerator, all tests run once, on that device.
    if not metafunc.config.getoption("--accelerator"):
        metafunc.fixturenames.append(_NAME)
        metafunc.parametrize(_NAME, marker.args, ids=[str(name) for name in marker.args])


def _check_marker(marker: pytest.Mark, nodeid: str, *, real: bool) -> None:
    if not marker.args:
        raise pytest.UsageError(
            f'{nodeid}: the accelerator marker requires a device name, for example @pytest.mark.accelerator("mps")'
        )
    unknown = set(marker.kwargs) - {"strict", "count", "memory"}
    if unknown:
        raise pytest.UsageError(
            f"{nodeid}: the accelerator marker does not accept {', '.join(sorted(unknown))}; "
            "supported: strict, count, memory"
        )
    # With --accelerator-real, a device that cannot be virtual, such as cuda, is valid too.
    for name in marker.args if not real else ():
        _check_device(name)


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> Accelerator:
    """Return the device from the test's `accelerator` marker or from the `--accelerator` option."""
    active = request.config.stash.get(_ACTIVE, None)
    if active is not None:
        return Accelerator(active.name, active.device(), True, active.ledger)
    name = _device_name(request.node)
    if name is None:
        pytest.fail('the accelerator fixture requires @pytest.mark.accelerator("mps") or pytest --accelerator mps')
    return _open_real(name)


def _open_real(name: str) -> Accelerator:
    from anyaccel.backends.device import open_device
    from anyaccel.emulator.limit_ledger import Ledger
    from anyaccel.errors import DeviceUnavailableError

    try:
        opened = open_device(name)
    except DeviceUnavailableError as error:
        pytest.skip(error.message)
    return Accelerator(opened.sheet.name, opened.torch_device, False, Ledger())


def _device_name(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get(_NAME)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Run a test with the `accelerator` marker in its own process, and report its results here."""
    config = item.config
    if config.stash.get(_ACTIVE, None) is not None and config.getoption("--accelerator"):
        _skip_for_other_devices(item, config.stash[_ACTIVE].name)
    if _device_name(item) is None or config.getoption("--accelerator-second") or config.getoption("--accelerator-real"):
        return None
    if _SECOND not in config.stash:  # started for the first marked test, and reused
        config.stash[_SECOND] = _SecondPytest(config)
    # These hooks make the test appear in the report of this process as if it had run here.
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for content in config.stash[_SECOND].run(item.nodeid):
        report = config.hook.pytest_report_from_serializable(config=config, data=content)
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _skip_for_other_devices(item: pytest.Item, device: str) -> None:
    """Skip a test that is marked only for other devices."""
    marker = item.get_closest_marker(_MARKER)
    if marker is not None and device not in marker.args:
        item.add_marker(pytest.mark.skip(reason=f"marked for {', '.join(map(str, marker.args))}, not {device}"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Clear the ledger of device limits before each test, and apply the marker's `strict` argument."""
    active = item.config.stash.get(_ACTIVE, None)
    if active is None or not item.config.getoption("--accelerator"):
        return
    _collect(item.config)
    marker = item.get_closest_marker(_MARKER)
    strict = marker.kwargs.get("strict") if marker is not None else None
    active.strict = item.config.getoption("--accelerator-strict") if strict is None else bool(strict)


def _collect(config: pytest.Config) -> None:
    """Move the rows from the last test's ledger into the ledger for the whole run."""
    active = config.stash[_ACTIVE]
    config.stash[_TOTAL].merge(active.ledger.rows())
    active.ledger.clear()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send a pytest-xdist worker's ledger to the controller, which prints it."""
    config = session.config
    if _ACTIVE in config.stash and config.getoption("--accelerator"):
        _collect(config)
        if hasattr(config, "workeroutput"):  # only in xdist workers; its values must be plain data
            config.workeroutput["anyaccel"] = [asdict(row) for row in config.stash[_TOTAL].rows()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Merge the ledger from a finished pytest-xdist worker into the controller's ledger."""
    from anyaccel.emulator.limit_ledger import LedgerRow

    rows = getattr(node, "workeroutput", {}).get("anyaccel", [])
    if rows and _TOTAL in node.config.stash:
        node.config.stash[_TOTAL].merge([LedgerRow(**row) for row in rows])


class _SecondPytest(JsonLineWorker):
    """Client for the second pytest process, which receives node IDs and returns test reports."""

    def __init__(self, config: pytest.Config) -> None:
        # The second process must fork the tests itself, so it runs without xdist workers.
        no_xdist = ["-n0"] if config.pluginmanager.hasplugin("xdist") else []
        arguments = [*map(str, config.invocation_params.args), *no_xdist, "--accelerator-second"]
        super().__init__("pytest", *arguments, cwd=config.invocation_params.dir, env={"OMP_NUM_THREADS": "1"})

    def run(self, nodeid: str) -> list[dict[str, Any]]:
        """Run one test in the second pytest process and return its serialized reports."""
        try:
            answer: list[dict[str, Any]] = self.request(nodeid)
        except EOFError:
            status = self.close()
            raise pytest.UsageError(
                f"the second pytest process exited with status {status} before it ran {nodeid}; "
                "to reproduce the problem, run `OMP_NUM_THREADS=1 pytest --collect-only`. Last output of the process:\n"
                + self.stderr[-_MAX_OUTPUT:]
            ) from None
        return answer


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """In the second pytest process, run each requested test in a forked process."""
    if not session.config.getoption("--accelerator-second"):
        return None
    items = {item.nodeid: item for item in session.items}
    with connecting_to_parent() as (nodeids, answer):
        for nodeid in nodeids:
            answer(_run_forked(items[nodeid]))
    return True


def _run_forked(item: pytest.Item) -> list[dict[str, Any]]:
    from anyaccel.processes.forked_call import call_in_fork

    name = _device_name(item)
    marker = item.get_closest_marker(_MARKER)
    assert name is not None
    assert marker is not None
    # The marker overrides the command line.
    options: dict[str, Any] = {"strict": item.config.getoption("--accelerator-strict"), **marker.kwargs}

    def run() -> list[dict[str, Any]]:
        _activate(item.config, name, **options)
        return list(_serialize(item))

    try:
        return call_in_fork(run, name=item.nodeid, timeout_s=_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - a crash of the process is reported as a failure of the test
        return [_make_crash_report(item, error)]


def _serialize(item: pytest.Item) -> Iterator[dict[str, Any]]:
    # `log=False`: the reports go to the first process, which logs them.
    for report in runtestprotocol(item, log=False, nextitem=None):
        yield item.config.hook.pytest_report_to_serializable(config=item.config, report=report)


def _make_crash_report(item: pytest.Item, error: Exception) -> dict[str, Any]:
    report = pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=f"the test process died: {type(error).__name__}: {error}",
        when="call",
    )
    content: dict[str, Any] = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
    return content


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the device limits that the suite hit."""
    active = config.stash.get(_ACTIVE, None)
    if active is None or not config.getoption("--accelerator"):
        return
    terminalreporter.section(f"{active.sheet.title} (virtual)")
    terminalreporter.write_line(str(config.stash[_TOTAL]))
