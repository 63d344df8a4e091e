"""SIGTERM as an exception while a block runs."""

import os
import signal
import threading

import pytest

from anyaccel.processes.signals import TerminatedError, raising_on_sigterm


def end_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_it_is_raised_once_and_the_earlier_handler_comes_back() -> None:
    before, cleaned = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with raising_on_sigterm():
            try:
                end_this_process()
            finally:
                end_this_process()  # a second time, during the cleanup
                cleaned.append(True)

    with pytest.raises(TerminatedError):
        work()
    assert cleaned == [True]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_process_that_ignores_the_signal_goes_on_ignoring_it() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with raising_on_sigterm():
            end_this_process()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_no_handler_is_changed() -> None:
    seen: list[object] = []

    def work() -> None:
        with raising_on_sigterm():
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
    with pytest.raises(TerminatedError), raising_on_sigterm():
        end_this_process()
