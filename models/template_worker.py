"""The process that renders a chat template. Run as a script by `template_process`; imports jinja2 alone.

A template is a program out of a downloaded file. Jinja's sandbox keeps it from the machine's files and objects,
but not from its time and memory: `x ~ x` in a loop, `replace` or a wide `center` fill any memory within one
operation. Here the kernel bounds the memory and a timer the time, and whatever happens happens to this process only.

Standard input: one JSON line {"source"}, then one a render {"variables"}. Standard output: one JSON line a
render, {"text"} or {"error", "line"}. Knows nothing of models and tokenizers.
"""

import json
import resource
import signal
import sys
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from traceback import walk_tb
from types import FrameType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 2.0
MEMORY_BYTES = 512 << 20
MAX_CHARS = 16 << 20


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
    """As in transformers: plain JSON, where jinja2's own filter escapes for HTML and sorts."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> NoReturn:
    """For templates that refuse what they are given."""
    raise TemplateError(message)


def strftime_now(form: str) -> str:
    """The time now, for templates that tell the model the date."""
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


def render(source: str, variables: dict[str, Any]) -> str:
    """The text of one rendering. Raises LimitError for one that is too long."""
    pieces: list[str] = []
    size = 0
    for piece in compiled(source).generate(**variables):
        size += len(piece)
        if size > MAX_CHARS:
            raise LimitError(f"renders more than {MAX_CHARS} characters")
        pieces.append(piece)
    return "".join(pieces)


def line_of(error: Exception) -> int | None:
    """The template's line that `error` comes from."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    frames = walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == "<template>"]
    return lines[-1] if lines else None


def _out_of_time(signum: int, frame: FrameType | None) -> None:
    del signum, frame
    raise LimitError(f"takes more than {CPU_SECONDS:g} seconds")


def answer(source: str, variables: dict[str, Any]) -> dict[str, Any]:
    """One response: the text, or the error and its line."""
    try:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            return {"text": render(source, variables)}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except MemoryError as error:
        return {"error": f"needs more than {MEMORY_BYTES >> 20} MiB of memory", "line": line_of(error)}
    except RecursionError as error:
        return {"error": "calls itself without end", "line": line_of(error)}
    except Exception as error:
        return {"error": str(error) or type(error).__name__, "line": line_of(error)}


def main() -> None:
    with suppress(ValueError, OSError):  # a system may have no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGPROF, _out_of_time)
    source = json.loads(sys.stdin.buffer.readline())["source"]
    for line in sys.stdin.buffer:
        response = answer(source, json.loads(line)["variables"])
        sys.stdout.buffer.write(json.dumps(response).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
