"""A rank's process other than rank 0's: `python -m quengine.parallel.rank_main FD LIFE [-v]`, started by `group`.

It loads its part of the model, and then computes what rank 0 tells it, over FD. It ends when rank 0 does, whatever it
waits for: LIFE is a pipe that only rank 0 holds open.
"""

import json
import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from quengine.errors import CannotRunError, EngineError
from quengine.parallel.group import LOST, READY, STARTING, RankPlan
from quengine.platform import bus_error, collector, log_lines
from quengine.platform.out_of_memory import out_of_memory


def _end_with_rank_0(life: int) -> None:
    os.read(life, 1)
    os._exit(0)


def _report(error: Exception) -> bytes:
    """Kind and message for rank 0."""
    if (problem := out_of_memory(error)) is not None:
        return json.dumps([CannotRunError.__name__, str(problem)]).encode()
    if isinstance(error, EngineError):
        return json.dumps([type(error).__name__, str(error)]).encode()
    kind = LOST if isinstance(error, RuntimeError) and "gloo" in str(error).lower() else "failed"
    return json.dumps([kind, f"{type(error).__name__}: {error}"[:1000]]).encode()


def follow(connection: "Connection[Any, Any]") -> None:
    """Load what rank 0 plans, and compute what it sends, until it closes the connection; without a model, time sums."""
    connection.send_bytes(STARTING)
    import torch

    from quengine.load import load_rank
    from quengine.parallel.communicator import join
    from quengine.parallel.steps import run
    from quengine.parallel.sum_times import time_sums
    from quengine.parallel.wire import decode

    given = json.loads(connection.recv_bytes())
    plan = RankPlan(**{**given, "pools": tuple(tuple(pool) for pool in given["pools"])})
    device = torch.device(str(plan.options["device"]))
    communicator = join(plan.rank, device, Path(plan.meeting), bool(plan.options["deterministic"]))
    if not plan.model:
        time_sums(communicator, device)
        connection.send_bytes(READY)
        with suppress(EOFError):
            connection.recv_bytes()  # until rank 0 leaves the group
        communicator.close()
        return
    runner = load_rank(plan, communicator)
    connection.send_bytes(READY)
    collector.working()
    try:
        while True:
            run(runner, decode(connection.recv_bytes()))
    except EOFError:
        runner.release()
        communicator.close()


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to end
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    threading.Thread(target=_end_with_rank_0, args=(int(sys.argv[2]),), daemon=True).start()
    log_lines.set_up(verbose="-v" in sys.argv[3:])
    if "-v" not in sys.argv[3:]:
        logging.disable(logging.WARNING)  # rank 0 says the same
    collector.starting()
    bus_error.install()
    try:
        follow(connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    except Exception as error:
        logging.getLogger(__name__).info("the rank has failed", exc_info=error)
        with suppress(OSError):  # rank 0 is gone as well
            connection.send_bytes(_report(error))
    return CannotRunError.exit_code


if __name__ == "__main__":
    # Not `sys.exit`: after a device has failed, freeing what it holds may hang.
    code = main()
    sys.stderr.flush()
    os._exit(code)
