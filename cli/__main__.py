"""Where the `engine` program starts: the installed script, and `python -m quengine.cli`.

The commands take a tenth of a second to import. Ctrl-C before they are there ends the process as it ends any other
program, where Python's own handler would print a traceback. At its end the process leaves without taking apart what it
has loaded, which takes 0.1 s with torch, unless something waits for the end: a profiler, or who measures coverage.
"""

# The module in C: `signal` itself imports enum, milliseconds in which Python's handler would be there.
import _signal as signal  # type: ignore[import-not-found, unused-ignore]
import atexit
import os
import sys

_ended: list[int] = []
"""The exit code, once the command has ended."""

_INJECTED = ("LD_PRELOAD", "CUDA_INJECTION64_PATH")
"""Libraries in C that others add, such as profilers: they may write at the process's end."""


def main() -> int:
    """Run the command line; the exit code. A Ctrl-C that the parent process ignores stays ignored.

    For a process that ends with it.
    """
    # The first that is registered is the last that is called. Those that are there already would not be called.
    if not atexit._ncallbacks() and not any(map(os.environ.get, _INJECTED)):
        atexit.register(_leave)
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from quengine.platform import collector

    collector.starting()  # before the imports, which make many objects
    from quengine.cli import interrupts
    from quengine.cli.main import INTERRUPTED
    from quengine.cli.main import main as run

    try:
        signal.signal(signal.SIGINT, handler)
        _ended.append(run())
    except KeyboardInterrupt:  # in the moments around the command, which handles its own
        _ended.append(interrupts.exit_code() or INTERRUPTED)
    finally:
        interrupts.finish()  # no traceback while the interpreter shuts down
    return _ended[-1]


def _leave() -> None:
    """End the process, after all other functions of `atexit`: what modules hold is not destroyed one by one."""
    if not _ended:  # by an error that Python reports
        return
    from quengine.kernels.process_end import leave

    leave(_ended[-1])


if __name__ == "__main__":
    sys.exit(main())
