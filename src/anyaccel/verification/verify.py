"""Verification of the claims on a device sheet, and comparison of pipeline outputs with the CPU's.

    verification = verify("cuda", pipelines="all", signed_off_by="A. Name", on_message=print)
    Path("evidence.json").write_text(verification.to_json())

On a virtual device, this verifies the emulator rather than hardware, and the result has
`virtual=True`.
"""

from __future__ import annotations

import datetime
import importlib
import itertools
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from anyaccel.backends.device import open_device, read_device, sheet, this_machine
from anyaccel.backends.driver import Driver
from anyaccel.backends.evidence_files import Finding, PipelineFinding, Verification
from anyaccel.checking.fresh_process import can_fork
from anyaccel.errors import UsageError, VirtualDeviceError, nearest
from anyaccel.recipes import recipes
from anyaccel.verification.context import Observation, ProbeContext
from anyaccel.verification.partial_findings import PartialFindings
from anyaccel.verification.probe_pipeline import CONDITIONS, FEW, MODES, TOLERANCE, configure_process, probe_pipeline
from anyaccel.verification.probe_worker import (
    ProbeWorker,
    ProbeWorkerDiedError,
    ProbeWorkerKilledError,
    make_probe_context,
    read_versions,
)
from anyaccel.verification.probes import find_claims, judge, probe

if TYPE_CHECKING:
    from anyaccel.backends.sheet import Sheet
    from anyaccel.emulator.accelerator import VirtualAccelerator

__all__ = ["describe_pipeline", "verify"]

# Root of the checkout, if this is one.
_ROOT = Path(__file__).parents[3]
_TIMEOUT_S = 7200.0
_MAX_JOBS = 4

OnMessage = Callable[[str], None]
FindingT = TypeVar("FindingT", Finding, PipelineFinding)


def verify(
    device: str,
    *,
    pipelines: Literal["few", "all"] | Sequence[str] = "few",
    quick: bool = False,
    compiled: bool = False,
    jobs: int | None = None,
    signed_off_by: str = "",
    commit: str | None = None,
    partial_file: Path | None = None,
    on_message: OnMessage = lambda line: None,
) -> Verification:
    """Verify the claims on a device's sheet: `verify("cuda")`, `verify("virtual:mps")`.

    `pipelines` is `few`, `all` or a sequence of recipe names; `jobs` processes run them concurrently. With
    `compiled`, they also run compiled, with captured graphs and with `speed="fast"`. Progress messages are
    passed to `on_message`. Probes run in separate processes, and a crash in one of them is reported as a
    finding. Findings are added to `partial_file` as soon as they are made, and a later run with the same
    file and the same versions continues there.
    """
    names, modes = _choose_recipes(pipelines), MODES if compiled else MODES[:1]
    commit = _read_commit() if commit is None else commit
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs must be at least 1, not {jobs}", hint="for example jobs=4")
    spec = read_device(device)
    if spec.virtual:
        name = spec.require_name()
        return _verify_virtual(name, names, modes, jobs or 1, signed_off_by, commit, on_message)
    context = make_probe_context(device, quick)
    # More workers than pipelines would idle; each one loads the driver and uses device memory.
    cores = os.cpu_count() or 1
    # Compilation runs on the CPU, so every core can have a process of its own.
    jobs = min(jobs or (cores if compiled else min(_MAX_JOBS, cores)), max(1, len(names)))
    threads = max(1, cores // jobs)
    with ExitStack() as stack:
        workers = [stack.enter_context(ProbeWorker(device, quick, threads)) for _ in range(jobs)]
        versions = workers[0].read_versions()
        key = {"device": context.driver.device_name(context.index), "commit": commit, "versions": versions}
        partial = PartialFindings(partial_file, key, on_message)
        findings = partial.claims or _probe_claims(workers[0], context.sheet, on_message)
        partial.add_claims(findings)
        pipeline_findings = _probe_pipelines(workers, names, modes, threads, partial, on_message)
    return _make_verification(context, findings, pipeline_findings, versions, signed_off_by, commit)


def _choose_recipes(requested: Literal["few", "all"] | Sequence[str]) -> list[str]:
    available = list(recipes())
    if requested == "all":
        return available
    names = list(FEW) if requested == "few" else [requested] if isinstance(requested, str) else list(requested)
    for name in names:
        if name not in available:
            raise UsageError(f"unknown recipe {name!r}", hint=nearest(name, ["few", "all", *available]))
    return names


def _probe_claims(worker: ProbeWorker, sheet: Sheet, on_message: OnMessage) -> tuple[Finding, ...]:
    """Probe the claims one after another in one process, because some probes measure time."""
    findings = []
    for name in find_claims(sheet):
        try:
            finding = worker.probe_claim(name)
        except ProbeWorkerDiedError as error:
            # A crash is an error of the device; a kill from outside is not.
            seen = "" if isinstance(error, ProbeWorkerKilledError) else "error"
            finding = judge(sheet, name, Observation(seen, error.message))
        findings.append(_report(finding, on_message))
    return tuple(findings)


def _probe_pipelines(
    workers: list[ProbeWorker],
    names: list[str],
    modes: Sequence[str],
    threads: int,
    partial: PartialFindings,
    on_message: OnMessage,
) -> tuple[PipelineFinding, ...]:
    """Distribute the recipes among the workers, and return the findings in the order of `names`."""
    findings = {name: known for name in names if (known := partial.find(name, modes))}
    # A list iterator is safe to share between threads: `next` holds the GIL.
    queue, stopped = iter([name for name in names if name not in findings]), threading.Event()

    def work(worker: ProbeWorker) -> None:
        while not stopped.is_set() and (name := next(queue, None)) is not None:
            try:
                findings[name] = worker.probe_pipeline(name, threads, modes)
            except ProbeWorkerDiedError as error:
                findings[name] = _make_crash_findings(name, modes, error.message)
            partial.add(findings[name])
            for finding in findings[name]:
                on_message(f"{len(findings)} of {len(names)}: {describe_pipeline(finding)}")

    with ThreadPoolExecutor(len(workers)) as pool:  # each thread waits for one process
        running = [pool.submit(work, worker) for worker in workers]
        try:
            for thread in running:
                thread.result()
        finally:  # after an interrupt, the threads must not start new processes
            stopped.set()
    return tuple(finding for name in names for finding in findings[name])


def _make_crash_findings(name: str, modes: Sequence[str], message: str) -> list[PipelineFinding]:
    return [
        PipelineFinding(
            recipe=name,
            pipeline=recipes()[name].pipeline,
            dtype="float32",
            runs=False,
            error=message,
            tolerance=TOLERANCE,
            right=False,
            mode=mode,
        )
        for mode in modes
    ]


def describe_pipeline(finding: PipelineFinding) -> str:
    """Return one line of text that describes the result for one pipeline."""
    verdict = {True: "right", False: "wrong", None: "not tried"}[finding.right]
    figure = "" if finding.max_difference is None else f", differs by {finding.max_difference:.1e}"
    mode = "" if finding.mode == MODES[0] else f" ({finding.mode})"
    details = "; ".join(filter(None, [finding.error, finding.fallback]))
    return f"{finding.recipe}{mode}: {verdict}{figure}{': ' if details else ''}{details}"


def _verify_virtual(
    name: str,
    names: list[str],
    modes: Sequence[str],
    jobs: int,
    signed_off_by: str,
    commit: str,
    on_message: OnMessage,
) -> Verification:
    """Verify a virtual device in forked processes.

    `on_message` is called in the forked processes.
    """
    from anyaccel.emulator.run_forked import run_forked

    device_sheet = sheet(name)
    if not can_fork():
        raise UsageError(
            f"virtual:{name} must be verified in a forked process, but torch has already started several threads in "
            "the current process",
            hint=f"set OMP_NUM_THREADS=1 before importing torch, or run `anyaccel devices virtual:{name} --verify`",
        )

    if names:
        importlib.import_module("anyaccel.runtime.pipeline")  # before the forks, so that they do not import it again

    def probe_all(accelerator: VirtualAccelerator) -> tuple[Finding, ...]:
        context = _make_virtual_context(accelerator)
        return tuple(_report(probe(context, claim), on_message) for claim in find_claims(context.sheet))

    def run_share(share: list[str]) -> list[PipelineFinding]:
        def use(accelerator: VirtualAccelerator) -> list[PipelineFinding]:
            context = _make_virtual_context(accelerator)
            probed = [probe_pipeline(recipe, context.device, modes) for recipe in share]
            return [_report(finding, on_message) for findings in probed for finding in findings]

        try:
            # Strict, because a probe must see the error that the device would raise.
            return run_forked(name, use, strict=True, timeout_s=_TIMEOUT_S)
        except VirtualDeviceError as error:
            return [finding for recipe in share for finding in _make_crash_findings(recipe, modes, error.message)]

    findings = run_forked(name, probe_all, strict=True, timeout_s=_TIMEOUT_S)
    with ThreadPoolExecutor(jobs) as pool:
        shares = pool.map(run_share, [share for start in range(jobs) if (share := names[start::jobs])])
    by_recipe: dict[str, list[PipelineFinding]] = {}
    for finding in itertools.chain.from_iterable(shares):
        by_recipe.setdefault(finding.recipe, []).append(finding)
    context = ProbeContext(device_sheet, Driver(device_sheet), 0)
    pipelines = tuple(finding for recipe in names for finding in by_recipe[recipe])
    return _make_verification(
        context, findings, pipelines, read_versions(device_sheet), signed_off_by, commit, virtual=True
    )


def _make_virtual_context(accelerator: VirtualAccelerator) -> ProbeContext:
    configure_process(threads=1)
    opened = open_device(accelerator.name)
    return ProbeContext(accelerator.sheet, opened.driver, 0, accelerator=accelerator)


def _report(finding: FindingT, on_message: OnMessage) -> FindingT:
    """Pass a finding to `on_message` as one line of text, and return the finding."""
    on_message(f"{finding.claim}: {finding.verdict}" if isinstance(finding, Finding) else describe_pipeline(finding))
    return finding


def _make_verification(
    context: ProbeContext,
    findings: tuple[Finding, ...],
    pipelines: tuple[PipelineFinding, ...],
    versions: dict[str, str],
    signed_off_by: str,
    commit: str,
    virtual: bool = False,
) -> Verification:
    machine = this_machine()
    return Verification(
        device=context.sheet.name,
        virtual=virtual,
        product=context.product or "",
        device_name=f"virtual {context.sheet.title}" if virtual else context.driver.device_name(context.index),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        commit=commit,
        versions=versions,
        system=machine.system,
        architecture=machine.architecture,
        signed_off_by=signed_off_by,
        conditions=CONDITIONS,
        findings=findings,
        pipelines=pipelines,
    )


def _read_commit() -> str:
    """Return the commit of the source checkout, or an empty string for an installed package."""
    if not (_ROOT / ".git").exists():
        return ""
    # `describe --dirty` may rewrite the index. Without optional locks it cannot block a concurrent git command.
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
