"""SentencePiece's map of normalizations (`precompiled_charsmap`), checked before a library follows it.

The layout is little-endian: the size of the trie in bytes (32 bits), the trie as a double array of 32-bit units
(Darts-clone), then the replacements, each ended by a zero byte. A unit has a label (bits 0 to 7 and 31), a flag for a
value (bit 8), and an offset (bits 10 to 30, shifted left by 8 if bit 9 is set). Source: SentencePiece's
`normalizer.cc` and Darts-clone's `darts.h`.
"""

import numpy as np
from numpy.typing import NDArray

MOST_BYTES = 16 << 20
LONGEST_REPLACEMENT = 255
"""Most bytes of a replacement: SentencePiece's own maps have up to 33."""

_AT_A_TIME = 4096
_LABEL, _HAS_VALUE, _VALUE = (1 << 31) | 0xFF, 1 << 8, (1 << 31) - 1


def charsmap_problem(raw: bytes) -> str | None:
    """What is wrong with a map, such as that it leads outside of itself or a replacement is too long; None: nothing."""
    size = int.from_bytes(raw[:4], "little")
    if len(raw) > MOST_BYTES:
        return f"{len(raw)} bytes, more than {MOST_BYTES}"
    if not 4 <= size <= len(raw) - 4 or size % 4:
        return f"a trie of {size} bytes in {len(raw)}"
    replacements = raw[4 + size :]
    try:
        replacements.decode()
    except UnicodeDecodeError:
        return "replacements are not UTF-8"
    if (longest := max(map(len, replacements.split(b"\0")))) > LONGEST_REPLACEMENT:
        return f"a replacement of {longest} bytes, more than {LONGEST_REPLACEMENT}"
    return _trie_problem(np.frombuffer(raw, "<u4", size // 4, 4).astype(np.int64), replacements)


def _trie_problem(units: NDArray[np.int64], replacements: bytes) -> str | None:
    """What is wrong with a unit that some text leads to; None: nothing."""
    starts = np.frombuffer(replacements, np.uint8) & 0xC0 != 0x80  # where a character begins
    seen = np.zeros(len(units), np.bool_)
    found = np.zeros(1, np.int64)
    while found.size:
        seen[found] = True
        found_next = []
        for at in range(0, found.size, _AT_A_TIME):
            nodes = found[at : at + _AT_A_TIME]
            shifts = (units[nodes] & (1 << 9)) >> 6
            bases = nodes ^ ((units[nodes] & _VALUE) >> 10 << shifts)
            if (bases | 0xFF).max() >= len(units):
                return f"the trie leads to unit {(bases | 0xFF).max()} of {len(units)}"
            values = units[bases[(units[nodes] & _HAS_VALUE != 0) & (nodes > 0)]] & _VALUE
            if (values >= len(starts)).any() or not starts[values].all():
                return "the trie leads to no beginning of a replacement"
            letters = np.arange(1, 256)
            children = bases[:, None] ^ letters
            found_next.append(np.unique(children[units[children] & _LABEL == letters]))
        found = np.unique(np.concatenate(found_next))
        found = found[~seen[found]]
    return None
