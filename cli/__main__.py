"""Where the `engine` program starts: the installed script, and `python -m quengine.cli`.

The commands take a tenth of a second to import. Ctrl-C before they are there ends the process as it ends any other
program, where Python's own handler would print a traceback.
"""

import signal
import sys

from quengine.platform import collector


def main() -> int:
    """Run the command line; the exit code. A Ctrl-C that the parent process ignores stays ignored."""
    collector.starting()  # before the imports, which make many objects
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler:
        from quengine.cli.main import main as run

        return run()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from quengine.cli.main import INTERRUPTED
    from quengine.cli.main import main as run

    try:
        signal.signal(signal.SIGINT, handler)
        return run()
    except KeyboardInterrupt:  # in the moments around the command, which handles its own
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nor a traceback while the interpreter shuts down


if __name__ == "__main__":
    sys.exit(main())
