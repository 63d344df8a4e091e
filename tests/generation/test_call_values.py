"""Values of `--set NAME=VALUE`: literals of the types that a pipeline's call accepts."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from anyaccel.errors import UsageError
from anyaccel.generation.call_values import convert_settings, parse_settings


def call(
    scale: float = 7.5,
    count: int | None = None,
    name: str | None = None,
    values: list[float] | tuple[float, ...] = (),
    flag: bool = False,
    options: dict[str, Any] | None = None,
    text: str | list[str] = "",
    unknown: Any = None,
    untyped: "str" = "",
    callback: Callable[[int], None] | None = None,
) -> None: ...


PARAMETERS = inspect.signature(call).parameters


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("scale=1", 1.0),
        ("scale = 0.5", 0.5),
        ("count=3", 3),
        ("count=none", None),
        ("name=red fox", "red fox"),
        ("name='quoted'", "quoted"),
        ("name=123", "123"),
        ("name=a=b", "a=b"),
        ("values=[1, 0.5]", [1, 0.5]),
        ("values=(1, 2)", (1, 2)),
        ("flag=true", True),
        ("flag=False", False),
        ('options={"a": 1}', {"a": 1}),
        ("text=hello", "hello"),
        ('text=["a", "b"]', ["a", "b"]),
        ("unknown=[1]", [1]),
        ("untyped=x y", "x y"),
        ("scale=-1e-3", -0.001),
    ],
)
def test_values_have_the_type_of_the_argument(setting: str, value: Any) -> None:
    (converted,) = convert_settings(parse_settings([setting]), PARAMETERS, "Pipeline").values()
    assert (converted, type(converted)) == (value, type(value))


@pytest.mark.parametrize(
    ("setting", "message", "hint"),
    [
        ("scale", "does not have the form NAME=VALUE", "--set guidance_rescale=0.7"),
        ("=3", "does not have the form NAME=VALUE", "--set"),
        ("scale=much", "scale must be float, not 'much'", "--set"),
        ("count=1.5", "count must be int, not '1.5'", "--set"),
        ("flag=1", "flag must be bool, not '1'", "--set"),
        ("scal=1", "Pipeline does not accept the argument scal", "did you mean scale?"),
        ("callback=print", "cannot be set on the command line", "Python"),
    ],
)
def test_other_values_are_rejected(setting: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        convert_settings(parse_settings([setting]), PARAMETERS, "Pipeline")
    assert hint in caught.value.hint


def test_an_argument_can_be_set_once() -> None:
    with pytest.raises(UsageError, match="sets scale twice"):
        parse_settings(["scale=1", "scale=2"])


def test_literals_without_a_signature() -> None:
    assert convert_settings({"a": "1", "b": "x", "c": "[1]"}, None, "") == {"a": 1, "b": "x", "c": [1]}
