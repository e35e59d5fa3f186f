"""The memory layout of quantized activations.

Each row of K values is stored as one record:

    byte 0            a, in the form that is multiplied (below)
    byte 2K           per group of 16: -32 times the sum of a, int32
    byte 2K + K/4     per group of 32: the same
    byte 2K + 3K/8    per group of 32: t, fp32
    byte 2K + K/2     per group of 32: t * sum(a), fp32
    byte 2K + 5K/8    per group of 16: t * sum(a), fp32 (read by formats with a minimum per 16)

With VNNI (`Tile.byte_dot_lanes`), a = 256 * high + low is stored as two planes of K signed bytes, high before low.
Without VNNI, a is int16: each two groups of 32 together, or a last group alone, have their even columns first, then
the odd ones. That is the order in which bytes of weights are widened in place.
"""

INTS = {16: 16, 32: 18}
"""Eighths of K at which the integer sums of groups of so many columns start."""
SCALES = 19
SUMS = {32: 20, 16: 21}
"""Eighths of K at which the fp32 sums of groups of so many columns start."""
SUM_FACTOR = -32
"""The factor of the stored integer sums: the negative of the offset of Q6_K's codes."""


def quantized_row_bytes(cols: int) -> int:
    """Bytes of one row's record of quantized activations; a multiple of 64."""
    return (23 * cols // 8 + 63) // 64 * 64
