"""`engine generate`: one prompt in, text out as it comes, a report at the end.

The prompt is typed, read from a file, or comes through a pipe before what is typed. Text goes to standard output,
everything else to standard error.
"""

import logging
import os
import select
import stat
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quengine.cli.flags import ConstraintFlags, Effort, Model, takes_options
from quengine.cli.loading import load_llm
from quengine.cli.progress import PromptMeter
from quengine.cli.report import completion_json, print_logprobs, print_report
from quengine.cli.terminal import AnswerPrinter, json_line, write_text
from quengine.config import EngineConfig
from quengine.errors import EngineError, visible
from quengine.options import OUTPUT, Flag
from quengine.platform.input_files import read_stream, read_text, universal_newlines
from quengine.request.chat_options import ChatOptions
from quengine.request.content_parts import read_image, why_text_alone
from quengine.request.prompt import check_text
from quengine.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quengine.llm import LLM, CompletionStream

_log = logging.getLogger(__name__)

_FAILURE = "cannot read the prompt from standard input"
_SAID_AFTER = 2.0
"""Seconds that a pipe may keep silent before a note says what is waited for."""


def with_piped(typed: str | None) -> str | None:
    """The piped text, a blank line and what is typed, or whichever of the two there is; None for neither.

    Raises EngineError where the pipe's text is too large, not UTF-8, or cannot be read.
    """
    piped = _piped_text()
    if piped == "" and typed is not None:
        _log.info("standard input is empty: the prompt is used alone")
    elif piped:
        _log.info("%d characters of standard input are in the prompt", len(piped))
    return "\n\n".join(part for part in (piped, typed) if part) or typed or piped


def standard_input() -> str:
    """All of standard input, without a line's end after it.

    Raises EngineError where it is too large, not UTF-8, or cannot be read.
    """
    if sys.stdin.isatty():
        print(
            "engine: reading the prompt from the terminal; Ctrl-D on an empty line ends it", file=sys.stderr
        )
    else:
        _say_when_silent()
    return universal_newlines(read_stream(sys.stdin.buffer, _FAILURE)).removesuffix("\n")


def _piped_text() -> str | None:
    """What a pipe, a socket or a file at standard input gives; None for a terminal, and for a device as /dev/null."""
    try:
        kind = stat.S_IFMT(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError):  # a closed stream, or one that is none of the system's
        return None
    return standard_input() if kind in (stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFREG) else None


def _say_when_silent() -> None:
    """Wait for standard input a while, and tell the user if nothing comes: a pipe that nobody closes never ends."""
    try:
        ready, _, _ = select.select([sys.stdin.fileno()], [], [], _SAID_AFTER)
    except (OSError, ValueError):  # a stream that is none of the system's
        return
    if not ready:
        print(
            "engine: waiting for standard input, which is a pipe; `< /dev/null` leaves it out",
            file=sys.stderr,
        )


PROMPT = "The prompt"


@dataclass(frozen=True)
class PromptFlags:
    """Where the prompt comes from, how it becomes tokens, and what is printed of its completion."""

    prompts: Annotated[
        tuple[str, ...], Flag("-p --prompt", "The prompt; - reads standard input.", PROMPT, "TEXT")
    ] = ()
    files: Annotated[
        tuple[Path, ...],
        Flag("-f --file", "Read the prompt from a file; - is standard input.", PROMPT, "FILE"),
    ] = ()
    images: Annotated[
        tuple[Path, ...], Flag("--image", "An image before the prompt; repeatable.", PROMPT, "FILE")
    ] = ()
    effort: Effort = None
    chat: Annotated[
        bool | None,
        Flag("--chat/--raw", "Use the model's chat template or not. (default: chat if it has one)", PROMPT),
    ] = None
    special: Annotated[
        bool, Flag("--special", "Control tokens: take them from the prompt, show them.", PROMPT)
    ] = False
    show_prompt: Annotated[
        bool, Flag("--show-prompt", "Print the exact prompt first, to standard error.", OUTPUT)
    ] = False
    logprobs: Annotated[
        int | None,
        Flag("--logprobs", "Report each token's log-probability, and the K likeliest.", OUTPUT, "K"),
    ] = None
    stats: Annotated[
        bool | None,
        Flag("--stats/--no-stats", "The whole report at the end, or none. (default: a line)", OUTPUT),
    ] = None
    as_json: Annotated[bool, Flag("--json", "Print one JSON object instead of text.", OUTPUT)] = False


@takes_options
def generate(
    model: Model,
    flags: PromptFlags,
    params: SamplingParams,
    constraint: ConstraintFlags,
    config: EngineConfig,
    options: ChatOptions,
    text: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="The prompt; - reads standard input.")
    ] = None,
) -> None:
    """Generate text from a prompt.

    A pipe's text comes before the PROMPT: engine generate -m smollm2-135m "Summarize this:" < notes.txt
    """
    params = replace(params, logprobs=flags.logprobs, constraint=constraint.spec())
    source = _prompt_text(text, flags)
    with load_llm(model, replace(config, chat_template=options.source())) as llm:
        chat = _is_chat(llm, flags)
        ids = _prompt_ids(llm, source, flags, options, chat)
        if flags.show_prompt:
            print(visible(llm.tokenizer.decode(ids, skip_special=False)), file=sys.stderr)
        prompt = llm.with_images(ids, [read_image(path) for path in flags.images])
        parsed = chat and not flags.special
        budget, form = options.reasoning_budget, options.reasoning_format
        stream = (
            llm.stream_answer(prompt, params, reasoning_budget=budget, reasoning_format=form)
            if parsed
            else llm.stream(prompt, params, show_special=flags.special)
        )
        llm.warm_up(params)  # else the first tokens would wait until their step is captured
        try:
            _print_pieces(stream, quiet=flags.as_json)
        finally:
            completion = stream.completion
            if completion.schema_violation is not None:
                print(f"engine: the text is not valid: {completion.schema_violation}", file=sys.stderr)
            if flags.as_json:
                print(json_line(completion_json(completion, llm)))
            elif completion.tokens or completion.finish_reason in ("stop", "length"):
                if flags.logprobs is not None:
                    print_logprobs(completion)
                if flags.stats is not False:
                    print_report(completion, llm, params, flags.stats)


def _prompt_text(text: str | None, flags: PromptFlags) -> str:
    """The one prompt among the argument and what every -p and -f gave, after what is piped in.

    Raises EngineError for none and for several.
    """
    texts = flags.prompts if text is None else (text, *flags.prompts)
    given = len(texts) + len(flags.files)
    if given > 1:
        named = [] if text is None else [_excerpt(text)]
        named += [f"-p {_excerpt(prompt)}" for prompt in flags.prompts]
        named += [f"-f {_excerpt(str(file))}" for file in flags.files]
        raise EngineError(f"{given} prompts ({', '.join(named)}): {_WAYS}")
    if "-" in (*texts, *map(str, flags.files)):
        return standard_input()
    typed = texts[0] if texts else None
    if flags.files:
        typed = read_text(flags.files[0], "cannot read the prompt from").removesuffix("\n")
    prompt = with_piped(typed)
    if not prompt and flags.files:
        raise EngineError(f"-f {flags.files[0]}: the file is empty: {_WAYS}")
    if prompt is None or (typed is None and not prompt):
        raise EngineError(f"no prompt: {_WAYS}")
    check_text(prompt, "the prompt")
    return prompt


_WAYS = "give one as an argument, with -p, with -f FILE, or through a pipe"


def _excerpt(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:40]!r}..."


def _is_chat(llm: "LLM", flags: PromptFlags) -> bool:
    if flags.chat is None and llm.chat_template is None:
        print("engine: this model has no chat template; the prompt is used as it is", file=sys.stderr)
    return llm.chat_template is not None if flags.chat is None else flags.chat


def _prompt_ids(llm: "LLM", source: str, flags: PromptFlags, options: ChatOptions, chat: bool) -> list[int]:
    """The prompt, by the template with `chat`. Raises EngineError where a flag would have no effect."""
    if not chat:
        for flag, given in (
            ("--system", options.system is not None),
            ("--reasoning-effort", flags.effort is not None),
            ("--chat-template-kwargs", options.template_kwargs is not None),
            ("--reasoning-budget", options.reasoning_budget >= 0),
        ):
            if given:
                raise EngineError(
                    f"{flag} needs a chat template: leave it out, or use --chat with a model that has one"
                )
        return _raw_ids(llm, source, flags)
    images = [{"type": "image", "image": path} for path in flags.images]
    content = [*images, {"type": "text", "text": source}] if images else source
    messages = options.opened([{"role": "user", "content": content}])
    variables = {**llm.effort_variables(flags.effort, options.reasoning_budget), **options.variables}
    return llm.encode_chat(messages, variables=variables)


def _raw_ids(llm: "LLM", source: str, flags: PromptFlags) -> list[int]:
    """The prompt as it is, with images where it has markers, else in front."""
    if not flags.images:
        return llm.encode(source, special=flags.special)
    if llm.images is None:
        raise EngineError(why_text_alone(llm.loaded.notes))
    missing = max(0, len(flags.images) - source.count(llm.images.marker))
    return llm.encode(missing * llm.images.marker + source, special=True)


def _print_pieces(stream: "CompletionStream", quiet: bool) -> None:
    printer, progress = AnswerPrinter(), PromptMeter()
    stream.progress = progress
    try:
        for delta in stream.deltas():
            progress.clear()
            if not quiet:
                printer.write(delta)
    finally:
        progress.clear()
    if not quiet:
        write_text("\n")
