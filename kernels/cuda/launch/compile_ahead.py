"""Compiling kernels several at a time: what a step launches is compiled by threads while nothing is computed.

Triton compiles a kernel when it is first launched, and the next launch waits. Here a step runs once with its launches
only compiled; Triton's compiler lets other threads run for about half of its time. It takes a millisecond or two for
each such launch, compiled before or not, so launches of one variant are recognized here. A marker beside the compiled
kernels says that they are there, since even this search takes a second.
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

from quengine.kernels.cuda.launch.kernel import launches_handed_to


@contextmanager
def compiling_only(threads: int) -> Iterator[None]:
    """Within it, launches compile their kernels and do not run; at its end all are ready.

    What torch itself computes does run, on whatever memory holds: nothing within may depend on values. A kernel that
    does not compile raises where it is first run, not here.
    """
    launch = JITFunction.run
    seen = set[object]()

    def compile_once(kernel: Any, grid: object, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        key = (kernel, *map(_specialized_on, args), *named.items())
        if key not in seen:
            seen.add(key)
            launch(kernel, *args, grid=grid, warmup=True, **named)

    with (
        ThreadPoolExecutor(threads) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
        launches_handed_to(compile_once),
    ):
        yield


def _specialized_on(argument: object) -> object:
    """What machine code may follow from in an argument."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if type(argument) is int:
        return int, argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, *argument.block_shape
    if isinstance(argument, tuple):
        return type(argument), *map(_specialized_on, argument)
    return float if isinstance(argument, float) else argument


def marker(*what: object) -> Path:
    """The file in Triton's cache that says: this version of the kernels was compiled for `what` (GPU, model, ...).

    It goes with the cache it speaks of. A wrong one does no harm: a kernel that is missing is compiled at its launch.
    """
    digest = sha256(repr((triton.__version__, *what)).encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return Path(triton.knobs.cache.dir) / f"quengine-{digest.hexdigest()[:32]}"
