"""A rank's process other than rank 0's: `python -m quengine.parallel.rank_main FD [-v]`, started by `group`.

It loads its part of the model, and then computes the steps that rank 0 sends over the channel FD. It ends with rank 0.
"""

import logging
import sys
from contextlib import suppress
from pathlib import Path

from quengine.errors import CannotRunError
from quengine.kernels.channel import Channel
from quengine.kernels.child_process import end_with_parent, parent_channel
from quengine.kernels.process_end import leave
from quengine.parallel.wire import TO_RANK, RankPlan, RankReady, Starting, ToRank
from quengine.platform import bus_error, collector, log_lines
from quengine.platform.failure import failure_of


def follow(channel: Channel[ToRank]) -> None:
    """Load this rank's part and compute rank 0's messages until its channel closes; without a model, time sums."""
    channel.send(Starting())
    import torch

    from quengine.load import load_rank
    from quengine.parallel.communicator import join
    from quengine.parallel.steps import run
    from quengine.parallel.sum_times import time_sums

    plan = channel.receive()
    assert isinstance(plan, RankPlan)
    device = torch.device(str(plan.options["device"]))
    communicator = join(plan.rank, device, Path(plan.meeting), bool(plan.options["deterministic"]))
    if not plan.model:
        time_sums(communicator, device)
        channel.send(RankReady())
        with suppress(EOFError):
            channel.receive()  # until rank 0 leaves the group
        communicator.close()
        return
    runner = load_rank(plan, communicator)
    channel.send(RankReady())
    collector.working()
    try:
        while True:
            message = channel.receive()
            assert not isinstance(message, RankPlan)
            run(runner, message)
    except EOFError:
        runner.release()
        communicator.close()


def main() -> int:
    channel = parent_channel(TO_RANK)
    end_with_parent()
    log_lines.set_up(verbose="-v" in sys.argv[2:])
    if "-v" not in sys.argv[2:]:
        logging.disable(logging.WARNING)  # rank 0 prints the same warnings
    collector.starting()
    bus_error.install()
    try:
        follow(channel)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    except Exception as error:
        logging.getLogger(__name__).info("the rank has failed", exc_info=error)
        with suppress(OSError):  # rank 0 is gone as well
            channel.send(failure_of(error))
    return CannotRunError.exit_code


if __name__ == "__main__":
    leave(main())
