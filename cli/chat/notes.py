"""Lines about a conversation, for the user: on standard error, so that answers alone go down a pipe."""

import sys

from quengine.errors import visible


def note(text: str) -> None:
    """Print one line to standard error."""
    print(f"  {visible(text)}", file=sys.stderr)
