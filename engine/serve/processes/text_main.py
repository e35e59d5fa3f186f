"""Text process: `python -m quengine.serve.processes.text_main FD MODEL`, started by `server_text` for long prompts.

The tokenizers library holds the interpreter's lock for seconds while it tokenizes megabytes, and takes gigabytes of
memory. In this process that stops no stream. The kernel bounds the memory, `server_text` the time.
"""

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from quengine.kernels.channel import Channel
from quengine.kernels.child_process import end_with_parent, parent_channel
from quengine.platform import collector
from quengine.serve.processes.shared_model import ServedModel, TextSide
from quengine.serve.processes.shared_text import TextJob, perform

MEMORY_BYTES = 2 << 30
KEPT_BYTES = 512 << 20
"""A process that holds more after a job ends, for the memory is not given back otherwise."""
OUT_OF_MEMORY = 3
"""Exit code."""


def _held_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serve(channel: Channel[TextJob], path: Path) -> None:
    """Does jobs until the server is gone, or this process has grown too large. Raises MemoryError.

    The first message is a chat template in place of the model's own, or null.
    """
    template = msgspec.json.decode(channel.receive_bytes(), type=str | None)
    model = ServedModel(TextSide.of_file(path, template), 0, (), "", "")
    collector.working()
    last = False
    while not last:
        job = channel.receive()
        result = perform(model, msgspec.structs.replace(job, long=True))
        last = _held_bytes() > KEPT_BYTES
        channel.send(msgspec.structs.replace(result, last=last))
        del job, result


def main() -> int:
    channel = parent_channel(msgspec.json.Decoder(TextJob))
    end_with_parent()
    with suppress(ValueError, OSError):  # a system may have no such limit
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    collector.starting()
    try:
        serve(channel, Path(sys.argv[2]))
    except MemoryError:
        return OUT_OF_MEMORY
    except (EOFError, OSError):
        return 0
    return 0


if __name__ == "__main__":
    os._exit(main())
