"""The checks of norms and attention pass a right backend and fail wrong ones, each in the lines it concerns."""

from collections.abc import Callable
from typing import Any

import pytest

from quengine.kernels.cpu_backend import CpuBackend
from quengine.kernels.reference import ReferenceBackend
from quengine.self_test_attention import OPERATIONS, check_operation


def failed(backend: Any) -> set[tuple[str, str]]:
    return {
        (check.subject, check.test)
        for name in OPERATIONS
        for check in check_operation(backend, name)
        if not check.passed
    }


class Spoiled(ReferenceBackend):
    """Does something to what attention is given, or to what it leaves in the cache."""

    def __init__(
        self, before: Callable[..., Any] = lambda *_: None, after: Callable[..., Any] = lambda *_: None
    ):
        super().__init__(keep=True)
        self.before, self.after = before, after

    def attention(self, qkv: Any, spec: Any, layer: Any, start: Any) -> Any:
        changed = self.before(qkv, spec, layer, start)
        result = super().attention(*(changed or (qkv, spec, layer, start)))
        self.after(layer, start, start + len(qkv))
        return result


ATTENTIONS = {name for name in OPERATIONS if name.startswith("attention")}


def test_the_definition_and_the_cpu_pass() -> None:
    assert failed(ReferenceBackend(keep=True)) == set()
    assert failed(CpuBackend(1)) == set()


def test_there_is_a_check_of_every_cache_type_and_of_norms() -> None:
    assert {name.split()[0] for name in OPERATIONS} == {"RMSNorm", "attention"}
    assert {name.split()[1] for name in ATTENTIONS} == {"f16", "q8_0"}


def test_a_position_off_by_one_fails_in_attention_and_its_cache() -> None:
    def shifted(qkv: Any, spec: Any, layer: Any, start: int) -> tuple[Any, ...]:
        return qkv, spec, layer, start + (len(qkv) == 1)

    found = failed(Spoiled(shifted))
    assert found == {(name, test) for name in ATTENTIONS for test in ("1 token", "1 token: cache")}


def test_a_cache_that_is_written_wrong_under_a_right_result_fails() -> None:
    def spoil(layer: Any, _start: int, end: int) -> None:
        layer.v[end - 1, 0, 0] += 1

    found = failed(Spoiled(after=spoil))
    assert {test for _, test in found} == {"prompt: cache", "1 token: cache"}
    assert {name for name, _ in found} >= {name for name in ATTENTIONS if "f16" in name}


def test_a_norm_without_its_weights_fails() -> None:
    class Unweighted(ReferenceBackend):
        def norm_linear(self, x: Any, norm: Any, *rest: Any) -> Any:
            return super().norm_linear(x, norm * 0 + 1, *rest)

    norms = {name for name in OPERATIONS if name.startswith("RMSNorm")}
    assert failed(Unweighted(keep=True)) == {(name, test) for name in norms for test in ("1 token", "prompt")}


@pytest.mark.parametrize("name", ["RMSNorm 576", "attention f16 64"])
def test_an_operation_that_cannot_run_is_one_failure_with_its_reason(name: str) -> None:
    class Refusing(ReferenceBackend):
        def norm_linear(self, *_: Any) -> Any:
            raise RuntimeError("out of resource: shared memory")

        attention = norm_linear

    (check,) = check_operation(Refusing(keep=True), name)
    assert not check.passed
    assert check.note == "RuntimeError: out of resource: shared memory"
