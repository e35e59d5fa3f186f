"""How long a sum over ranks takes, by size: `python -m quengine.parallel.sum_times FD KIND COUNT` reports it over FD.

Rank 0 is a process of its own, too, which is ended after a while if devices cannot reach each other as they should.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from quengine.errors import CannotRunError
from quengine.kernels.child_process import ChildProcess, end_with_parent, parent_channel
from quengine.kernels.process_end import end_at_once, leave
from quengine.parallel.communicator import RankCommunicator
from quengine.parallel.group import RankGroup
from quengine.parallel.wire import RankPlan
from quengine.platform.failure import failure_of

SIZES = ((1, 4096), (1, 8192), (8, 8192), (16, 8192), (64, 8192), (512, 8192))
"""Rows and columns: of single tokens, of small batches, of prompts."""

_CALLS, _TIMES = 20, 10


@dataclass(frozen=True)
class SumTime:
    """Seconds of a sum of fp32 values [rows, width] over all ranks; on CUDA within a graph."""

    rows: int
    width: int
    seconds: float


@dataclass(frozen=True)
class SumTimes:
    """What was measured, and how the ranks exchange sums; `problem`: why nothing was."""

    ranks: int
    note: str
    times: tuple[SumTime, ...] = ()
    problem: str = ""


_reports = msgspec.msgpack.Decoder(SumTimes)


def measure(kind: str, count: int, seconds: float = 120.0) -> SumTimes:
    """The times of `count` ranks, on the first CUDA devices or the CPU, within `seconds`."""
    program = ("-m", "quengine.parallel.sum_times")
    process = ChildProcess(program, _reports, [kind, str(count)], quiet=True)
    try:
        return process.channel.receive(seconds)
    except TimeoutError:
        return SumTimes(count, "", problem=f"the ranks have not met within {seconds:.0f} s")
    except (EOFError, OSError):
        return SumTimes(count, "", problem=process.ending)
    finally:
        process.close()


def time_sums(communicator: RankCommunicator, device: torch.device) -> list[SumTime]:
    """The times of all sizes, on every rank. Raises CannotRunError where a sum is wrong."""
    found = []
    for rows, width in SIZES:
        x = torch.full((rows, width), communicator.rank + 1.0, device=device)
        total = communicator.all_reduce(x.clone())
        if not bool((total == communicator.size * (communicator.size + 1) / 2).all()):
            raise CannotRunError(f"a sum of {rows} x {width} values over {communicator.size} ranks is wrong")
        zeros = torch.zeros_like(x)
        seconds = _best(lambda values: communicator.all_reduce(values), zeros, communicator)
        found.append(SumTime(rows, width, seconds))
    return found


def _best(call: Callable[[torch.Tensor], object], x: torch.Tensor, communicator: RankCommunicator) -> float:
    """Seconds of a call, the best of several runs of some calls each, which all ranks begin together."""
    if x.is_cuda:
        return _best_of_graph(call, x, communicator)
    best = float("inf")
    for _ in range(_TIMES // 2):
        communicator.meet()
        began = time.perf_counter()
        for _ in range(_CALLS // 4):
            call(x)
        best = min(best, (time.perf_counter() - began) / (_CALLS // 4))
    return best


def _best_of_graph(
    call: Callable[[torch.Tensor], object], x: torch.Tensor, communicator: RankCommunicator
) -> float:
    graph, best = torch.cuda.CUDAGraph(), float("inf")
    communicator.meet()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            call(x)
    for _ in range(_TIMES):
        communicator.meet()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3 / _CALLS)
    return best


def time_as_rank_0(kind: str, count: int, ends_process: Callable[[str], None]) -> SumTimes:
    """The times of `count` ranks, of which this process is the first; or why there are none. `ends_process`: see
    `RankGroup`."""

    def plan(number: int, meeting: str) -> RankPlan:
        """The plan of a rank that loads no model."""
        options = {"device": _device(kind, number), "deterministic": False, "expert_parallel": False}
        return RankPlan("", options, number, count, 0, (), 1, meeting)

    group = RankGroup(count)
    group.ends_process = ends_process
    try:
        device = torch.device(_device(kind, 0))
        communicator = group.load(plan, device, deterministic=False)
        times = time_sums(communicator, device)
        group.wait_until_loaded()
        return SumTimes(count, communicator.note, tuple(times))
    except Exception as error:
        return SumTimes(count, "", problem=failure_of(error).message[:300])
    finally:
        group.close()


def _device(kind: str, number: int) -> str:
    return kind if kind == "cpu" else f"{kind}:{number}"


def main() -> None:
    channel = parent_channel(msgspec.msgpack.Decoder(None))
    end_with_parent()
    kind, count = sys.argv[2], int(sys.argv[3])

    def end(reason: str) -> None:
        channel.send(SumTimes(count, "", problem=reason))
        end_at_once(CannotRunError.exit_code)

    channel.send(time_as_rank_0(kind, count, end))


if __name__ == "__main__":
    main()
    leave(0)
