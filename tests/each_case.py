"""Many small cases as one test: pytest takes some ms for each test, which is most of the time of a value that is only
read or refused.

`each_case` takes what `pytest.mark.parametrize` takes. All cases are checked whatever fails, and each that fails is
named by its values.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pytest


def each_case(
    names: str | tuple[str, ...], cases: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test with these parameters becomes one test of all `cases`, which share its fixtures.

    cases: a value each for a single name, else a sequence with a value for each of `names`.
    """
    several = not isinstance(names, str)
    every = [dict(zip(names, case, strict=True)) if several else {names: case} for case in cases]
    assert every, "there are no cases"

    def of_all(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        fixtures = [each for name, each in signature.parameters.items() if name not in every[0]]

        @wraps(test)
        def run(**given: Any) -> None:
            wrong: list[tuple[str, BaseException]] = []
            for case in every:
                try:
                    test(**given, **case)
                except (Exception, pytest.fail.Exception) as error:
                    values = ", ".join(f"{name}={value!r:.200}" for name, value in case.items())
                    wrong.append((values, error))
            if wrong:
                lines = "\n".join(f"{values}: {type(error).__name__}: {error}" for values, error in wrong)
                raise AssertionError(f"{len(wrong)} of {len(every)} cases:\n{lines}") from wrong[0][1]

        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return run

    return of_all
