"""Compiling kernels several at a time: what a step launches is compiled by threads while nothing is computed.

Triton compiles a kernel when it is first launched, and the next launch waits. Here a step runs once with its launches
only noted for compilation; Triton's compiler lets other threads run for about half of its time. While it does, Triton
takes a millisecond or two for each launch, met before or not; so those that were are told here. A marker beside the
compiled kernels says that they are there, since even the search takes a second.
Does not know: which kernels there are, or what they do.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction


@contextmanager
def compiling_only(threads: int) -> Iterator[None]:
    """Within it, launches compile their kernels and do not run; at its end all are ready.

    What torch itself computes does run, on whatever memory holds: nothing within may depend on values. A kernel that
    does not compile raises where it is launched in earnest, not here.
    """
    launch = JITFunction.run
    met = set[object]()

    def compile_it(self: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> object:
        del warmup
        key = (self, *map(_specialised_on, args), *kwargs.items())
        if key in met:
            return None
        met.add(key)
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        JITFunction.run = compile_it
        try:
            yield
        finally:
            JITFunction.run = launch


def _specialised_on(argument: object) -> object:
    """What machine code may follow from in an argument."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if type(argument) is int:
        return int, argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, *argument.block_shape
    return float if isinstance(argument, float) else argument


def marker(*what: object) -> Path:
    """The file in Triton's cache that says: this version of the kernels was compiled for `what` (GPU, model, ...).

    It goes with the cache it speaks of. A wrong one does no harm: a kernel that is missing is compiled at its launch.
    """
    digest = sha256(repr((triton.__version__, *what)).encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return Path(triton.knobs.cache.dir) / f"quengine-{digest.hexdigest()[:32]}"
