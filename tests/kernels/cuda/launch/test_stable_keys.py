"""A kernel has the same name in Triton's cache whatever its process launched before."""

from collections.abc import Iterator

import pytest
import triton.language as tl
from triton.runtime.jit import JITFunction

from quengine.kernels.cuda.launch.triton_changes import use_stable_keys

_FACTOR = tl.constexpr(3)


@JITFunction
def _scaled(value):
    return value * _FACTOR


@JITFunction
def _twice_scaled(value):
    return _scaled(value) + _scaled(value)


@JITFunction
def _kernel(ptr):
    tl.store(ptr, _twice_scaled(tl.load(ptr)))


FUNCTIONS = _scaled, _twice_scaled, _kernel


@pytest.fixture(autouse=True)
def unnamed() -> Iterator[None]:
    reset()
    yield
    reset()


def reset() -> None:
    for function in FUNCTIONS:
        function.hash, function.used_global_vals = None, {}


@pytest.mark.parametrize("first", [(), (_scaled,), (_twice_scaled,), (_scaled, _twice_scaled)])
def test_a_key_does_not_follow_from_the_functions_that_have_one(first: tuple[object, ...]) -> None:
    use_stable_keys()
    alone = _kernel.cache_key
    reset()
    for function in first:
        _ = function.cache_key  # type: ignore[attr-defined]
    assert _kernel.cache_key == alone


def test_a_key_holds_the_constants_of_the_functions_that_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stable_keys()
    before = _kernel.cache_key
    reset()
    monkeypatch.setitem(globals(), "_FACTOR", tl.constexpr(4))
    assert _kernel.cache_key != before
