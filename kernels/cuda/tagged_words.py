"""Values that a launch hands to the next one word by word, each with a tag: a consumer that PDL has started waits for
the words that it reads, and not for the end of its producer's grid.

A word is 8 bytes, `tag << 32 | value`, and is written and read whole: nothing is fenced, counted or put back. A tag is
the number of the step and that of the launch in it. The first launch of a step counts it, on the device, so that a CUDA
graph can be replayed; and the first producer lets its consumer start only when it has itself waited, so that every
consumer finds the step counted. The protocol is that of NCCL ("LL", https://github.com/NVIDIA/nccl).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LAUNCHES = tl.constexpr(1024)
"""Launches of a step that tag their values, at most."""

_WIDTH = 1 << 16
"""Words of a row, at most."""


class Tagged(NamedTuple):
    """Pointers in a kernel: words int64, and the step's number int32 [1]; None: nothing is tagged."""

    words: Any
    step: Any


UNTAGGED = Tagged(None, None)


@dataclass
class TaggedWords:
    """Words of one row between the launches of a step on one stream. words: int64 [65536]; step: int32 [1]. `launches`
    is how many have tagged theirs in this step, `last` what the newest of them gives beside its words."""

    words: Tensor
    step: Tensor
    launches: int = 0
    last: object = None

    @classmethod
    def empty(cls, device: torch.device | str) -> "TaggedWords":
        return cls(
            torch.full((_WIDTH,), -1, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )

    def restart(self) -> None:
        """For a step whose first launch counts it."""
        self.launches, self.last = 0, None

    def produce(self, result: object, width: int) -> tuple[Tagged, int]:
        """What the next launch is given to tag so many values, beside which it gives `result`, and its number."""
        self.last = None
        if width > _WIDTH or self.launches == LAUNCHES.value:
            return UNTAGGED, 0
        self.last = result
        self.launches += 1
        return Tagged(self.words, self.step), self.launches - 1

    def consume(self, given: object) -> tuple[Tagged, int]:
        """The words of the launch whose result is `given`, and its number; UNTAGGED where it has not tagged them."""
        if self.last is not given:
            return UNTAGGED, 0
        return Tagged(self.words, self.step), self.launches - 1


@triton.jit
def tag_of(tagged, launch):
    """The tag of a launch; no two of the last four million steps have the same."""
    return tl.load(tagged.step, volatile=True) * LAUNCHES + launch


@triton.jit
def begin_tagged(launch, PDL: tl.constexpr, ASM: tl.constexpr):
    """Let consumers start, unless this is the first launch of a step."""
    if PDL and ASM:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p griddepcontrol.launch_dependents; mov.u32 $0, 0; }",
            "=r,r", [launch], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def wait_tagged(launch, PDL: tl.constexpr, ASM: tl.constexpr):
    """Wait for the launch in front; then the first launch of a step lets its consumers start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        if ASM:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.eq.s32 p, $1, 0; @p griddepcontrol.launch_dependents; mov.u32 $0, 0; }",
                "=r,r", [launch], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def tagged_word(value, tag):
    """fp32 values and a tag as words."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return (tag.to(tl.int64) << 32) | bits
