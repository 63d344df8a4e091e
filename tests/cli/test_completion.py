"""Shell completion, as the shell requests it: through environment variables."""

import pytest

from anyaccel.cli.main import main
from tests.conftest import run_in_fork


def complete(line: str) -> list[str]:
    """Return the completions of the last word of a line in bash."""
    variables = {"_ANYACCEL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    done = run_in_fork(main, ["anyaccel"], variables)
    assert done.returncode == 0, done
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("anyaccel expl", {"explain"}),
        ("anyaccel explain embedded --fr", {"--frames"}),
        ("anyaccel explain embedded -d rtx40", {"rtx4090", "rtx4090-laptop", "rtx4060ti-16gb"}),
        ("anyaccel explain embedded --device arc-b", {"arc-b570", "arc-b580"}),
        ("anyaccel devices ga", {"gaudi", "gaudi2"}),
        ("anyaccel batch x --device virtual:n", {"virtual:neuron", "virtual:npu"}),
        ("anyaccel explain embedded --weights n", {"nf4"}),
        ("anyaccel explain embedded --weights gguf", {"gguf:Q8_0", "gguf:Q4_0"}),
        ("anyaccel explain embedded --dtype b", {"bfloat16"}),
        ("anyaccel explain embedded --memory l", {"layer"}),
        ("anyaccel serve --speed d", {"draft"}),
        ("anyaccel generate x --device virtual:n", {"virtual:neuron", "virtual:npu"}),
        ("anyaccel generate x --weights gguf", {"gguf:Q8_0", "gguf:Q4_0"}),
    ],
)
def test_devices_formats_and_options_are_completed(line: str, some: set[str]) -> None:
    completed = complete(line)
    assert some <= set(completed)
    assert all(word.startswith(line.rpartition(" ")[2]) for word in completed)


def test_nothing_is_completed_for_an_unknown_device() -> None:
    assert complete("anyaccel explain embedded -d xyz") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_is_printed(shell: str) -> None:
    done = run_in_fork(main, ["anyaccel"], {"_ANYACCEL_COMPLETE": f"source_{shell}"})
    assert "_ANYACCEL_COMPLETE" in done.stdout
