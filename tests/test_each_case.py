"""Cases in one test: all of them are checked, and each that fails is named."""

import inspect

import pytest

from tests.each_case import each_case


def refuses(value: int) -> None:
    if value > 2:
        raise ValueError(f"{value} is too large")


def test_every_case_that_fails_is_named_by_its_values() -> None:
    seen = []

    @each_case(("value", "kept"), [(1, "a"), (3, "b"), (5, "c"), (2, "d")])
    def of_values(value: int, kept: str, folder: str) -> None:
        seen.append((value, kept, folder))
        with pytest.raises(ValueError, match="too large"):
            refuses(value)

    assert list(inspect.signature(of_values).parameters) == ["folder"]
    with pytest.raises(AssertionError) as caught:
        of_values(folder="here")
    assert seen == [(1, "a", "here"), (3, "b", "here"), (5, "c", "here"), (2, "d", "here")]
    first, *lines = str(caught.value).splitlines()
    assert first == "2 of 4 cases:"
    assert [line.partition(": ")[0] for line in lines] == ["value=1, kept='a'", "value=2, kept='d'"]
    assert all("DID NOT RAISE" in line for line in lines)


@each_case("value", [0, 1, 2])
def test_a_single_name_has_a_value_a_case(value: int) -> None:
    refuses(value)


def test_no_case_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no cases"):
        each_case("value", [])
