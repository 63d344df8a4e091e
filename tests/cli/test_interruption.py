"""The end that another process asks for: what is under way clears up, and is not disturbed at it."""

import os
import signal
import threading

import pytest
import typer

from anyaccel.cli.interruption import EndedError, clearing_up, raising_at_the_end


def end_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_end_is_said_and_has_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    before, cleared = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with clearing_up() as display:
            display.begin("working")
            try:
                end_this_process()
            finally:
                end_this_process()  # a second time, while it clears up
                cleared.append(True)

    with pytest.raises(typer.Exit) as ended:
        work()
    assert ended.value.exit_code == 143
    assert cleared == [True]
    assert "ended" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_process_that_ignores_the_signal_goes_on_ignoring_it() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with raising_at_the_end():
            end_this_process()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_no_handler_is_changed() -> None:
    seen: list[object] = []

    def work() -> None:
        with raising_at_the_end():
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
    with pytest.raises(EndedError), raising_at_the_end():
        end_this_process()
