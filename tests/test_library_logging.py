"""Messages of other libraries: dropped, shown, and restored afterwards."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import warnings

import pytest

from anyaccel.library_logging import (
    FLOAT32_ADVICE,
    drop_log_records,
    drop_log_records_always,
    log_errors_only,
    no_progress_bars,
    no_transformers_bars,
    quiet_libraries,
    silence_process,
)
from anyaccel.processes.forked_call import call_in_fork


def log(logger: str, message: str) -> str:
    """Return the output of one warning."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger(logger).addHandler(handler)
    try:
        logging.getLogger(logger).warning(message)
    finally:
        logging.getLogger(logger).removeHandler(handler)
    return stream.getvalue()


def test_only_records_with_the_text_are_dropped() -> None:
    with drop_log_records("anyaccel.test", "advice"):
        assert log("anyaccel.test", "some advice") == ""
        assert log("anyaccel.test", "a failure") == "a failure\n"
        assert log("anyaccel.other", "some advice") == "some advice\n"
    assert log("anyaccel.test", "some advice") == "some advice\n"
    with drop_log_records("anyaccel.test"):
        assert log("anyaccel.test", "a failure") == ""


def test_permanent_filter_is_added_once() -> None:
    for _ in range(2):
        drop_log_records_always("anyaccel.always", "advice")
    assert log("anyaccel.always", "advice on something") == ""
    assert log("anyaccel.always", "not advice") == "not advice\n"
    assert len(logging.getLogger("anyaccel.always").filters) == 1


def test_silenced_process_logs_no_warnings() -> None:
    def warn() -> str:
        silence_process()
        warnings.warn("anything", UserWarning, stacklevel=1)
        return log("anyaccel.worker", "anything")

    assert call_in_fork(warn) == ""
    log_errors_only("anyaccel.errors")
    assert log("anyaccel.errors", "anything") == ""


def test_transformers_bars_are_restored() -> None:
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.is_progress_bar_enabled()
    with no_transformers_bars():
        assert not transformers_logging.is_progress_bar_enabled()
    assert transformers_logging.is_progress_bar_enabled() == before


def test_commands_show_only_warnings_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    monkeypatch.setattr(sys, "warnoptions", [])
    pipeline = "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion"
    with quiet_libraries():
        assert log(FLOAT32_ADVICE[0], "There are modules in X that should be kept in float32: [].") == ""
        assert log(pipeline, "You have disabled the safety checker for X") == ""
        assert log("diffusers.modular_pipelines.modular_pipeline", "\nError in block: Decode\nTraceback:") == ""
        assert log(pipeline, "The following part of your input was truncated") != ""
        assert log("transformers.models", "`CLIPImageProcessor` requires torchvision") == ""
        warnings.warn("later", FutureWarning, stacklevel=1)
        with pytest.raises(UserWarning, match="a driver"):
            warnings.warn("a driver is too old", UserWarning, stacklevel=1)
        assert os.environ["TRANSFORMERS_VERBOSITY"] == "error"
    assert "TRANSFORMERS_VERBOSITY" not in os.environ
    assert log("transformers.models", "`CLIPImageProcessor` requires torchvision") != ""
    with pytest.raises(FutureWarning):
        warnings.warn("later", FutureWarning, stacklevel=1)


def test_everything_drops_all_warnings() -> None:
    with quiet_libraries(everything=True):
        assert log("diffusers.pipelines", "anything") == ""
        warnings.warn("anything", UserWarning, stacklevel=1)
    assert log("diffusers.pipelines", "anything") != ""


def test_requested_messages_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "warning")
    monkeypatch.setattr(sys, "warnoptions", ["error"])
    with quiet_libraries():
        assert log("transformers.models", "anything") != ""
        with pytest.raises(FutureWarning):
            warnings.warn("later", FutureWarning, stacklevel=1)


def test_tqdm_bars_are_restored(capsys: pytest.CaptureFixture[str]) -> None:
    from tqdm import tqdm

    with no_progress_bars():
        list(tqdm(range(2)))
    assert capsys.readouterr().err == ""
    list(tqdm(range(2)))
    assert "2/2" in capsys.readouterr().err


def test_library_logging_imports_no_library() -> None:
    code = (
        "import sys; from anyaccel.library_logging import quiet_libraries\n"
        "with quiet_libraries(everything=True): pass\n"
        "print({'torch', 'diffusers', 'transformers', 'tqdm'} & set(sys.modules))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "set()\n"
