"""SIGTERM as an exception while a block runs."""

import os
import signal
import threading

import pytest

from anyaccel.processes.signals import TerminatedError, raising_on_sigterm


def terminate_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_raises_once_and_the_handler_is_restored() -> None:
    before, cleaned = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with raising_on_sigterm():
            try:
                terminate_self()
            finally:
                terminate_self()  # a second SIGTERM during the cleanup
                cleaned.append(True)

    with pytest.raises(TerminatedError):
        work()
    assert cleaned == [True]
    assert signal.getsignal(signal.SIGTERM) == before


def test_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with raising_on_sigterm():
            terminate_self()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_no_handler_is_changed_outside_the_main_thread() -> None:
    handlers: list[object] = []

    def work() -> None:
        with raising_on_sigterm():
            handlers.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [before]
    with pytest.raises(TerminatedError), raising_on_sigterm():
        terminate_self()
