"""How quantized activations lie in memory.

Quantized activations lie in memory as one record per row of K values:

    byte 0              a, in the form that is multiplied with (below)
    byte 2K             per 4 columns: -32 times the sum of a, int32 (where bytes are multiplied)
    byte 3K             per group of 32: t, fp32
    byte 3K + K/8       per group of 32: t * sum(a), fp32
    byte 3K + K/4       per group of 16: t * sum(a), fp32 (read by formats with minimums per 16)

Where the processor multiplies bytes (`Tile.byte_dot_lanes`), a = 256 * high + low is two planes of K signed bytes, the
high ones first. Elsewhere it is int16, of two groups of 32 at a time (of a last one alone) the even places, then the
odd ones, which is how widening bytes in place gives the weights.
"""


def quantized_row_bytes(cols: int) -> int:
    """Bytes from one activation record to the next; a multiple of 64."""
    return (7 * cols // 2 + 63) // 64 * 64
