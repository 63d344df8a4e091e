"""Exceptions: hints, pickling, and suggestions of similar names."""

import pickle

import pytest

from anyaccel import errors
from anyaccel.errors import AnyaccelError, UsageError, first_line, summarize_error

KINDS = [getattr(errors, name) for name in errors.__all__ if isinstance(getattr(errors, name), type)]


@pytest.mark.parametrize("kind", KINDS)
def test_error_shows_its_hint_and_can_be_pickled(kind: type[AnyaccelError]) -> None:
    error = kind("it broke", hint="fix it")
    assert str(error) == "it broke\nhint: fix it"
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (copy.message, copy.hint) == ("it broke", "fix it")
    assert kind.exit_status in {1, 2, 3}


@pytest.mark.parametrize("kind", KINDS)
def test_module_docstring_lists_every_class(kind: type[AnyaccelError]) -> None:
    assert errors.__doc__ is not None
    assert kind.__name__ in errors.__doc__


def test_nearest_name_is_suggested() -> None:
    assert errors.nearest("nueron", ["cpu", "neuron"]) == "did you mean neuron? known: cpu, neuron"
    assert errors.nearest("zzz", ["cpu", "neuron"]) == "known: cpu, neuron"


def test_names_with_the_same_words_are_suggested() -> None:
    known = ["timesteps", "prompt", "num_inference_steps"]
    for name in ("steps", "num_steps", "inference-steps"):
        assert errors.find_similar(name, known) == "num_inference_steps"
    assert errors.find_similar("timestep", known) == "timesteps"


def test_long_lists_are_shortened_to_similar_names() -> None:
    known = [f"recipe-{index}" for index in range(100)] + ["flux"]
    hint = errors.nearest("fluxx", known)
    assert hint.startswith("did you mean flux? known: flux, ")
    assert hint.endswith("and 89 more")


@pytest.mark.parametrize(
    ("error", "line", "summary"),
    [
        (ValueError("one\ntwo"), "one", "ValueError: one"),
        (ValueError("\n  one"), "one", "ValueError: one"),
        (AssertionError(), "AssertionError", "AssertionError"),
        (UsageError("wrong", hint="do this"), "wrong", "UsageError: wrong"),
    ],
)
def test_first_line_and_summary(error: Exception, line: str, summary: str) -> None:
    assert first_line(error) == line
    assert summarize_error(error) == summary
