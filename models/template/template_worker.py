"""The process that renders a chat template. Run as a script by `limited_process`; imports little but jinja2.

A template is a program out of a downloaded file. Jinja's sandbox keeps it from the machine's files and objects,
but not from its time and memory: `x ~ x` in a loop, `replace` or a wide `center` fill any memory within one
operation. Here the kernel bounds the memory and timers the time, and whatever happens happens to this process only.

Its setup is {"source"}, a request {"variables"}, an answer {"text"} or {"error", "line"}.
"""

import json
import resource
import signal
from datetime import datetime
from functools import lru_cache
from traceback import walk_tb
from types import FrameType, GeneratorType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quengine.models.template.limited_worker import LimitedWorker

# A rendering writes the messages, some more than once or escaped, and what the template itself says: far less than
# this. What is longer costs a tokenizer gigabytes.
MAX_OWN_CHARS = 1 << 20
MAX_CHARS_PER_GIVEN = 8
MAX_ERROR_CHARS = 500
# A single operation, such as a power of large numbers, does not let Python's signal handler run: then the timer's
# signal ends the process, so long after the handler was due.
GRACE_SECONDS = 1.0


class LimitError(Exception):
    """The template needs more than it may have."""


class GenerationTag(Extension):
    """`{% generation %}`, which marks the assistant's part for training, renders what is in it."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers: plain JSON, where jinja2's own filter escapes for HTML and sorts. As in llama.cpp, what
    `map` and its like give is a list."""
    value = list(value) if isinstance(value, GeneratorType) else value
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> NoReturn:
    """`raise_exception`, which templates call to refuse messages."""
    raise TemplateError(message)


def strftime_now(form: str) -> str:
    """`strftime_now`, which templates call to tell the model the date."""
    return datetime.now().strftime(form)


def make_environment() -> ImmutableSandboxedEnvironment:
    """The environment that transformers gives chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


@lru_cache(maxsize=1)
def compiled(source: str) -> Template:
    """The template, compiled once."""
    return make_environment().from_string(source)


def render(source: str, variables: dict[str, Any], max_chars: int) -> str:
    """The text of one rendering. Raises LimitError for one that is longer than `max_chars`."""
    pieces: list[str] = []
    size = 0
    for piece in compiled(source).generate(**variables):
        size += len(piece)
        if size > max_chars:
            raise LimitError(f"renders more than {max_chars} characters")
        pieces.append(piece)
    return "".join(pieces)


def line_of(error: Exception) -> int | None:
    """The template's line that `error` comes from."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    frames = walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == "<template>"]
    return lines[-1] if lines else None


def answer(source: str, variables: dict[str, Any], max_chars: int) -> dict[str, Any]:
    """One response: the text, or the error and its line."""
    try:
        return {"text": render(source, variables, max_chars)}
    except MemoryError as error:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0] >> 20
        return {"error": f"needs more than {limit} MiB of memory", "line": line_of(error)}
    except RecursionError as error:
        return {"error": "calls itself without end", "line": line_of(error)}
    except Exception as error:
        return {"error": (str(error) or type(error).__name__)[:MAX_ERROR_CHARS], "line": line_of(error)}


def answer_in_time(source: str, request: bytes, seconds: float) -> dict[str, Any]:
    """The response to one request, within `seconds` of processor time."""

    def out_of_time(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        raise LimitError(f"takes more than {seconds:g} seconds")

    signal.signal(signal.SIGPROF, out_of_time)
    variables = json.loads(request)["variables"]
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds + GRACE_SECONDS)
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        return answer(source, variables, MAX_OWN_CHARS + MAX_CHARS_PER_GIVEN * len(request))
    except LimitError as error:  # the timer's, when the rendering had just come to its end
        return {"error": str(error), "line": None}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def main() -> None:
    worker = LimitedWorker()
    for request in worker.requests():
        worker.answer(answer_in_time(worker.setup["source"], request, worker.seconds))


if __name__ == "__main__":
    main()
