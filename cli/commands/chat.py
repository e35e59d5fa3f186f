"""`engine chat`: a conversation in the terminal."""

from dataclasses import replace

from quengine.cli.flags import ConstraintFlags, Effort, Model, System, takes_options
from quengine.cli.loading import load_llm
from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.request.chat_options import ChatOptions
from quengine.request.sampling_params import SamplingParams


@takes_options
def chat(
    model: Model,
    params: SamplingParams,
    constraint: ConstraintFlags,
    config: EngineConfig,
    options: ChatOptions,
    system: System = None,
    effort: Effort = None,
) -> None:
    """Talk with a model; /help lists the commands."""
    params = replace(params, constraint=constraint.spec())
    from quengine.cli.repl import Repl
    from quengine.request.chat_session import ChatSession

    config = replace(config, reuse_prefix=True, chat_template=options.source())
    with load_llm(model, config) as llm:
        if llm.chat_template is None:
            raise EngineError(
                f"{llm.loaded.path.name} has no chat template, so it cannot chat; "
                f"engine generate --raw completes text with it"
            )
        variables = {**llm.effort_variables(effort, options.reasoning_budget), **options.variables}
        Repl(ChatSession(llm, params, system, variables, options)).run()
