"""`engine chat`: a conversation in the terminal."""

from dataclasses import replace
from typing import Annotated

from quengine.cli.flags import ConstraintFlags, Effort, Model, takes_options
from quengine.cli.loading import load_llm
from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.options import Flag
from quengine.request.chat_options import ChatOptions
from quengine.request.sampling_params import SamplingParams

Session = Annotated[
    str | None,
    Flag(
        "--session",
        "Save the conversation after each answer under a name or in a file, and go on with it.",
        metavar="NAME|FILE",
    ),
]

Markdown = Annotated[bool, Flag("--markdown/--no-markdown", "On a terminal, render the markdown of answers.")]


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
    params = replace(params, constraint=constraint.spec())
    from quengine.cli.chat.repl import Repl
    from quengine.cli.chat.session_file import SessionFile, session_path
    from quengine.request.chat_session import ChatSession

    config = replace(config, reuse_prefix=True, chat_template=options.source())
    with load_llm(model, config) as llm:
        if llm.chat_template is None:
            raise EngineError(
                f"{llm.loaded.path.name} has no chat template, so it cannot chat; "
                f"engine generate --raw completes text with it"
            )
        variables = {**llm.effort_variables(effort, options.reasoning_budget), **options.variables}
        conversation = ChatSession(llm, params, variables, options)
        file = SessionFile(conversation, session_path(session)) if session is not None else None
        Repl(conversation, file, markdown).run()
