"""The prompt of a response's messages, where the template takes them in one order only, and where they do not fit."""

from collections.abc import Mapping, Sequence
from typing import Any

from quengine.serve.routes.prompts import chat_ids
from quengine.serve.routes.shortening import MOST_TRIES, kept_share, shortened, without_oldest
from quengine.serve.schemas.errors import CONTEXT_EXCEEDED, ApiError
from quengine.serve.service import Service

Message = Mapping[str, Any]

_TOO_LONG = (CONTEXT_EXCEEDED, "over_limit")


class ConversationPrompt:
    """Messages to token ids. `notes` gets a line for what the prompt has otherwise than the messages."""

    def __init__(
        self, service: Service, tools: Sequence[Any] | None, variables: Mapping[str, Any], notes: list[str]
    ) -> None:
        self._service = service
        self._tools = tools
        self._variables = variables
        self._notes = notes

    async def ids(self, messages: Sequence[Message], shorten: bool) -> list[int]:
        """Where the template refuses the messages, those of `_in_turns` are tried.

        `shorten`: the oldest turns are left out as the context asks for. Raises ApiError.
        """
        messages = _with_one_system_message(messages)
        try:
            return await self._fitting(messages, shorten)
        except ApiError as error:
            turns = _in_turns(messages)
            if error.status != 400 or error.code in _TOO_LONG or turns == messages:
                raise
            try:
                ids = await self._fitting(turns, shorten)
            except ApiError:
                raise error from None
        self._notes.append("input: messages are joined to turns, as the chat template takes no others")
        return ids

    async def _fitting(self, messages: list[Message], shorten: bool) -> list[int]:
        kept = messages
        for _ in range(MOST_TRIES if shorten else 0):
            try:
                ids = await self._ids(kept)
            except ApiError as error:
                share = kept_share(error)
                if share is None or (shorter := without_oldest(kept, share)) is None:
                    raise
                kept = shorter
                continue
            if left := len(messages) - len(kept):
                shortened(
                    self._notes, f"truncation: the oldest {left} of {len(messages)} messages are left out"
                )
            return ids
        return await self._ids(kept)

    async def _ids(self, messages: Sequence[Message]) -> list[int]:
        return await chat_ids(self._service, messages, self._tools, self._variables, "input")


def _with_one_system_message(messages: Sequence[Message]) -> list[Message]:
    """The messages, with the system messages that they begin with as one: many templates take one only."""
    count = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return [*([_joined(messages[:count])] if count else ()), *messages[count:]]


def _in_turns(messages: Sequence[Message]) -> list[Message]:
    """The messages, with system messages behind the first as the user's, and those of the user that follow each other
    as one."""
    turns = list(messages[:1])
    for message in messages[1:]:
        given = {**message, "role": "user"} if message["role"] == "system" else message
        if given["role"] == turns[-1]["role"] == "user":
            turns[-1] = _joined([turns[-1], given])
        else:
            turns.append(given)
    return turns


def _joined(messages: Sequence[Message]) -> Message:
    return {**messages[0], "content": "\n\n".join(message["content"] for message in messages)}
