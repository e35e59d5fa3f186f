"""CPU seconds that compiling each kernel of a model takes, one after another, without a GPU.

    TRITON_CACHE_DIR=$(mktemp -d) python benchmarks/compile_times.py [MODEL] [--parallel 64] [--arch sm_90]

MODEL: as `engine kernels build --models` takes it. A kernel is named with the computation that first needs it (0
repacking, 1 a decode step of one sequence, 2 a short prompt, the last ones all others) and with how much of its time
ptxas took; those that are in Triton's cache count as none. At the end their sum, and how long 4 and 16 processors of
this kind are busy with those of computations 0 to 2, and with all, handed out as a first run does; without the
launchers' C code and what precedes it.
"""

import argparse
import gc
import heapq
import os
from collections.abc import Sequence
from dataclasses import dataclass

from quengine.platform import torch_import

torch_import.keep_bytecode()

import torch  # noqa: E402

from quengine.kernels.cuda.launch.compile_processes import _order  # noqa: E402
from quengine.kernels.cuda.launch.record_kernels import Kernel, record_kernels  # noqa: E402
from quengine.kernels.cuda.launch.triton_cache import use_private_cache  # noqa: E402
from quengine.runners.compile_kernels import compile_stages  # noqa: E402
from quengine.runners.kernel_packs import PackPlan, _plans, _shape, arch_of, gpus  # noqa: E402


@dataclass(frozen=True)
class Compiled:
    """A kernel of computation `stage`; CPU seconds, and those of them that child processes took."""

    kernel: Kernel
    stage: int
    seconds: float
    of_children: float


def compile_all(model: str, parallel: int, arch: int) -> list[Compiled]:
    """Every kernel that requests to the model take, up to `parallel` at once, in the order of a first run."""
    plan = _plans(_shape(model), PackPlan([model], [arch], parallel))[-1]
    gpu = gpus([arch])[-1]
    known, compiled = set[str](), list[Compiled]()
    for stage, compute in enumerate(compile_stages(plan)):
        new = [kernel for key, kernel in record_kernels([compute], gpu).items() if key not in known]
        known.update(kernel.key for kernel in new)
        for kernel in sorted(new, key=_order):
            before = os.times()
            kernel.compile()
            now = os.times()
            children = sum(now[2:4]) - sum(before[2:4])
            compiled.append(Compiled(kernel, stage, sum(now[:2]) - sum(before[:2]) + children, children))
    return compiled


def busy(compiled: Sequence[Compiled], processors: int) -> float:
    """Seconds until the last is done, each given to the processor that is idle first."""
    ends = [0.0] * processors
    for each in compiled:
        heapq.heapreplace(ends, ends[0] + each.seconds)
    return max(ends)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="mistral-7b")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--arch", type=arch_of, default=90)
    parser.add_argument("--top", type=int, default=20, help="kernels to show, the longest first")
    given = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()  # as in a process that compiles
    use_private_cache()
    compiled = compile_all(given.model, given.parallel, given.arch)
    for each in sorted(compiled, key=lambda each: -each.seconds)[: given.top]:
        print(f"{each.seconds:6.2f} s, ptxas {each.of_children:5.2f}  {each.stage}  {each.kernel.name}")
    print(f"{len(compiled)} kernels, {sum(each.seconds for each in compiled):.1f} CPU seconds")
    for processors in (4, 16):
        first = [each for each in compiled if each.stage < 3]
        print(
            f"{processors} processors: {busy(first, processors):.2f} s, all {busy(compiled, processors):.2f}"
        )


if __name__ == "__main__":
    main()
