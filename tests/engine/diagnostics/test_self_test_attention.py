"""The checks of norms and attention pass a right backend and fail wrong ones, each in the lines it concerns."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from quengine.diagnostics.selftest import self_test_attention
from quengine.diagnostics.selftest.self_test_attention import OPERATIONS, PAGED, check_operation
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.reference import ReferenceBackend


def failed(backend: Any, operations: tuple[str, ...] = OPERATIONS) -> set[tuple[str, str]]:
    return {
        (check.subject, check.test)
        for name in operations
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

    def attention(self, batch: Any, qkv: Any, spec: Any, layer: Any) -> Any:
        result = super().attention(self.before(batch) or batch, qkv, spec, layer)
        self.after(layer, int(batch.positions[-1]) + 1)
        return result


ATTENTIONS = {name for name in OPERATIONS if name.startswith("attention")}


def test_the_definition_and_the_cpu_pass() -> None:
    assert failed(ReferenceBackend(keep=True)) == set()
    assert failed(CpuBackend(1)) == set()


def test_there_is_a_check_of_every_cache_type_and_of_norms() -> None:
    assert {name.split()[0] for name in OPERATIONS} == {"RMSNorm", "LayerNorm", "attention"}
    assert {name.split()[1] for name in ATTENTIONS} == {"f16", "q8_0", "q4_0"}


def test_a_position_off_by_one_fails_in_attention_and_its_cache() -> None:
    def shifted(batch: ForwardBatch) -> ForwardBatch:
        return replace(batch, positions=batch.positions + (batch.phase == "decode"))

    found = failed(Spoiled(shifted))
    assert found == {(name, test) for name in ATTENTIONS for test in ("1 token", "1 token: cache")}


def test_a_cache_that_is_written_wrong_under_a_right_result_fails() -> None:
    def spoil(layer: Any, end: int) -> None:
        layer.v[end - 1, 0, 0] += 1

    found = failed(Spoiled(after=spoil))
    assert {test for _, test in found} == {"prompt: cache", "1 token: cache"}
    assert {name for name, _ in found} >= {name for name in ATTENTIONS if "f16" in name}


def test_a_norm_without_its_weights_fails() -> None:
    class Unweighted(ReferenceBackend):
        def norm_linear(self, batch: Any, x: Any, norm: Any, *rest: Any) -> Any:
            return super().norm_linear(batch, x, replace(norm, weight=norm.weight * 0 + 1), *rest)

    norms = {name for name in OPERATIONS if "Norm" in name}
    assert failed(Unweighted(keep=True)) == {(name, test) for name in norms for test in ("1 token", "prompt")}


def test_a_paged_cache_is_checked_with_every_cache_type_and_the_definition_passes() -> None:
    assert {name.split()[1] for name in PAGED} == {name.split()[1] for name in ATTENTIONS}
    assert failed(ReferenceBackend(keep=True), PAGED) == set()
    tests = [check.test for name in PAGED[:1] for check in check_operation(ReferenceBackend(keep=True), name)]
    assert tests == [f"{test}{part}" for test in ("prompt", "1 token", "batch") for part in ("", ": cache")]


def test_a_block_table_read_out_of_order_fails_everywhere() -> None:
    def sorts(batch: ForwardBatch) -> ForwardBatch:
        return replace(batch, block_tables=batch.block_tables.sort().values)

    tests = ("prompt: cache", "1 token", "1 token: cache", "batch", "batch: cache")
    assert failed(Spoiled(sorts), PAGED) >= {(name, test) for name in PAGED for test in tests}


def test_a_batch_whose_rows_have_each_others_tables_fails_in_the_batch_alone() -> None:
    def turns(batch: ForwardBatch) -> ForwardBatch:
        return replace(batch, block_tables=batch.block_tables.roll(1, 1)) if len(batch) == 3 else batch

    assert failed(Spoiled(turns), PAGED) == {
        (name, test) for name in PAGED for test in ("batch", "batch: cache")
    }


def test_the_cuda_backend_passes_over_a_paged_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the interpreter where there is no GPU, with shorter prompts."""
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        monkeypatch.setattr(self_test_attention, "PROMPTS", (4, 32, 1))
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)
    backend = cuda_backend.CudaBackend(torch.device("cuda" if on_gpu else "cpu"))
    assert failed(backend, PAGED if on_gpu else PAGED[:1]) == set()


@pytest.mark.parametrize("name", ["RMSNorm 576", "attention f16 64", "paged q8_0 128"])
def test_an_operation_that_cannot_run_is_one_failure_with_its_reason(name: str) -> None:
    class Refusing(ReferenceBackend):
        def norm_linear(self, *_: Any) -> Any:
            raise RuntimeError("out of resource: shared memory")

        attention = norm_linear

    (check,) = check_operation(Refusing(keep=True), name)
    assert not check.passed
    assert check.note == "RuntimeError: out of resource: shared memory"
