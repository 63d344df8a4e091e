"""The end that another process asks for: what is under way clears up, and is not disturbed at it."""

import os
import signal

import pytest
import typer

from anyaccel.cli.interruption import clearing_up


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
