"""Programmatic dependent launch (sm_90 and later): a kernel starts while its predecessor in the stream still runs.

`gdc_wait` returns when the producer has ended and its writes are visible; `gdc_launch_dependents` lets the consumer
start once all programs have called it. A kernel without weights to read ahead calls both at its start.
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
    """For kernels that fill the device: the consumer's programs start only when multiprocessors are free."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
