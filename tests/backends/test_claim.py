"""When a limit applies."""

import pytest

from anyaccel.backends.claim import Limit


def make_limit(only_on: tuple[str, ...] = (), only_if: tuple[str, ...] = ()) -> Limit:
    return Limit(says="x", source="https://x", evidence="inferred", effect="error", only_on=only_on, only_if=only_if)


@pytest.mark.parametrize(
    ("limit", "product", "versions", "expected"),
    [
        (make_limit(), None, {}, True),
        (make_limit(only_on=("gaudi1",)), "gaudi1", {}, True),
        (make_limit(only_on=("gaudi1",)), "gaudi2", {}, False),
        (make_limit(only_on=("gaudi1",)), None, {}, None),
        (make_limit(only_if=("macos<14",)), None, {"macos": "13.6"}, True),
        (make_limit(only_if=("macos<14",)), None, {"macos": "14.0"}, False),
        (make_limit(only_if=("macos<14",)), None, {"torch": "2.13.0"}, None),
        (
            make_limit(only_if=("torch<2.8",)),
            None,
            {"torch": "2.8.0.dev1+cpu"},
            False,
        ),  # a nightly build counts as its release
        (make_limit(only_if=("torch<2.8", "macos<14")), None, {"torch": "2.9"}, False),  # one unmet condition is enough
        (make_limit(only_on=("m1",), only_if=("torch<2.8",)), "m1", {}, None),
    ],
)
def test_limit_applies_by_product_and_version(
    limit: Limit, product: str | None, versions: dict[str, str], expected: bool | None
) -> None:
    assert limit.applies(product, versions) is expected
