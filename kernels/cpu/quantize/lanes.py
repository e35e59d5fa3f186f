"""Arithmetic on lanes with Python's operators: an expression of a definition is the same text in a kernel.

A vector holds the same element of each of 16 blocks. Every operation is one IEEE operation, rounded by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

from llvmlite import ir

from quengine.kernels.cpu.ir.vector_ir import F32, I16, I32, Emitter, vec

LANES = 16
LANE_BYTES = 4 * LANES
"""Bytes of a vector of fp32 or int32."""
FLOATS, INTS = vec(F32, LANES), vec(I32, LANES)


class Lanes:
    """A vector of fp32 or int32, or of truth values, at an emitter's position. Numbers beside it are its constants."""

    def __init__(self, e: Emitter, value: ir.Value) -> None:
        self.e, self.value = e, value

    def _of(self, other: Lanes | float) -> ir.Value:
        return other.value if isinstance(other, Lanes) else self.e.const(self.value.type, other)

    def __neg__(self) -> Lanes:
        return Lanes(self.e, self.e.b.fneg(self.value))

    def _arithmetic(self, other: Lanes | float, floats: str, ints: str) -> Lanes:
        name = floats if self.value.type == FLOATS else ints
        return Lanes(self.e, getattr(self.e.b, name)(self.value, self._of(other)))

    def __add__(self, other: Lanes | float) -> Lanes:
        return self._arithmetic(other, "fadd", "add")

    def __sub__(self, other: Lanes | float) -> Lanes:
        return self._arithmetic(other, "fsub", "sub")

    def __rsub__(self, other: float) -> Lanes:
        return Lanes(self.e, self._of(other)) - self

    def __mul__(self, other: Lanes | float) -> Lanes:
        return self._arithmetic(other, "fmul", "mul")

    def __and__(self, other: Lanes | int) -> Lanes:
        return Lanes(self.e, self.e.b.and_(self.value, self._of(other)))

    def __or__(self, other: Lanes | int) -> Lanes:
        return Lanes(self.e, self.e.b.or_(self.value, self._of(other)))

    def __xor__(self, other: Lanes) -> Lanes:
        return Lanes(self.e, self.e.b.xor(self.value, other.value))

    def __lshift__(self, by: int) -> Lanes:
        return Lanes(self.e, self.e.shift_left(self.value, by))

    def __rshift__(self, by: int) -> Lanes:
        """Filling with zeros."""
        return Lanes(self.e, self.e.shift_left(self.value, -by))

    def _compared(self, other: Lanes | float, sign: str) -> Lanes:
        compare = self.e.b.fcmp_ordered if self.value.type == FLOATS else self.e.b.icmp_signed
        return Lanes(self.e, compare(sign, self.value, self._of(other)))

    def __lt__(self, other: Lanes | float) -> Lanes:
        return self._compared(other, "<")

    def __gt__(self, other: Lanes | float) -> Lanes:
        return self._compared(other, ">")

    def __le__(self, other: Lanes | float) -> Lanes:
        return self._compared(other, "<=")

    def __ge__(self, other: Lanes | float) -> Lanes:
        return self._compared(other, ">=")

    def equals(self, other: Lanes | float) -> Lanes:
        return self._compared(other, "==")

    def where(self, mask: Lanes, other: Lanes | float) -> Lanes:
        """This where `mask` is true, elsewhere the other."""
        return Lanes(self.e, self.e.b.select(mask.value, self.value, self._of(other)))

    def minimum(self, other: Lanes | float) -> Lanes:
        return self.where(self < other, other)

    def maximum(self, other: Lanes | float) -> Lanes:
        return self.where(self > other, other)

    def clamp(self, low: float, high: float) -> Lanes:
        return self.maximum(low).minimum(high)

    def abs(self) -> Lanes:
        return self._call("llvm.fabs.v16f32")

    def rounded(self) -> Lanes:
        """The nearest whole number, halves to the even one."""
        return self._call("llvm.rint.v16f32")

    def floor(self) -> Lanes:
        return self._call("llvm.floor.v16f32")

    def root(self) -> Lanes:
        return self._call("llvm.sqrt.v16f32")

    def over(self, other: Lanes) -> Lanes:
        """The quotient, 0 where the other is 0."""
        quotient = Lanes(self.e, self.e.b.fdiv(self.value, other.value))
        return number(self.e, 0.0).where(other.equals(0.0), quotient)

    def by_number(self, other: float) -> Lanes:
        return Lanes(self.e, self.e.b.fdiv(self.value, self._of(other)))

    def inverse(self) -> Lanes:
        """1 / this, 0 where this is 0."""
        return number(self.e, 1.0).over(self)

    def _call(self, name: str) -> Lanes:
        return Lanes(self.e, self.e._call(name, self.value))

    def bits(self) -> Lanes:
        return Lanes(self.e, self.e.b.bitcast(self.value, INTS))

    def to_int(self) -> Lanes:
        """Of whole numbers."""
        return Lanes(self.e, self.e.b.fptosi(self.value, INTS))

    def to_float(self) -> Lanes:
        return Lanes(self.e, self.e.to_float(self.value))

    def modulo(self, divisor: int) -> Lanes:
        """The remainder of integers that are not negative."""
        return Lanes(self.e, self.e.b.urem(self.value, self.e.const(INTS, divisor)))

    def to_half(self) -> Lanes:
        """fp32 rounded to fp16's bits, as int32."""
        return Lanes(self.e, self.e.widen(self.e.float_to_half(self.value), I32, False))

    def from_half(self) -> Lanes:
        """fp32 of fp16's bits in int32."""
        return Lanes(self.e, self.e.half_to_float(self.e.b.trunc(self.value, vec(I16, LANES))))

    def store(self, address: ir.Value, offset: int = 0) -> None:
        self.e.store(self.value, address, offset)


def number(e: Emitter, value: float) -> Lanes:
    """The same fp32 in all lanes."""
    return Lanes(e, e.const(FLOATS, value))


def load(e: Emitter, address: ir.Value, offset: int = 0) -> Lanes:
    return Lanes(e, e.load(FLOATS, address, offset))


def load_ints(e: Emitter, address: ir.Value, offset: int = 0) -> Lanes:
    return Lanes(e, e.load(INTS, address, offset))


def total(values: Sequence[Lanes]) -> Lanes:
    """The sum of a power of two of vectors, in the order of `layout.total`."""
    sums = list(values)
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [one + other for one, other in zip(sums[:half], sums[half:], strict=True)]
    return sums[0]


def least(values: Iterable[Lanes]) -> Lanes:
    return reduce(lambda one, other: one.minimum(other), values)


def largest(values: Iterable[Lanes]) -> Lanes:
    return reduce(lambda one, other: one.maximum(other), values)
