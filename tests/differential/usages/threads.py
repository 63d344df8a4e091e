"""Usages with threads and processes."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import torch

from tests.differential.session import CUDA_VARIANTS, Session, usage

GROUP = "threads and processes"


@usage(GROUP)
def two_threads(session: Session) -> Any:
    """Two pipelines in two threads."""
    pipes = [session.make() for _ in range(2)]
    results: dict[str, Any] = {}

    def work(index: int) -> None:
        results[str(index)] = session.run(pipes[index], generator=torch.Generator().manual_seed(index))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(sorted(results.items()))


@usage(GROUP)
def worker_thread(session: Session) -> Any:
    """A pipeline built in one thread and called in two others, one after the other."""
    pipe = session.make()
    results: list[Any] = []
    for seed in range(2):
        call = {"generator": torch.Generator().manual_seed(seed)}
        thread = threading.Thread(target=lambda call=call: results.append(session.run(pipe, **call)))  # type: ignore[misc]
        thread.start()
        thread.join()
    return {str(index): result for index, result in enumerate(results)}


@usage(GROUP)
def same_pipeline_in_two_threads(session: Session) -> Any:
    """Two threads that share a pipeline and a lock."""
    pipe, lock = session.make(), threading.Lock()
    results: dict[str, Any] = {}

    def work(seed: int) -> None:
        for index in range(2):
            with lock:
                source = torch.Generator().manual_seed(10 * seed + index)
                results[f"{seed} {index}"] = session.run(pipe, generator=source)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(sorted(results.items()))


NO_FORK = dict.fromkeys(("mps", "neuron", *CUDA_VARIANTS), "a process that uses the device cannot be forked")


@usage(GROUP, skip=NO_FORK)
def forked_process(session: Session) -> Any:
    """A call in a forked process after a call in the parent."""
    pipe = session.make()
    first = session.run(pipe)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "child.npy")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork in a process with threads
            child = os.fork()
        if child == 0:
            try:
                numpy.save(path, session.run(pipe))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        return {"parent": first, "child": numpy.load(path), "again": session.run(pipe)}


@usage(GROUP, skip={**NO_FORK, "served": "the requests run in threads of the server"})
def fork_during_a_call(session: Session) -> Any:
    """A call in a process that is forked while another thread runs a call."""
    pipe, started, forked = session.make(), threading.Event(), threading.Event()

    def wait(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        started.set()
        assert forked.wait(30)
        return values

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as executor:
        path = Path(folder, "child.npy")
        call = executor.submit(session.run, pipe, callback_on_step_end=wait)
        assert started.wait(30)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            signal.alarm(30)  # ends the process if the call waits forever
            try:
                numpy.save(path, session.run(pipe))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        forked.set()
        return {"parent": call.result(), "child": numpy.load(path)}
