"""The models of a conversation: the one it begins with, and those that `/model` changes to."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quengine.cli.loading import load_llm
from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.models.hub.hub import resolve_model
from quengine.request.chat_options import ChatOptions
from quengine.request.chat_session import ChatSession
from quengine.request.preset import preset_values
from quengine.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quengine.llm import LLM


@dataclass
class ChatModels:
    """Opens models, each with the options of the command line. `name`: the latest one's."""

    name: str
    config: EngineConfig
    options: ChatOptions
    effort: str | None

    def __post_init__(self) -> None:
        self._running = self.config  # of the model that is open

    def session(self, params: SamplingParams) -> ChatSession:
        """A conversation with the first model. Raises what `LLM` does, and EngineError where it cannot chat."""
        llm, variables = self._open(self.name, self.config, self.options)
        return ChatSession(llm, params, variables, self.options)

    def change(self, session: ChatSession, name: str) -> None:
        """Go on with another model, of whose preset the options come first. The model before is closed.

        Raises:
            EngineError: there is no such model, or it cannot be loaded, or cannot chat: the one before is open again.
        """
        resolve_model(name)  # what is wrong with a name is reported before the model in use is closed
        preset = preset_values(name)
        options = replace(self.options, **preset.get(ChatOptions, {}))
        config = replace(self.config, **preset.get(EngineConfig, {}))
        before = session.options
        session.llm.close()
        try:
            llm, variables = self._open(name, config, options)
        except EngineError:
            llm, variables = self._open(self.name, self._running, before)
            session.change_model(llm, variables, before)
            raise
        session.change_model(llm, variables, options)
        session.params = replace(session.params, **preset.get(SamplingParams, {})).with_seed()
        if options.system != before.system:
            session.set_system(options.system)
        self.name, self._running = name, config

    def _open(self, name: str, config: EngineConfig, options: ChatOptions) -> "tuple[LLM, Mapping[str, Any]]":
        """A model, and the variables of its template."""
        llm = load_llm(name, replace(config, reuse_prefix=True, chat_template=options.source()))
        try:
            if llm.chat_template is None:
                raise EngineError(
                    f"{llm.loaded.path.name} has no chat template, so it cannot chat; "
                    f"engine generate --raw completes text with it"
                )
            return llm, {**llm.effort_variables(self.effort, options.reasoning_budget), **options.variables}
        except EngineError:
            llm.close()
            raise
