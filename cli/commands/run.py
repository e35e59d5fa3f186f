"""`engine run`: a conversation with a model, or one answer, with the arguments in Ollama's order."""

import inspect
import sys
from typing import Annotated

import typer

from quengine.cli.commands.chat import Markdown, Session, chat
from quengine.cli.commands.generate import PromptFlags, generate, with_piped
from quengine.cli.flags import ConstraintFlags, Effort, complete_models, takes_options
from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.models.hub.hub_name import own_name
from quengine.options import MODEL_HELP, OUTPUT, Flag
from quengine.request.chat_options import ChatOptions
from quengine.request.sampling_params import SamplingParams


@takes_options
def run_model(
    params: SamplingParams,
    constraint: ConstraintFlags,
    config: EngineConfig,
    options: ChatOptions,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=complete_models)],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="The prompt; without one a conversation."),
    ] = None,
    effort: Effort = None,
    session: Session = None,
    markdown: Markdown = True,
    stats: Annotated[
        bool, Flag("--stats --verbose", "The whole report after an answer, not a line.", OUTPUT)
    ] = False,
) -> None:
    """Talk with a model, or answer one PROMPT, as `ollama run` does.

    A pipe's text comes before the PROMPT: engine run smollm2-135m "Summarize this:" < notes.txt
    """
    text = _prompt(words or [])
    common = {
        "model": own_name(model),
        "params": params,
        "constraint": constraint,
        "config": config,
        "options": options,
    }
    if text is None:
        inspect.unwrap(chat)(**common, effort=effort, session=session, markdown=markdown)
        return
    if session is not None:
        raise EngineError("--session keeps a conversation: leave the PROMPT out")
    flags = PromptFlags(prompts=(text,), effort=effort, stats=stats or None)
    inspect.unwrap(generate)(**common, flags=flags)


def _prompt(words: list[str]) -> str | None:
    """What is piped in and the words of the command line; None on a terminal without any."""
    prompt = with_piped(" ".join(words) or None)
    if not prompt and not sys.stdin.isatty():
        raise EngineError("no prompt: give one after the model's name, or through a pipe")
    return prompt
