"""Instructions as numpy computes them in tests have the bits of their equivalents in plain Triton."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from quengine.kernels.cuda.gemm import mma
from tests.kernels.cuda.interpreter_instructions import instructions

THREADS = 64
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of Triton's interpreter")


@triton.jit
def _loaded(words, first: tl.constexpr, count: tl.constexpr):
    at = tl.arange(0, 64)
    values = ()
    for i in tl.static_range(count):
        values = values + (tl.load(words + (first + i) * 64 + at),)  # noqa: RUF005 (of Triton's Python)
    return values


@triton.jit
def _stored(out, first: tl.constexpr, values, count: tl.constexpr):
    at = tl.arange(0, 64)
    for i in tl.static_range(count):
        tl.store(out + (first + i) * 64 + at, values[i])


@triton.jit
def _products_kernel(words, floats, out, sums, A_SIGNED: tl.constexpr, B_SIGNED: tl.constexpr):
    a = _loaded(words, 0, 4)
    b = _loaded(words, 4, 2)
    d = _loaded(words, 6, 4)
    _stored(out, 0, mma.mma_int8(a, b[0], b[1], d, A_SIGNED, B_SIGNED, False), 4)
    f = _loaded(floats, 0, 4)
    h = _loaded(words, 10, 6)
    _stored(sums, 0, mma.mma_half((h[0], h[1], h[2], h[3]), h[4], h[5], f, False), 4)
    last = _loaded(words, 16, 4)
    x = h[4].to(tl.int64) | (h[5].to(tl.int64) << 32)
    y = h[5].to(tl.int64) ^ (h[0].to(tl.int64) << 32)
    _stored(sums, 4, mma.mma_half_step((h[0], h[1], h[2], h[3]), last, x, y, f, False), 4)


@triton.jit
def _words_kernel(words, floats, out, SIGNED: tl.constexpr):
    w = _loaded(words, 0, 3)
    f = _loaded(floats, 0, 2)
    _stored(out, 0, mma.scale_bytes(w[0], f[0], f[1], SIGNED, False), 2)
    _stored(out, 2, mma.scale_bytes_once(w[0], f[0] * 16777216.0, f[1], SIGNED, False), 2)
    one = tl.load(words)
    _stored(
        out, 4, (mma.byte_permute(w[0], w[1], w[2], False), mma.byte_permute(one, one + 1, w[2], False)), 2
    )


def halves(words: torch.Tensor, rows: slice) -> None:
    words[rows] = torch.randn(*words[rows].shape, 2).half().view(torch.int32)[..., 0]


def both_ways(monkeypatch: pytest.MonkeyPatch, run: Callable[[], list[torch.Tensor]]) -> None:
    known: dict[Any, Any] = interpreter.InterpretedFunction.rewritten_fn
    in_numpy = instructions()
    for fn, numpy in in_numpy.items():
        monkeypatch.setitem(known, fn, numpy)
    ours = run()
    for fn in in_numpy:
        monkeypatch.delitem(known, fn)
    for numpy_result, triton_result in zip(ours, run(), strict=True):
        assert numpy_result.any() and torch.equal(numpy_result, triton_result)


@pytest.mark.parametrize(("a_signed", "b_signed"), [(True, True), (False, True)])
def test_products(monkeypatch: pytest.MonkeyPatch, a_signed: bool, b_signed: bool) -> None:
    torch.manual_seed(0)
    words = torch.randint(-(2**31), 2**31 - 1, (20, THREADS), dtype=torch.int32)
    halves(words, slice(10, 20))
    floats = torch.randn(4, THREADS)

    def run() -> list[torch.Tensor]:
        out, sums = torch.zeros(4, THREADS, dtype=torch.int32), torch.zeros(8, THREADS)
        _products_kernel[(1,)](words, floats, out, sums, a_signed, b_signed)
        return [out, sums.view(torch.int32)]

    both_ways(monkeypatch, run)


@pytest.mark.parametrize("signed", [True, False])
def test_words(monkeypatch: pytest.MonkeyPatch, signed: bool) -> None:
    torch.manual_seed(1)
    words = torch.randint(-(2**31), 2**31 - 1, (3, THREADS), dtype=torch.int32)
    floats = torch.randn(2, THREADS)

    def run() -> list[torch.Tensor]:
        out = torch.zeros(6, THREADS, dtype=torch.int32)
        _words_kernel[(1,)](words, floats, out, signed)
        return [out]

    both_ways(monkeypatch, run)
