"""`engine generate`: one prompt in, text out as it comes, a report at the end.

Text goes to standard output, everything else to standard error.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quengine.cli.flags import ConstraintFlags, Effort, Model, takes_options
from quengine.cli.loading import load_llm
from quengine.cli.progress import PromptProgress
from quengine.cli.prompt_source import standard_input, with_piped
from quengine.cli.report import completion_json, print_logprobs, print_report
from quengine.cli.terminal import AnswerPrinter, json_line, write_text
from quengine.config import EngineConfig
from quengine.errors import EngineError, visible
from quengine.options import OUTPUT, Flag
from quengine.platform.input_files import read_text
from quengine.request.chat_options import ChatOptions
from quengine.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quengine.llm import LLM, CompletionStream

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
        parsed = chat and not flags.special
        budget, form = options.reasoning_budget, options.reasoning_format
        stream = (
            llm.stream_answer(ids, params, reasoning_budget=budget, reasoning_format=form)
            if parsed
            else llm.stream(ids, params, show_special=flags.special)
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
            elif completion.tokens:
                if flags.logprobs is not None:
                    print_logprobs(completion, llm)
                if flags.stats is not False:
                    print_report(completion, llm, params, flags.stats)


def _prompt_text(text: str | None, flags: PromptFlags) -> str:
    """The one prompt among the argument and what every -p and -f gave, behind what is piped in.

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
    if prompt is None or (typed is None and not prompt):
        raise EngineError(f"no prompt: {_WAYS}")
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
        return llm.encode(source, special=flags.special)
    messages = options.opened([{"role": "user", "content": source}])
    variables = {**llm.effort_variables(flags.effort, options.reasoning_budget), **options.variables}
    return llm.encode_chat(messages, variables=variables)


def _print_pieces(stream: "CompletionStream", quiet: bool) -> None:
    printer, progress = AnswerPrinter(), PromptProgress()
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
