"""Options of conversations: the chat template and its variables, and what becomes of reasoning."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from quengine.errors import EngineError
from quengine.options import Flag, Range, check_ranges
from quengine.platform import strict_json
from quengine.platform.input_files import read_text

PANEL = "Conversations"
ReasoningFormat = Literal["auto", "deepseek", "none"]


@dataclass(frozen=True)
class ChatOptions:
    """Options of conversations, each described by its flag. `variables`: what the template gets beside the messages.

    `messages` follow the system message at the beginning of every conversation, as examples (a preset has them).

    Raises:
        EngineError: the variables are no JSON object, the budget is below -1, or there are two templates.
    """

    template: Annotated[
        str | None,
        Flag(
            "--chat-template",
            "The chat template: its text, or the name of one in the model's file or of a built-in one.",
            PANEL,
            "TEXT|NAME",
        ),
    ] = None
    template_file: Annotated[
        Path | None, Flag("--chat-template-file", "A file with the chat template.", PANEL, "FILE")
    ] = None
    template_kwargs: Annotated[
        str | None,
        Flag("--chat-template-kwargs", "More variables of the template, a JSON object.", PANEL, "JSON"),
    ] = None
    reasoning_format: Annotated[
        ReasoningFormat,
        Flag("--reasoning-format", "auto or deepseek: apart from the text; none: in it.", PANEL, "FORMAT"),
    ] = "auto"
    reasoning_budget: Annotated[
        int,
        Range(-1, text="a number of tokens, 0 for no reasoning, or -1 for no limit"),
        Flag("--reasoning-budget", "Most tokens of reasoning; 0: none, -1: no limit.", PANEL, "N"),
    ] = -1
    system: Annotated[
        str | None,
        Flag(
            "--system --system-prompt -sys",
            "System message, of conversations without one of their own.",
            PANEL,
            "TEXT",
        ),
    ] = None
    messages: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        check_ranges(self, "--reasoning-budget {value}")
        if self.template is not None and self.template_file is not None:
            raise EngineError("--chat-template and --chat-template-file cannot both hold: give one of them")
        _ = self.variables

    @property
    def variables(self) -> Mapping[str, Any]:
        """More names for the template."""
        text = self.template_kwargs or "{}"
        try:
            value = strict_json.loads(text)
        except strict_json.StrictJSONError as error:
            raise EngineError(f"--chat-template-kwargs {text[:80]}: it is no JSON: {error}") from None
        if not isinstance(value, Mapping):
            raise EngineError(f"--chat-template-kwargs {text[:80]}: must be a JSON object")
        return value

    def opened(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The conversation with the system message in front, unless it has its own, and then `self.messages`."""
        has_own = bool(messages) and messages[0].get("role") in ("system", "developer")
        system = (
            [{"role": "system", "content": self.system}] if self.system is not None and not has_own else []
        )
        return [*messages[:has_own], *system, *self.messages, *messages[has_own:]]

    def source(self) -> str | None:
        """The template or its name; None: the model's own. Raises EngineError where the file cannot be read."""
        if self.template_file is None:
            return self.template
        text = read_text(self.template_file, "--chat-template-file: cannot read")
        if not text.strip():
            raise EngineError(f"--chat-template-file {self.template_file}: it is empty")
        # A template without any tag is text all the same, and no name.
        return text if "{" in text else text + "{# #}"
