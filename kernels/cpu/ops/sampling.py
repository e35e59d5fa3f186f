"""Sampling on the CPU, compiled: bit-identical to `sample` of `kernels/sampling.py`, in a tenth of the time.

Settings without a top-k, or with a large one, and typical-p fall back to the definition.
"""

from __future__ import annotations

import math
from array import array
from ctypes import CFUNCTYPE, c_int64
from dataclasses import dataclass
from functools import cache
from typing import Any, Unpack

import numpy as np

from quengine.kernels import sampling
from quengine.kernels.cpu.runtime.arguments import Arguments, Fp64, fields_of
from quengine.kernels.cpu.runtime.kernel_table import choose_kernel
from quengine.kernels.sampling import Logits, NoCandidateError, SamplerArguments

MOST_CANDIDATES = 128
"""The candidates are kept sorted by insertion, which for many is slower than numpy's partition."""


@dataclass
class ChooseArguments(Arguments):
    """The arguments of the kernel that samples a token.

    all_logits: fp32 [count], finite or -inf. logits (fp64), ids and masses (int64): scratch for top_k candidates.
    token is the result, -1 if there is no candidate.
    """

    all_logits: int
    count: int
    top_k: int
    logits: int
    ids: int
    masses: int
    top_p: Fp64
    log_min_p: Fp64
    sharpness_at_1: Fp64
    sharpness: Fp64
    uniform: Fp64
    has_top_p: int
    has_min_p: int
    token: int = -1


def sample(logits: Logits, **settings: Unpack[SamplerArguments]) -> int:
    """As `quengine.kernels.sampling.sample`, with the same result.

    Raises NoCandidateError when every token is banned.
    """
    top_k, top_p, min_p = settings["top_k"], settings["top_p"], settings["min_p"]
    few = 0 < top_k <= MOST_CANDIDATES and top_k < logits.shape[0]
    greedy, by_surprise = settings["temperature"] == 0, settings["typical_p"] < 1
    if greedy or not few or by_surprise or not logits.flags.c_contiguous:
        return sampling.sample(logits, **settings)
    room = np.empty(3 * top_k, dtype=np.int64)
    values, ids, masses = (room.ctypes.data + 8 * top_k * part for part in range(3))
    arguments = ChooseArguments(
        *(logits.ctypes.data, logits.shape[0], top_k, values, ids, masses),
        top_p=min(top_p, 1.0),
        log_min_p=math.log(min_p) if min_p > 0 else 0.0,
        sharpness_at_1=sampling.sharpness(1.0),
        sharpness=sampling.sharpness(settings["temperature"]),
        uniform=settings["uniform"],
        has_top_p=int(top_p < 1),
        has_min_p=int(min_p > 0),
    )
    memory = array("q", arguments.to_bytes())
    _choose()(memory.buffer_info()[0], 0)
    token = memory[fields_of(ChooseArguments)["token"].offset // 8]
    if token < 0:
        raise NoCandidateError("every token is banned")
    return token


@cache
def _choose() -> Any:
    return CFUNCTYPE(None, c_int64, c_int64)(choose_kernel())
