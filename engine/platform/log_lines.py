"""How log records become lines for a terminal: one line each, an error with its causes, control characters escaped."""

import logging
import sys
import time
import traceback
from collections.abc import Iterator

_MAX_MESSAGE = 2000  # characters


class OneLine(logging.Formatter):
    """`engine: level: message`. An exception is logged with its causes, and with its traceback if `tracebacks` is
    set."""

    def __init__(self, tracebacks: bool = False) -> None:
        super().__init__()
        self._tracebacks = tracebacks

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            message += f": {causes_of(error)}"
        line = f"engine: {record.levelname.lower()}: {one_line(message)}"
        if error is None or not self._tracebacks:
            return line
        return line + "\n" + "".join(traceback.format_exception(error)).rstrip("\n")


def set_up(verbose: bool) -> None:
    """Log this program's and its server's records on standard error: warnings, or all of them."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine(verbose))
    for name in ("quengine", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.DEBUG if verbose else logging.WARNING)
    if verbose:
        logging.getLogger("uvicorn.error").setLevel(logging.INFO)


def causes_of(error: BaseException) -> str:
    """`Type: message` of an exception, and then of each of its causes."""
    return ", caused by ".join(
        f"{type(each).__name__}: {each}" if str(each) else type(each).__name__ for each in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        yield following
        seen.add(id(following))
        hidden = following.__suppress_context__
        following = following.__cause__ or (None if hidden else following.__context__)


def one_line(text: str, longest: int = _MAX_MESSAGE) -> str:
    """`text` with white space as single spaces, other control characters escaped, and cut to `longest` characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= longest else line[: longest - 3] + "..."


def printable(text: str) -> str:
    """`text` with every character that is not printable as its escape (`\\x1b`)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class Seldom:
    """Logs a warning at most once in `seconds`, with the number of those left out since the last one."""

    def __init__(self, logger: logging.Logger, seconds: float = 1.0) -> None:
        self._logger = logger
        self._seconds = seconds
        self._again_at = 0.0
        self._left_out = 0

    def warning(self, message: str, *args: object, cause: BaseException | None = None) -> None:
        now = time.monotonic()
        if now < self._again_at:
            self._left_out += 1
            return
        more = f" ({self._left_out} such warnings were left out)" if self._left_out else ""
        self._again_at, self._left_out = now + self._seconds, 0
        self._logger.warning(message + more, *args, exc_info=cause)
