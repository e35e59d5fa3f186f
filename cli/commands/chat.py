"""`engine chat`: a conversation in the terminal."""

from dataclasses import replace
from typing import Annotated

from quengine.cli.flags import ConstraintFlags, Effort, Model, takes_options
from quengine.config import EngineConfig
from quengine.options import OUTPUT, Flag
from quengine.request.chat_options import PANEL as CONVERSATIONS
from quengine.request.chat_options import ChatOptions
from quengine.request.sampling_params import SamplingParams

Session = Annotated[
    str | None,
    Flag(
        "--session",
        "Save the conversation after each answer under a name or in a file, and go on with it.",
        CONVERSATIONS,
        "NAME|FILE",
    ),
]

Markdown = Annotated[
    bool, Flag("--markdown/--no-markdown", "On a terminal, render the markdown of answers.", OUTPUT)
]


@takes_options
def chat(
    model: Model,
    params: SamplingParams,
    constraint: ConstraintFlags,
    config: EngineConfig,
    options: ChatOptions,
    effort: Effort = None,
    session: Session = None,
    markdown: Markdown = True,
) -> None:
    """Talk with a model; /help lists the commands."""
    from quengine.cli.chat.models import ChatModels
    from quengine.cli.chat.repl import Repl
    from quengine.cli.chat.session_file import SessionFile, session_path

    models = ChatModels(model, config, options, effort)
    conversation = models.session(replace(params, constraint=constraint.spec()))
    try:
        file = SessionFile(conversation, session_path(session)) if session is not None else None
        Repl(conversation, models, file, markdown).run()
    finally:
        conversation.llm.close()
