"""Programmatic dependent launch (sm_90 and later): a kernel starts while the one in front of it in the stream runs.

`gdc_wait` returns when the producer has ended and its writes are visible; `gdc_launch_dependents` lets the consumer
start once all programs have called it. A kernel that has no weights to read ahead calls both at its beginning.
"""

import triton
import triton.language as tl


@triton.jit
def launch_then_wait(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_then_launch(PDL: tl.constexpr):
    """The consumer's programs find the multiprocessors free: for kernels that fill them."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
