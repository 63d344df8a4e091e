"""Errors: one tree, a hint each, and they cross processes."""

import pickle

import pytest

from anyaccel import errors
from anyaccel.errors import AnyaccelError, UsageError, first_line, summarize_error

KINDS = [getattr(errors, name) for name in errors.__all__ if isinstance(getattr(errors, name), type)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_shows_its_hint_and_crosses_processes(kind: type[AnyaccelError]) -> None:
    error = kind("it broke", hint="mend it")
    assert str(error) == "it broke\nhint: mend it"
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (copy.message, copy.hint) == ("it broke", "mend it")
    assert kind.exit_status in {1, 2, 3}


@pytest.mark.parametrize("kind", KINDS)
def test_the_docstring_of_the_module_has_the_whole_tree(kind: type[AnyaccelError]) -> None:
    assert errors.__doc__ is not None
    assert kind.__name__ in errors.__doc__


def test_the_nearest_name_comes_first() -> None:
    assert errors.nearest("nueron", ["cpu", "neuron"]) == "did you mean neuron? known: cpu, neuron"
    assert errors.nearest("zzz", ["cpu", "neuron"]) == "known: cpu, neuron"


def test_of_very_many_names_those_alike_are_told() -> None:
    known = [f"recipe-{number}" for number in range(100)] + ["flux"]
    told = errors.nearest("fluxx", known)
    assert told.startswith("did you mean flux? known: flux, ")
    assert told.endswith("and 89 more")


@pytest.mark.parametrize(
    ("error", "line", "summary"),
    [
        (ValueError("one\ntwo"), "one", "ValueError: one"),
        (ValueError("\n  one"), "one", "ValueError: one"),
        (AssertionError(), "AssertionError", "AssertionError"),
        (UsageError("wrong", hint="this way"), "wrong", "UsageError: wrong"),
    ],
)
def test_an_error_in_one_line(error: Exception, line: str, summary: str) -> None:
    assert first_line(error) == line
    assert summarize_error(error) == summary
