"""`engine generate`: one prompt in, text out as it comes, a report at the end.

Text goes to standard output, everything else to standard error.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quengine.cli import options
from quengine.cli.loading import load_llm
from quengine.cli.report import completion_json, print_report
from quengine.cli.terminal import json_line, write_text
from quengine.errors import EngineError, visible
from quengine.platform.input_files import read_stream, read_text, universal_newlines

if TYPE_CHECKING:
    from quengine.llm import LLM, CompletionStream
    from quengine.request.sampling_params import SamplingParams


def generate(
    model: options.Model,
    text: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="The prompt; - reads standard input.")
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt; - reads standard input."),
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option("-f", "--file", metavar="FILE", help="Read the prompt from a file."),
    ] = None,
    max_tokens: options.MaxTokens = -1,
    system: options.System = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw", help="Use the model's chat template or not. [default: chat if it has one]"
        ),
    ] = None,
    special: Annotated[
        bool, typer.Option("--special", help="Control tokens: take them from the prompt, show them.")
    ] = False,
    show_prompt: Annotated[
        bool, typer.Option("--show-prompt", help="Print the exact prompt first, to standard error.")
    ] = False,
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", metavar="K", help="Report log-probabilities of K tokens.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats/--no-stats", help="Print the report at the end.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    temp: options.Temperature = 0.8,
    top_k: options.TopK = 40,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.05,
    typical: options.TypicalP = 1.0,
    repeat_penalty: options.RepeatPenalty = 1.0,
    repeat_last_n: options.RepeatLastN = 64,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    logit_bias: options.LogitBias = None,
    seed: options.Seed = -1,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    json_schema: options.JsonSchema = None,
    grammar: options.Grammar = None,
    ctx_size: options.CtxSize = None,
    cache_type: options.CacheTypeName = "f16",
    deterministic: options.Deterministic = False,
    mmap: options.Mmap = True,
    draft_model: options.DraftModel = None,
    draft_ngram: options.DraftNgram = 0,
    draft_tokens: options.DraftTokens = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    backend: options.BackendName = "auto",
) -> None:
    """Generate text from a prompt."""
    params = options.sampling_params(
        max_tokens=max_tokens,
        temp=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical=typical,
        repeat_penalty=repeat_penalty,
        repeat_last_n=repeat_last_n,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
        json_schema=json_schema,
        grammar=grammar,
        logprobs=logprobs,
    )
    source = _prompt_text(text, prompt or [], file or [])
    held, drafts = options.cache_type(cache_type), options.Drafts(draft_model, draft_ngram, draft_tokens)
    asked = (model, device, ctx_size, threads, backend, held)
    with load_llm(*asked, drafts=drafts, deterministic=deterministic, mmap=mmap) as llm:
        ids = _prompt_ids(llm, source, system, chat, special)
        if show_prompt:
            print(visible(llm.tokenizer.decode(ids, skip_special=False)), file=sys.stderr)
        _run(llm, ids, params, special, as_json, stats)


def _prompt_text(text: str | None, prompts: list[str], files: list[Path]) -> str:
    """The one prompt among the argument and what every -p and -f gave. Raises EngineError for none and for several."""
    texts = prompts if text is None else [text, *prompts]
    if len(texts) + len(files) != 1:
        given = [] if text is None else [_excerpt(text)]
        given += [f"-p {_excerpt(prompt)}" for prompt in prompts]
        given += [f"-f {_excerpt(str(file))}" for file in files]
        wrong = f"{len(given)} prompts ({', '.join(given)})" if given else "no prompt"
        raise EngineError(f"{wrong}: give one as an argument, with -p, with -f FILE, or - for standard input")
    if files:
        return _file_text(files[0])
    return _stdin_text() if texts[0] == "-" else texts[0]


def _excerpt(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:40]!r}..."


def _file_text(file: Path) -> str:
    return read_text(file, "cannot read the prompt from").removesuffix("\n")


def _stdin_text() -> str:
    typed = read_stream(sys.stdin.buffer, "cannot read the prompt from standard input")
    return universal_newlines(typed).removesuffix("\n")


def _prompt_ids(llm: "LLM", source: str, system: str | None, chat: bool | None, special: bool) -> list[int]:
    has_template = llm.chat_template is not None
    if chat is None:
        chat = has_template
        if not has_template:
            print("engine: this model has no chat template; the prompt is used as it is", file=sys.stderr)
    if not chat:
        if system is not None:
            raise EngineError(
                "--system needs a chat template: leave it out, or use --chat with a model that has one"
            )
        return llm.encode(source, special=special)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.encode_chat([*messages, {"role": "user", "content": source}])


def _run(
    llm: "LLM", ids: list[int], params: "SamplingParams", special: bool, as_json: bool, stats: bool
) -> None:
    stream = llm.stream(ids, params, show_special=special)
    llm.warm_up(params)  # else the first tokens would wait until their step is captured
    try:
        _print_pieces(stream, quiet=as_json)
    finally:
        completion = stream.completion
        if as_json:
            print(json_line(completion_json(completion, llm)))
        elif stats and completion.tokens:
            print_report(completion, llm)


def _print_pieces(stream: "CompletionStream", quiet: bool) -> None:
    for piece in stream:
        if not quiet:
            write_text(piece)
    if not quiet:
        write_text("\n")
