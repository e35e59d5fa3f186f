"""Device functions of sampling: a logit's key and mass, bias and penalties, the random number, the next step's state.

Each equals a function of `quengine.kernels.sampling`, bit for bit, if kernels are launched without fused multiply-adds
(`enable_fp_fusion=False`).
"""

import triton
import triton.language as tl

from quengine.kernels import sampling as definition

LOG2_E = tl.constexpr(definition.sharpness(1.0))
LOWEST = tl.constexpr(-0x8000000000000000)
HIGHEST = tl.constexpr(0x7FFFFFFFFFFFFFFF)

_ONE = tl.constexpr(1023 + definition.MASS_BITS)  # the exponent field of the largest mass
_HALVINGS = tl.constexpr(definition.HALVINGS)
_TERMS = tl.constexpr(len(definition.EXP2_COEFFICIENTS))
_COEFFICIENTS = tl.constexpr(definition.EXP2_COEFFICIENTS)


@triton.jit
def mass(gap, sharp):
    """`definition.masses` of fp64 gaps, int64."""
    halvings = tl.minimum(gap * sharp, _HALVINGS)
    whole = (halvings + 0.5).to(tl.int32)
    part = halvings - whole.to(tl.float64)
    power = tl.full(part.shape, _COEFFICIENTS[_TERMS - 1], tl.float64)
    for k in tl.static_range(1, _TERMS):
        power = power * part
        power = power + _COEFFICIENTS[_TERMS - 1 - k]
    scale = ((-whole + _ONE).to(tl.int64) << 52).to(tl.float64, bitcast=True)  # 2^(44 - whole)
    return (power * scale + 0.5).to(tl.int64)


@triton.jit
def moment(mass, gap):
    """One token's term of the sum of gaps weighted by mass, int64."""
    return (mass.to(tl.float64) * gap + 0.5).to(tl.int64)


@triton.jit
def ceiling(value):
    """The ceiling of fp64 >= 0, int64."""
    whole = value.to(tl.int64)
    return whole + (whole.to(tl.float64) < value).to(tl.int64)


@triton.jit
def _bounded(value):
    """fp64 to fp32, clamped to the largest number above and to -inf below, as in the definition's `_replaced`."""
    limit = 3.4028234663852886e38
    value = tl.where(value > limit, limit, value)
    return tl.where(value < -limit, float("-inf"), value).to(tl.float32)


@triton.jit
def adjusted(
    x, id, inside, slot, bias_ptr, count_ptr, float_ptr, vocab, BIAS: tl.constexpr, COUNTS: tl.constexpr
):
    """Logits fp32 with bias, then with the penalties of seen tokens."""
    if BIAS:
        bias = tl.load(bias_ptr + slot * vocab + id, mask=inside, other=0.0)
        x = tl.where(bias != 0, _bounded(x.to(tl.float64) + bias), x)
    if COUNTS:
        count = tl.load(count_ptr + slot * vocab + id, mask=inside, other=0)
        repeat = tl.load(float_ptr + slot * 7 + 4)
        presence = tl.load(float_ptr + slot * 7 + 5)
        frequency = tl.load(float_ptr + slot * 7 + 6)
        wide = x.to(tl.float64)
        seen = tl.where(wide > 0, wide / repeat, wide * repeat)
        x = tl.where(count > 0, _bounded(seen - (presence + count.to(tl.float64) * frequency)), x)
    return x


@triton.jit
def key_of(x, id):
    """An int64 key in the order of the logits, ties by descending id; NaN is above all."""
    x = x + 0.0  # -0.0 becomes 0.0, which it equals
    bits = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (rising.to(tl.int64) << 32) | (0xFFFFFFFF - id.to(tl.int64))


@triton.jit
def logit_of(key):
    rising = (key >> 32).to(tl.int32)
    return (rising ^ ((rising >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def id_of(key):
    return 0xFFFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def uniform_of(int_ptr, position_ptr):
    """`definition.uniform` of the position (below 2^31) after the row's current one."""
    position = tl.load(position_ptr) + 1
    zero = position & 0
    seed, stream = tl.load(int_ptr + 1), tl.load(int_ptr + 2)
    word, _, _, _ = tl.philox(seed, position, zero, stream.to(tl.int32), zero)
    return (word.to(tl.uint32, bitcast=True).to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def advance(
    token, row, slot, target_ptr, at_ptr, token_ptr, position_ptr, history_ptr, count_ptr, int_ptr, chosen_ptr,
    turn_ptr, stride, vocab, context, COUNTS: tl.constexpr,
):  # fmt: skip
    """Gives the token after a row to the host, and to the row's target: it becomes the input of the slot's next step,
    at the next position, and enters the penalties' window."""
    tl.store(chosen_ptr + tl.load(turn_ptr) * stride + row, token)
    position = tl.load(at_ptr + row) + 1
    target = tl.load(target_ptr + row).to(tl.int64)
    tl.store(token_ptr + target, token)
    tl.store(position_ptr + target, position)
    history = history_ptr + target * context
    tl.store(history + position, token.to(tl.int32), mask=position < context)
    if COUNTS:
        window = tl.load(int_ptr + slot * 4 + 3)
        leaving = position - window
        gone = (window > 0) & (leaving >= 0)
        old = tl.load(history + leaving, mask=gone, other=0)
        counts = count_ptr + target * vocab
        tl.atomic_add(counts + old, -1, mask=gone & (old >= 0))
        tl.atomic_add(counts + token, 1, mask=(window != 0) & (token >= 0))
