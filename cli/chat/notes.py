"""Lines about a conversation, for the user: on standard error, so that answers alone go down a pipe."""

import shutil
import sys
import textwrap

from quengine.errors import visible


def note(text: str) -> None:
    """Print one line to standard error; on a terminal words that do not fit it begin the next."""
    line = f"  {visible(text)}"
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        line = textwrap.fill(
            line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    print(line, file=sys.stderr)
