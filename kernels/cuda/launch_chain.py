"""Launches that wait for one another's programs, not for the end of the launch in front.

`gdc_wait` (pdl.py) returns when the producer's grid has ended and its writes are flushed. In a chain of short launches
that takes longer than their work. Here each program that has stored its part of the result counts its arrival, with
release order, and a consumer's programs, which PDL has started by then, poll the counter with acquire order. A consumer
starts only when all programs of its producer have (they let it, `begin_link`), so nothing waits for a program without a
place. The counters of a step are zeroed before its first link begins, and each link has counters of its own.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

COPIES = tl.constexpr(8)
"""Copies of a counter, each polled by some of the programs: one would be polled faster than the L2 cache answers."""

LINKS = tl.constexpr(512)
"""Links of a step."""

_WORDS = tl.constexpr(4)
"""Int32 from one link's counter to the next: 16 bytes, so that all pointers are aligned alike."""


class Link(NamedTuple):
    """Pointers in a kernel: the producer's counter, which is polled, and this launch's, int32 each."""

    producer: Any
    arrivals: Any


UNLINKED = Link(None, None)


@dataclass
class LaunchChain:
    """The links of a step on one stream. counters: int32 [COPIES, LINKS, 4]. A launch that takes `last` as its input
    polls for the launch that made it; any other waits for the end of the launch in front."""

    counters: Tensor
    links: int = 0
    awaited: int = 0
    last: object = None

    @classmethod
    def empty(cls, device: torch.device | str) -> "LaunchChain":
        shape = (COPIES.value, LINKS.value, _WORDS.value)
        return cls(torch.zeros(shape, dtype=torch.int32, device=device))

    def restart(self) -> None:
        """For a step whose first launch zeroes the counters."""
        self.links, self.last = 0, None

    def link(self, given: object) -> tuple[Link, int]:
        """The link of the next launch, whose input is `given`, and for how many arrivals it waits: 0, for the end of
        the launch in front."""
        if self.links == LINKS.value:
            return UNLINKED, 0
        at = self.links
        awaited = self.awaited if at > 0 and given is self.last else 0
        self.links += 1
        self.last = None
        return Link(self.counters[0, max(0, at - 1)], self.counters[0, at]), awaited

    def made(self, result: object, arrivals: int) -> None:
        """The launch of the newest link gives `result` by so many arrivals."""
        self.last, self.awaited = result, arrivals


@triton.jit
def begin_link(link, awaited, PDL: tl.constexpr):
    """Let the consumer's programs start, unless this launch waits for a whole grid: then counters may not be zeroed
    yet."""
    if PDL:
        if link.producer is None:
            tl.extra.cuda.gdc_launch_dependents()
        else:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p griddepcontrol.launch_dependents; mov.u32 $0, 0; }",
                "=r,r", [awaited], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def await_link(link, awaited, PDL: tl.constexpr):
    """Wait until the producer's results can be read."""
    if PDL:
        if link.producer is None:
            tl.extra.cuda.gdc_wait()
        else:
            tl.inline_asm_elementwise(
                """{ .reg .pred p, q; .reg .b32 t; .reg .b64 a;
                setp.ne.s32 p, $2, 0;
                @p bra POLL;
                griddepcontrol.wait;
                griddepcontrol.launch_dependents;
                bra DONE;
                POLL:
                mov.u32 t, %tid.x;
                setp.ne.u32 q, t, 0;
                @q bra DONE;
                mov.u32 t, %ctaid.x;
                and.b32 t, t, 7;
                mad.wide.u32 a, t, 8192, $1;
                AGAIN:
                ld.acquire.gpu.global.s32 t, [a];
                setp.lt.s32 p, t, $2;
                @p bra AGAIN;
                DONE:
                mov.u32 $0, 0; }""",
                "=r,l,r", [link.producer, awaited], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
            tl.debug_barrier()


@triton.jit
def arrive(link):
    """Count this program's arrival: all that it has stored can then be read."""
    if link.arrivals is not None:
        tl.debug_barrier()  # all warps' stores come before the atomic that publishes them
        copy = tl.arange(0, COPIES)
        tl.atomic_add(link.arrivals + copy * (LINKS * _WORDS), 1, sem="release", scope="gpu")


@gluon.jit
def arrive_in_gluon(link):
    """`arrive`, of a Gluon kernel."""
    if link.arrivals is not None:
        tl.debug_barrier()
        copy = gl.arange(0, COPIES, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        gl.atomic_add(link.arrivals + copy * (LINKS * _WORDS), copy * 0 + 1, sem="release", scope="gpu")


@triton.jit
def zero_counters(counters_ptr):
    """All counters of a step, by one program."""
    COUNT: tl.constexpr = COPIES * LINKS * _WORDS
    at = tl.arange(0, 4096)
    for first in tl.static_range(0, COUNT, 4096):
        tl.store(counters_ptr + first + at, 0)
