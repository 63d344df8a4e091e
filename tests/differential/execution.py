"""Parallel execution of usages in forked or spawned processes."""

from __future__ import annotations

import json
import queue
import selectors
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from anyaccel.processes.forked_call import call_in_fork, forking_threads
from anyaccel.recipes import recipes
from tests.differential.observation import observe_here
from tests.differential.results import Result, run_usage
from tests.differential.session import READY, USAGES, VARIANTS

__all__ = ["MARK", "can_fork", "import_libraries", "prepare_forks", "run_usages"]

MARK = "differential-result "
_CHUNK = 4
"""Usages per spawned process: importing torch and diffusers takes as long as some usages."""


def import_libraries() -> None:
    """Import every module that usages need, so that forked processes share the imports."""
    import diffusers

    import tests.differential.usages  # noqa: F401 - registers the usages

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for recipe in recipes().values():
            getattr(diffusers, recipe.pipeline, None)


def prepare_forks() -> None:
    """Build pipelines and run a usage, so that forked processes share them and everything that is imported lazily."""
    import_libraries()
    variant = VARIANTS["cpu"]
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        for name in ("default_call", "lora_saved_and_loaded"):
            observe_here(USAGES[name], variant, placed=True)
        READY["stable-diffusion"] = [recipes()["stable-diffusion"].make() for _ in range(2)]


def can_fork(variants: list[str]) -> bool:
    """Return whether forks of this process can use the variants' devices.

    A fork cannot use CUDA if this process has initialized it.
    """
    devices = {VARIANTS[name].stock_device for name in variants} - {"cpu"}
    try:
        for device in devices:
            call_in_fork(lambda device=device: torch.zeros(1, device=device).item(), timeout_s=120)  # type: ignore[misc]
    except Exception as error:  # noqa: BLE001 - spawned processes are the alternative
        print(f"forks cannot use {device}: {error}", file=sys.stderr)
        return False
    return True


def run_usages(todo: dict[str, list[str]], processes: int, *, spawn: bool) -> Iterator[Result]:
    """Run usages with their variants, and yield each result as soon as it is known."""
    results: queue.Queue[Result | None] = queue.Queue()
    if spawn:
        thread = threading.Thread(target=_run_spawned, args=(todo, processes, results), daemon=True)
    else:
        thread = threading.Thread(target=_run_forked, args=(todo, processes, results), daemon=True)
    thread.start()
    while (result := results.get()) is not None:
        yield result
    thread.join()


def _run_forked(todo: dict[str, list[str]], processes: int, results: queue.Queue[Result | None]) -> None:
    def run(name: str) -> None:
        for result in run_usage(name, todo[name]):
            results.put(result)

    try:
        with forking_threads(processes) as pool:
            list(pool.map(run, todo))
    finally:
        results.put(None)


def _run_spawned(todo: dict[str, list[str]], processes: int, results: queue.Queue[Result | None]) -> None:
    names = list(todo)
    chunks = [names[start : start + _CHUNK] for start in range(0, len(names), _CHUNK)]

    def run(chunk: list[str]) -> None:
        while chunk:
            chunk = _run_chunk(chunk, todo, results)

    try:
        with ThreadPoolExecutor(processes) as pool:
            list(pool.map(run, chunks))
    finally:
        results.put(None)


def _run_chunk(chunk: list[str], todo: dict[str, list[str]], results: queue.Queue[Result | None]) -> list[str]:
    """Run usages in one spawned process; return those after the one at which it died or hung."""
    variants = list(dict.fromkeys(variant for name in chunk for variant in todo[name]))
    command = [sys.executable, "-m", "tests.differential", "--worker", "--variant", *variants, "--usages", *chunk]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    limit_s = 2 * sum(VARIANTS[name].timeout_s for name in variants) + 60
    missing = {(name, variant) for name in chunk for variant in todo[name]}
    error = ""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while missing:
            if not selector.select(limit_s):
                error = f"no result within {limit_s:.0f} s"
                break
            line = process.stdout.readline()
            if not line:
                break
            if line.startswith(MARK):
                result = Result(**json.loads(line.removeprefix(MARK)))
                if (result.usage, result.variant) in missing:
                    missing.discard((result.usage, result.variant))
                    results.put(result)
    process.kill()
    stderr = process.communicate()[1].strip().splitlines()
    failed = [name for name in chunk if any(usage == name for usage, _ in missing)]
    if not failed:
        return []
    text = error or f"the process exited: {stderr[-1] if stderr else 'no message'}"
    for variant in todo[failed[0]]:
        if (failed[0], variant) in missing:
            results.put(Result(usage=failed[0], variant=variant, status="different", text=text[:300]))
    return failed[1:]
