"""`verify`: a sheet held against its device, claim by claim, and tiny pipelines against the CPU.

    verification = verify("cuda", pipelines="all", signed_off_by="A. Name", say=print)
    Path("evidence.json").write_text(verification.to_json())

On a virtual device it says what the emulator enforces, and nothing of hardware; its file says so.
"""

from __future__ import annotations

import datetime
import importlib
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
from anyaccel.backends.evidence import Finding, PipelineFinding, Verification
from anyaccel.checking.fresh_process import can_fork
from anyaccel.errors import UsageError, VirtualDeviceError, nearest
from anyaccel.recipes import recipes
from anyaccel.verification.context import Observation, ProbeContext
from anyaccel.verification.probe_pipeline import CONDITIONS, FEW, TOLERANCE, probe_pipeline, settle_process
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

_ROOT = Path(__file__).parents[3]
_TIMEOUT_S = 7200.0
_MOST_JOBS = 4

Say = Callable[[str], None]
FindingT = TypeVar("FindingT", Finding, PipelineFinding)


def verify(
    device: str,
    *,
    pipelines: Literal["few", "all"] | Sequence[str] = "few",
    quick: bool = False,
    jobs: int | None = None,
    signed_off_by: str = "",
    commit: str | None = None,
    say: Say = lambda line: None,
) -> Verification:
    """Hold a device's sheet against the device: `verify("cuda")`, `verify("virtual:mps")`.

    Pipelines are a handful, all, or recipes by name; `jobs` processes run them side by side. Lines of progress go to
    `say`. The probes run in processes of their own: what one of them kills is a finding too.
    """
    names = _choose_recipes(pipelines)
    if jobs is not None and jobs < 1:
        raise UsageError(f"at least one process must run, not {jobs}", hint="for example jobs=4")
    spec = read_device(device)
    if spec.virtual:
        return _verify_virtual(spec.require_name(), names, jobs or 1, signed_off_by, commit, say)
    bench = make_probe_context(device, quick)
    cores = os.cpu_count() or 1
    jobs = min(jobs or min(_MOST_JOBS, cores), max(1, len(names)))
    with ExitStack() as stack:
        probers = [stack.enter_context(ProbeWorker(device, quick)) for _ in range(jobs)]
        versions = probers[0].read_versions()
        findings = _probe_claims(probers[0], bench.sheet, say)
        found = _probe_pipelines(probers, names, max(1, cores // jobs), say)
    return _conclude(bench, findings, found, versions, signed_off_by, commit)


def _choose_recipes(asked: Literal["few", "all"] | Sequence[str]) -> list[str]:
    known = list(recipes())
    if asked == "all":
        return known
    names = list(FEW) if asked == "few" else [asked] if isinstance(asked, str) else list(asked)
    for name in names:
        if name not in known:
            raise UsageError(f"no recipe is called {name!r}", hint=nearest(name, ["few", "all", *known]))
    return names


def _probe_claims(prober: ProbeWorker, known: Sheet, say: Say) -> tuple[Finding, ...]:
    """One claim after the other in one process, so that nothing else disturbs the clock."""
    findings = []
    for name in find_claims(known):
        try:
            finding = prober.probe_claim(name)
        except ProbeWorkerDiedError as death:
            seen = "" if isinstance(death, ProbeWorkerKilledError) else "error"
            finding = judge(known, name, Observation(seen, death.message))
        findings.append(_told(finding, say))
    return tuple(findings)


def _probe_pipelines(
    probers: list[ProbeWorker], names: list[str], threads: int, say: Say
) -> tuple[PipelineFinding, ...]:
    """Each process takes the next pipeline that nobody has; the findings come in the order of the names."""
    waiting, stopped = iter(names), threading.Event()
    found: dict[str, PipelineFinding] = {}

    def work(prober: ProbeWorker) -> None:
        while not stopped.is_set() and (name := next(waiting, None)) is not None:
            try:
                found[name] = prober.probe_pipeline(name, threads)
            except ProbeWorkerDiedError as death:
                found[name] = _tell_death(name, death.message)
            say(f"{len(found)} of {len(names)}: {describe_pipeline(found[name])}")

    with ThreadPoolExecutor(len(probers)) as pool:  # a thread waits for each process
        working = [pool.submit(work, prober) for prober in probers]
        try:
            for one in working:
                one.result()
        finally:  # an interruption ends the processes, and no new ones are to begin
            stopped.set()
    return tuple(found[name] for name in names)


def _tell_death(name: str, words: str) -> PipelineFinding:
    return PipelineFinding(
        recipe=name,
        pipeline=recipes()[name].pipeline,
        dtype="float32",
        runs=False,
        error=words,
        tolerance=TOLERANCE,
        right=False,
    )


def describe_pipeline(finding: PipelineFinding) -> str:
    """One pipeline in a line."""
    verdict = {True: "right", False: "wrong", None: "not tried"}[finding.right]
    figure = "" if finding.max_difference is None else f", differs by {finding.max_difference:.1e}"
    return f"{finding.recipe}: {verdict}{figure}{': ' if finding.error else ''}{finding.error}"


def _verify_virtual(
    name: str, names: list[str], jobs: int, signed_off_by: str, commit: str | None, say: Say
) -> Verification:
    """The same in forked processes that have the virtual device; `say` is called there."""
    from anyaccel.emulator.run_forked import run_forked

    known = sheet(name)
    if not can_fork():
        raise UsageError(
            "torch computes in several threads here, and a virtual device needs a process that is forked",
            hint=f"set OMP_NUM_THREADS=1 before torch is imported, or run: anyaccel devices virtual:{name} --verify",
        )

    if names:
        importlib.import_module("anyaccel.runtime.pipeline")  # once here, rather than in every process

    def probe_all(accelerator: VirtualAccelerator) -> tuple[Finding, ...]:
        bench = _make_virtual_bench(accelerator)
        return tuple(_told(probe(bench, claim), say) for claim in find_claims(bench.sheet))

    def run_share(share: list[str]) -> list[PipelineFinding]:
        def use(accelerator: VirtualAccelerator) -> list[PipelineFinding]:
            bench = _make_virtual_bench(accelerator)
            return [_told(probe_pipeline(recipe, bench.device), say) for recipe in share]

        try:
            return run_forked(name, use, strict=True, timeout_s=_TIMEOUT_S)
        except VirtualDeviceError as death:
            return [_tell_death(recipe, death.message) for recipe in share]

    findings = run_forked(name, probe_all, strict=True, timeout_s=_TIMEOUT_S)
    with ThreadPoolExecutor(jobs) as pool:
        parts = pool.map(run_share, [share for start in range(jobs) if (share := names[start::jobs])])
    found = {one.recipe: one for part in parts for one in part}
    bench = ProbeContext(known, Driver(known), 0)
    pipelines = tuple(found[one] for one in names)
    return _conclude(bench, findings, pipelines, read_versions(known), signed_off_by, commit, virtual=True)


def _make_virtual_bench(accelerator: VirtualAccelerator) -> ProbeContext:
    settle_process(threads=1)
    opened = open_device(accelerator.name)
    return ProbeContext(accelerator.sheet, opened.driver, 0, accelerator=accelerator)


def _told(finding: FindingT, say: Say) -> FindingT:
    """The finding, told on the way."""
    say(f"{finding.claim}: {finding.verdict}" if isinstance(finding, Finding) else describe_pipeline(finding))
    return finding


def _conclude(
    bench: ProbeContext,
    findings: tuple[Finding, ...],
    pipelines: tuple[PipelineFinding, ...],
    versions: dict[str, str],
    signed_off_by: str,
    commit: str | None,
    virtual: bool = False,
) -> Verification:
    machine = this_machine()
    return Verification(
        device=bench.sheet.name,
        virtual=virtual,
        product=bench.product or "",
        device_name=f"virtual {bench.sheet.title}" if virtual else bench.driver.device_name(bench.index),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        commit=_read_commit() if commit is None else commit,
        versions=versions,
        system=machine.system,
        architecture=machine.architecture,
        signed_off_by=signed_off_by,
        conditions=CONDITIONS,
        findings=findings,
        pipelines=pipelines,
    )


def _read_commit() -> str:
    """The commit of the checkout that this runs from; empty where it is none."""
    if not (_ROOT / ".git").exists():
        return ""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
