"""Choosing a token in compiled code: `kernels/sampling.py`'s `sample`, bit for bit, in a tenth of the time.

Settings that select among all tokens (no top-k, or a very long one), or by surprise (typical-p), go to the definition.

Does not know: seeds, penalties, or who wants the token.
"""

from __future__ import annotations

import math
import struct
from ctypes import CFUNCTYPE, c_int64
from functools import cache
from typing import Any, Unpack

import numpy as np

from quengine.kernels import sampling
from quengine.kernels.cpu.runtime.kernel_table import choose_kernel
from quengine.kernels.sampling import Logits, NoCandidateError, Settings

MOST_CANDIDATES = 128
"""Candidates are held in order as they come, which is slower for very many than numpy's partition."""


def sample(logits: Logits, **settings: Unpack[Settings]) -> int:
    """As `quengine.kernels.sampling.sample`."""
    top_k, top_p, min_p = settings["top_k"], settings["top_p"], settings["min_p"]
    few = 0 < top_k <= MOST_CANDIDATES and top_k < logits.shape[0]
    greedy, by_surprise = settings["temperature"] == 0, settings["typical_p"] < 1
    if greedy or not few or by_surprise or not logits.flags.c_contiguous:
        return sampling.sample(logits, **settings)
    room = np.empty(3 * top_k, dtype=np.int64)
    values, place = 14 * [0], room.ctypes.data
    values[:6] = [
        logits.ctypes.data,
        logits.shape[0],
        top_k,
        *(place + 8 * top_k * part for part in range(3)),
    ]
    numbers = (
        min(top_p, 1.0),
        math.log(min_p) if min_p > 0 else 0.0,
        sampling.sharpness(1.0),
        sampling.sharpness(settings["temperature"]),
        settings["uniform"],
    )
    values[6:11] = struct.unpack("5q", struct.pack("5d", *numbers))
    values[11:13] = [int(top_p < 1), int(min_p > 0)]
    context = np.array(values, dtype=np.int64)
    _choose()(context.ctypes.data, 0)
    token = int(context[13])
    if token < 0:
        raise NoCandidateError("every token is banned")
    return token


@cache
def _choose() -> Any:
    return CFUNCTYPE(None, c_int64, c_int64)(choose_kernel())
