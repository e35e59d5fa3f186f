"""Where the `engine` program starts: the installed script, and `python -m quengine.cli`.

The commands take a tenth of a second to import. Ctrl-C before they are there ends the process as it ends any other
program, where Python's own handler would print a traceback.
"""

# The module in C: `signal` itself imports enum, milliseconds in which Python's handler would be there.
import _signal as signal  # type: ignore[import-not-found, unused-ignore]
import sys


def main() -> int:
    """Run the command line; the exit code. A Ctrl-C that the parent process ignores stays ignored."""
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
        return run()
    except KeyboardInterrupt:  # in the moments around the command, which handles its own
        return interrupts.exit_code() or INTERRUPTED
    finally:
        interrupts.finish()  # no traceback while the interpreter shuts down


if __name__ == "__main__":
    sys.exit(main())
