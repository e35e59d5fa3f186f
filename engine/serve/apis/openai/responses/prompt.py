"""The prompt of a response's messages, also where they do not fit."""

from collections.abc import Mapping, Sequence
from typing import Any

from quengine.serve.models.model_host import ModelHost
from quengine.serve.routes.prompts import PromptIds, chat_ids
from quengine.serve.routes.shortening import fitted, shortened, without_oldest

Message = Mapping[str, Any]


async def conversation_ids(
    host: ModelHost,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    variables: Mapping[str, Any],
    shorten: bool,
    notes: list[str],
) -> PromptIds:
    """Messages to token ids and images. shorten: where they do not fit the context, the oldest turns are left out, and
    `notes` gets a line that says so. Raises ApiError."""
    fetched = dict[str, bytes]()

    async def ids(kept: Sequence[Message]) -> PromptIds:
        return await chat_ids(host, kept, tools, variables, "input", fetched=fetched)

    if not shorten:
        return await ids(messages)
    prompt, kept = await fitted(messages, ids, without_oldest)
    if left := len(messages) - len(kept):
        shortened(notes, f"truncation: the oldest {left} of {len(messages)} messages are left out")
    return prompt
