"""Configuration file: default values, precedence and errors."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from anyaccel.cli.main import app
from anyaccel.errors import UsageError
from tests.conftest import RunCli


def write(folder: Path, text: str) -> str:
    path = folder / "config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_precedence_is_option_environment_file_default(tmp_path: Path) -> None:
    file = write(tmp_path, '[explain]\ndevice = "from-file"\nbatch = 0\n')

    def find_error(*arguments: str, **environment: str) -> str:
        variables = {"ANYACCEL_CONFIG": file, "ANYACCEL_DEVICE": "", **environment}
        error = CliRunner().invoke(app, ["explain", "embedded", *arguments], env=variables).exception
        assert isinstance(error, UsageError)
        return error.message

    assert "the batch size must be an integer from 1 to 1024, not 0" in find_error()
    assert find_error("-n", "1") == "unknown device 'from-file'"
    assert find_error("-n", "1", ANYACCEL_DEVICE="from-env") == "unknown device 'from-env' (from ANYACCEL_DEVICE)"
    assert find_error("-n", "1", "-d", "option", ANYACCEL_DEVICE="from-env") == "unknown device 'option'"
    write(tmp_path, "")
    assert find_error("-n", "-1") == "the batch size must be an integer from 1 to 1024, not -1"


def test_file_in_the_home_or_xdg_folder_is_read(tmp_path: Path, run_cli_forked: RunCli) -> None:
    write(tmp_path / "xdg" / "anyaccel", "[cache.list]\njson = true\n")
    write(tmp_path / ".config" / "anyaccel", "[devices]\njson = true\n")
    default = {"ANYACCEL_CONFIG": "", "XDG_CONFIG_HOME": ""}
    assert json.loads(run_cli_forked("cache", "list", **default | {"XDG_CONFIG_HOME": str(tmp_path / "xdg")}).stdout)
    assert json.loads(run_cli_forked("devices", **default, HOME=str(tmp_path)).stdout)
    done = run_cli_forked("devices", **default, HOME=str(tmp_path / "nobody"))
    assert done.returncode == 0
    assert done.stdout.startswith("available")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ('[generate]\nmodle = "x"', "unknown option 'modle' in [generate]", "did you mean model?"),
        ("[generat]\nsteps = 2", "unknown command 'generat'", "did you mean generate?"),
        ("[cache.prun]\nolder = 2", "unknown command 'cache.prun'", "did you mean prune?"),
        ("steps = 2", "unknown key outside of a command's table 'steps'", "known: batch"),
        ("generate = 2", "generate must be a table", "[generate]"),
        (
            '[generate]\nsteps = "many"',
            "'many' is not a valid value of steps in [generate]",
            "anyaccel generate --help",
        ),
        ("[generate]\nsteps = 2.5", "2.5 is not a valid value of steps", "--help"),
        ("[generate]\ngrid = 1", "1 is not a valid value of grid in [generate]: use true or false", "--help"),
        ("[generate]\nsize = true", "True is not a valid value of size", "--help"),
        ("[generate\nsize = true", "is not a valid TOML file", "steps = 20"),
        ("[generate]\nhelp = true", "unknown option 'help'", "known: "),
    ],
)
def test_errors_name_the_file_and_a_similar_key(
    text: str, message: str, hint: str, tmp_path: Path, run_cli_forked: RunCli
) -> None:
    file = write(tmp_path, text)
    done = run_cli_forked("devices", ANYACCEL_CONFIG=file)
    assert done.returncode == 2
    assert done.stdout == ""
    error, hint_line = done.stderr.split("\nhint: ")
    assert message in error
    assert file in error
    assert hint in hint_line


def test_missing_file_is_an_error_only_if_it_was_named(tmp_path: Path, run_cli_forked: RunCli) -> None:
    done = run_cli_forked("devices", ANYACCEL_CONFIG=str(tmp_path / "none.toml"))
    assert done.returncode == 2
    assert "does not exist" in done.stderr


def test_help_mentions_the_file(run_cli_forked: RunCli) -> None:
    text = run_cli_forked("--help").stdout
    assert "~/.config/anyaccel/config.toml" in text
    assert "ANYACCEL_CONFIG" in text
