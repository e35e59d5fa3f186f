"""Short names for the LLVM vector instructions that the CPU kernels are written in.

All but `add_byte_dots` and `add_pair_products` are target-independent: LLVM lowers 8-lane fp32 and 16-lane int16
vectors to AVX-512, AVX2, SSE or NEON alike. Nothing is marked `fast` or `contract`, and `fma` is written out where a
multiply-add rounds once, so a kernel gives the same bits whatever it is inlined into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()


def vec(lane: ir.Type, lanes: int) -> ir.VectorType:
    return ir.VectorType(lane, lanes)


class Emitter:
    """Appends instructions at a builder's position. Addresses are i64 values; loads and stores are unaligned."""

    def __init__(self, builder: ir.IRBuilder, has_half: bool, byte_dot_lanes: int = 0) -> None:
        self.b = builder
        self.byte_dot_lanes = byte_dot_lanes  # as Tile.byte_dot_lanes
        self._has_half = has_half

    def _call(self, name: str, *args: ir.Value) -> ir.Value:
        """Calls an LLVM intrinsic by name; its arguments and result have one type."""
        declared = self.b.module.globals.get(name)
        if declared is None:
            signature = ir.FunctionType(args[0].type, [args[0].type] * len(args))
            declared = ir.Function(self.b.module, signature, name)
        return self.b.call(declared, list(args))

    # ---- constants, memory -------------------------------------------------------------------------------
    def const(self, type_: ir.Type, value: Any) -> ir.Constant:
        """A scalar, or a vector with the value in all lanes, or with a list of lane values."""
        if isinstance(type_, ir.VectorType) and not isinstance(value, list):
            value = [value] * type_.count
        return ir.Constant(type_, value)

    def i64(self, value: int) -> ir.Constant:
        return ir.Constant(I64, value)

    def at(self, address: ir.Value, offset: int | ir.Value) -> ir.Value:
        """address + offset, in bytes."""
        if isinstance(offset, int):
            if offset == 0:
                return address
            offset = self.i64(offset)
        return self.b.add(address, offset)

    def load(self, type_: ir.Type, address: ir.Value, offset: int = 0) -> ir.Value:
        pointer = self.b.inttoptr(self.at(address, offset), type_.as_pointer())
        value = self.b.load(pointer)
        value.align = 1
        return value

    def store(self, value: ir.Value, address: ir.Value, offset: int = 0) -> None:
        pointer = self.b.inttoptr(self.at(address, offset), value.type.as_pointer())
        self.b.store(value, pointer).align = 1

    def unknown(self, v: ir.Value) -> ir.Value:
        """A scalar whose origin is hidden from LLVM: what lies at such an address is loaded again."""
        kept = ir.InlineAsm(ir.FunctionType(v.type, [v.type]), "", "=r,0")
        return self.b.call(kept, [v])

    def prefetch(self, address: ir.Value, write: bool = False, level: int = 1) -> None:
        """Prefetches the cache line at an address, which need not be mapped, into the L1 cache or, with `level` 2, only
        into the L2; to `write`, from other cores' caches."""
        name = "llvm.prefetch.p0"
        declared = self.b.module.globals.get(name)
        if declared is None:
            arguments = [I8.as_pointer(), I32, I32, I32]
            declared = ir.Function(self.b.module, ir.FunctionType(ir.VoidType(), arguments), name)
        purpose, keep, data = (ir.Constant(I32, value) for value in (int(write), 4 - level, 1))
        self.b.call(declared, [self.b.inttoptr(address, I8.as_pointer()), purpose, keep, data])

    # ---- lanes -------------------------------------------------------------------------------------------
    def pick(self, v: ir.Value, lanes: Sequence[int], other: ir.Value | None = None) -> ir.Value:
        """A shuffle: the given lanes of v; lane numbers past its end select from `other`."""
        mask = ir.Constant(vec(I32, len(lanes)), list(lanes))
        return self.b.shuffle_vector(v, other or ir.Constant(v.type, ir.Undefined), mask)

    def lane(self, v: ir.Value, i: int) -> ir.Value:
        return self.b.extract_element(v, ir.Constant(I32, i))

    def splat(self, scalar: ir.Value, lanes: int) -> ir.Value:
        undefined = ir.Constant(vec(scalar.type, lanes), ir.Undefined)
        first = self.b.insert_element(undefined, scalar, ir.Constant(I32, 0))
        return self.pick(first, [0] * lanes)

    def splat_lane(self, v: ir.Value, i: int, lanes: int) -> ir.Value:
        return self.pick(v, [i] * lanes)

    def halves(self, v: ir.Value) -> tuple[ir.Value, ir.Value]:
        half = v.type.count // 2
        return self.pick(v, range(half)), self.pick(v, range(half, 2 * half))

    def join(self, low: ir.Value, high: ir.Value) -> ir.Value:
        return self.pick(low, range(2 * low.type.count), high)

    def evens_odds(self, v: ir.Value) -> tuple[ir.Value, ir.Value]:
        count = v.type.count
        return self.pick(v, range(0, count, 2)), self.pick(v, range(1, count, 2))

    def interleave(self, evens: ir.Value, odds: ir.Value) -> ir.Value:
        count = evens.type.count
        return self.pick(evens, [lane for i in range(count) for lane in (i, count + i)], odds)

    # ---- integers ----------------------------------------------------------------------------------------
    def and_(self, v: ir.Value, mask: int) -> ir.Value:
        return self.b.and_(v, self.const(v.type, mask))

    def shift_left(self, v: ir.Value, by: int) -> ir.Value:
        """Shifts left by `by` bits, or right, filling with zeros, if negative."""
        if by == 0:
            return v
        amount = self.const(v.type, abs(by))
        return self.b.shl(v, amount) if by > 0 else self.b.lshr(v, amount)

    def widen(self, v: ir.Value, lane: ir.Type, signed: bool) -> ir.Value:
        type_ = vec(lane, v.type.count)
        return self.b.sext(v, type_) if signed else self.b.zext(v, type_)

    def pair_products(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """x[2i]*y[2i] + x[2i+1]*y[2i+1] of int16 lanes: exact int32, one instruction on x86 (pmaddwd)."""
        product = self.b.mul(self.widen(x, I32, True), self.widen(y, I32, True))
        even, odd = self.evens_odds(product)
        return self.b.add(even, odd)

    def add_byte_dots(self, total: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
        """total[i] + sum of x[k]*y[k], k = 4i .. 4i+3: uint8 x, int8 y, int32 total (vpdpbusd).

        Requires `byte_dot_lanes` > 0.
        """
        count = total.type.count
        if count > self.byte_dot_lanes:
            parts = zip(*(self.halves(v) for v in (total, x, y)), strict=True)
            return self.join(*[self.add_byte_dots(*part) for part in parts])
        x, y = (self.b.bitcast(v, total.type) for v in (x, y))
        return self._call(f"llvm.x86.avx512.vpdpbusd.{32 * count}", total, x, y)

    def add_pair_products(self, total: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
        """total[i] + x[2i]*y[2i] + x[2i+1]*y[2i+1] of int16, in int32 lanes: vpdpwssd, or pmaddwd and an addition."""
        count = total.type.count
        if count <= self.byte_dot_lanes:
            return self._call(f"llvm.x86.avx512.vpdpwssd.{32 * count}", total, x, y)
        words = vec(I16, 2 * count)
        return self.b.add(total, self.pair_products(self.b.bitcast(x, words), self.b.bitcast(y, words)))

    # ---- floats ------------------------------------------------------------------------------------------
    def to_float(self, v: ir.Value) -> ir.Value:
        """Signed integers to fp32."""
        count = v.type.count if isinstance(v.type, ir.VectorType) else 0
        return self.b.sitofp(v, vec(F32, count) if count else F32)

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """x*y + z, rounded once."""
        vector = isinstance(x.type, ir.VectorType)
        return self._call(f"llvm.fma.v{x.type.count}f32" if vector else "llvm.fma.f32", x, y, z)

    def maximum(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The lane-wise maximum of floats; y if either is NaN."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def largest(self, v: ir.Value) -> ir.Value:
        """The largest lane of a float vector, as a vector of one."""
        while v.type.count > 1:
            v = self.maximum(*self.halves(v))
        return v

    def sqrt(self, x: ir.Value) -> ir.Value:
        """The square root of one fp32."""
        return self._call("llvm.sqrt.f32", x)

    def half_to_float(self, bits: ir.Value) -> ir.Value:
        """Converts fp16 lanes, given as i16, to fp32, exactly.

        Without conversion instructions (x86 before F16C) LLVM would call a library function that may be missing;
        there the exponent is rebased by a multiplication, which is exact for denormals too.
        """
        count = bits.type.count
        if self._has_half:
            return self.b.fpext(self.b.bitcast(bits, vec(F16, count)), vec(F32, count))
        wide = self.widen(bits, I32, False)
        magnitude = self.shift_left(self.and_(wide, 0x7FFF), 13)
        scaled = self.b.fmul(
            self.b.bitcast(magnitude, vec(F32, count)), self.const(vec(F32, count), 2.0**112)
        )
        special = self.b.icmp_unsigned(">=", magnitude, self.const(vec(I32, count), 0x0F800000))
        value = self.b.bitcast(scaled, vec(I32, count))
        value = self.b.select(special, self.b.or_(value, self.const(vec(I32, count), 0x7F800000)), value)
        sign = self.shift_left(self.and_(wide, 0x8000), 16)
        return self.b.bitcast(self.b.or_(value, sign), vec(F32, count))

    def float_to_half(self, x: ir.Value) -> ir.Value:
        """Converts fp32 lanes to fp16 as i16, to nearest, ties to even; overflow becomes infinity."""
        b, count = self.b, x.type.count
        lanes = vec(I32, count)
        if self._has_half:
            return b.bitcast(b.fptrunc(x, vec(F16, count)), vec(I16, count))
        bits = b.bitcast(x, lanes)
        magnitude = self.and_(bits, 0x7FFFFFFF)
        # Adding 0.5 leaves an fp16 denormal, whose unit is 2^-24, rounded in the low bits.
        half = self.const(vec(F32, count), 0.5)
        tiny = b.sub(
            b.bitcast(b.fadd(b.bitcast(magnitude, vec(F32, count)), half), lanes),
            self.const(lanes, 0x3F000000),
        )
        odd = self.and_(self.shift_left(magnitude, -13), 1)
        normal = b.add(b.sub(magnitude, self.const(lanes, 0x38000000 - 0xFFF)), odd)
        normal = self.shift_left(normal, -13)
        value = b.select(b.icmp_unsigned("<", magnitude, self.const(lanes, 0x38800000)), tiny, normal)
        large = b.icmp_unsigned(">=", magnitude, self.const(lanes, 0x47800000))
        value = b.select(large, self.const(lanes, 0x7C00), value)
        nan = b.icmp_unsigned(">", magnitude, self.const(lanes, 0x7F800000))
        value = b.select(nan, self.const(lanes, 0x7E00), value)
        sign = self.and_(self.shift_left(bits, -16), 0x8000)
        return b.trunc(b.or_(value, sign), vec(I16, count))

    def load_halves(self, count: int, address: ir.Value, offset: int = 0) -> ir.Value:
        """`count` fp16 from memory as fp32 lanes."""
        return self.half_to_float(self.load(vec(I16, count), address, offset))

    def total(self, v: ir.Value) -> ir.Value:
        """The sum of the lanes of a float vector, by adding halves until one lane is left."""
        while v.type.count > 1:
            low, high = self.halves(v)
            v = self.b.fadd(low, high)
        return self.lane(v, 0)

    def totals(self, vectors: Sequence[ir.Value]) -> list[ir.Value]:
        """`total` of each of a power-of-two number of vectors of equal length, in fewer instructions."""
        vectors, lanes = list(vectors), vectors[0].type.count
        while lanes > 1:
            # A vector holds `lanes` lanes of each of one or more inputs; adding halves merges two vectors into one.
            half, parts = lanes // 2, range(vectors[0].type.count // lanes * min(2, len(vectors)))
            low, high = ([lanes * p + i for p in parts for i in range(s, s + half)] for s in (0, half))
            pairs = [vectors[i : i + 2] for i in range(0, len(vectors), 2)]
            vectors = [
                self.b.fadd(self.pick(pair[0], low, *pair[1:]), self.pick(pair[0], high, *pair[1:]))
                for pair in pairs
            ]
            lanes = half
        return [self.lane(vector, i) for vector in vectors for i in range(vector.type.count)]

    # ---- branches, loops ---------------------------------------------------------------------------------
    def by_count(self, count: ir.Value, most: int, body: Callable[[int], None]) -> None:
        """Emits body(n) for each n from 1 to `most`, and a switch on count; n is a constant within its body."""
        after = self.b.append_basic_block("after")
        counts = self.b.switch(count, after)
        for known in range(1, most + 1):
            block = self.b.append_basic_block("counted")
            counts.add_case(self.i64(known), block)
            self.b.position_at_end(block)
            body(known)
            self.b.branch(after)
        self.b.position_at_end(after)

    def spans(
        self, start: ir.Value, stop: ir.Value, body: Callable[[ir.Value, int], None], most: int = 8
    ) -> None:
        """Emits body(i, lanes) over start .. stop - 1: `most` lanes (a power of two) at a time, then one at a time."""

        whole = self.b.add(start, self.b.and_(self.b.sub(stop, start), self.i64(-most)))
        self.each(start, whole, most, lambda i: body(i, most))
        self.each(whole, stop, 1, lambda i: body(i, 1))

    def each(self, start: ir.Value, stop: ir.Value, step: int, body: Callable[[ir.Value], None]) -> None:
        """Emits for i in range(start, stop, step): body(i)."""

        def turn(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            body(i)
            return []

        self.loop(start, stop, step, [], turn)

    def loop(
        self,
        start: ir.Value,
        stop: ir.Value,
        step: int,
        carried: Sequence[ir.Value],
        body: Callable[[ir.Value, list[ir.Value]], list[ir.Value]],
    ) -> list[ir.Value]:
        """Emits for i in range(start, stop, step): carried = body(i, carried). i64 indices; may run zero times."""
        before = self.b.block
        head, inside, after = (self.b.append_basic_block(n) for n in ("head", "inside", "after"))
        self.b.branch(head)
        self.b.position_at_end(head)
        index = self.b.phi(I64)
        index.add_incoming(start, before)
        phis = [self.b.phi(v.type) for v in carried]
        for phi, value in zip(phis, carried, strict=True):
            phi.add_incoming(value, before)
        self.b.cbranch(self.b.icmp_signed("<", index, stop), inside, after)
        self.b.position_at_end(inside)
        values = body(index, list(phis))
        index.add_incoming(self.b.add(index, self.i64(step)), self.b.block)
        for phi, value in zip(phis, values, strict=True):
            phi.add_incoming(value, self.b.block)
        self.b.branch(head)
        self.b.position_at_end(after)
        return list(phis)
