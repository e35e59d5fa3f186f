"""The orders of messages that a chat template accepts, and the reordering of conversations that have another order.

Clients send system messages within a conversation (coding agents' reminders) and several user messages in a row. Some
templates of released models refuse these (Qwen3.5, Mistral), and some silently leave out the system messages (gpt-oss,
SmolLM3, MiniMax-M2).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
Messages = Sequence[Message]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


_SYSTEM = ("Alder.", "Birch.", "Cedar.")
_SYSTEM_PROBE: Messages = (
    _message("system", _SYSTEM[0]),
    _message("system", _SYSTEM[1]),
    _message("user", "Hello."),
    _message("system", _SYSTEM[2]),
    _message("assistant", "Hello!"),
    _message("user", "Thanks."),
)
_USER = ("Alder.", "Birch.")
_USER_PROBE: Messages = (_message("user", _USER[0]), _message("user", _USER[1]))


@dataclass(frozen=True)
class TurnOrder:
    """The orders that a template accepts.

    system_messages: system messages may stand anywhere, in any number; else only the first message may be one.
    user_runs: user messages may follow each other; else they alternate with answers.
    """

    system_messages: bool = True
    user_runs: bool = True

    @classmethod
    def of(cls, render: Callable[[Messages], str | None]) -> "TurnOrder":
        """The orders of the template that `render` renders; `render` returns None where it refuses the messages."""

        def writes(probe: Messages, texts: Sequence[str]) -> bool:
            rendered = render(probe)
            return rendered is not None and all(text in rendered for text in texts)

        return cls(writes(_SYSTEM_PROBE, _SYSTEM), writes(_USER_PROBE, _USER))

    def fit(self, messages: Messages) -> Messages:
        """The messages in an order that the template accepts.

        A system message is joined to the message before it; after an answer it begins the next user message. Texts
        are joined by an empty line. A conversation that grows turn by turn keeps its beginning, and so stays in the
        prefix cache.
        """
        if not self.system_messages:
            messages = _folded(messages)
        return messages if self.user_runs else _joined(messages)


def _folded(messages: Messages) -> Messages:
    folded: list[Message] = []
    begins_turn = False
    """Whether the last message is a user's turn that a system message has begun."""
    for message in messages:
        is_system, after = message.get("role") == "system", folded[-1].get("role") if folded else None
        text = _texts(folded[-1], message) if folded else None
        if text is not None and is_system and after != "assistant":
            folded[-1] = {**folded[-1], "content": text}
        elif text is not None and begins_turn and message.get("role") == "user":
            folded[-1], begins_turn = {**message, "content": text}, False
        else:
            begins_turn = is_system and bool(folded)
            folded.append({**message, "role": "user"} if begins_turn else message)
    return folded


def _joined(messages: Messages) -> Messages:
    joined: list[Message] = []
    for message in messages:
        follows = joined and message.get("role") == joined[-1].get("role") == "user"
        text = _texts(joined[-1], message) if follows else None
        if text is None:
            joined.append(message)
        else:
            joined[-1] = {**message, "content": text}
    return joined


def _texts(first: Message, second: Message) -> str | None:
    """Both contents as one text; None where either is no text, as in a tool call."""
    parts = first.get("content"), second.get("content")
    return f"{parts[0]}\n\n{parts[1]}" if isinstance(parts[0], str) and isinstance(parts[1], str) else None
