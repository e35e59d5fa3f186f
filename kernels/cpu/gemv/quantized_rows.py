"""The memory layout of quantized activations.

Each row of K values is stored as one record:

    byte 0           a, in the form that is multiplied (below)
    byte 2K          per 4 columns: -32 times the sum of a, int32 (VNNI only)
    byte 3K          per group of 32: t, fp32
    byte 3K + K/8    per group of 32: t * sum(a), fp32
    byte 3K + K/4    per group of 16: t * sum(a), fp32 (read by formats with a minimum per 16)

With VNNI (`Tile.byte_dot_lanes`), a = 256 * high + low is stored as two planes of K signed bytes, high before low.
Without, a is int16: of two groups of 32 together (a last group alone) the even columns, then the odd ones, the order
in which bytes of weights are widened in place.
"""


def quantized_row_bytes(cols: int) -> int:
    """Bytes of one row's record of quantized activations; a multiple of 64."""
    return (7 * cols // 2 + 63) // 64 * 64
