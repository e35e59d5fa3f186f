"""The prompt of a response's messages, also where they do not fit."""

from collections.abc import Mapping, Sequence
from typing import Any

from quengine.serve.models.model_host import ModelHost
from quengine.serve.routes.prompts import PromptIds, chat_ids
from quengine.serve.routes.shortening import MOST_TRIES, kept_share, shortened, without_oldest
from quengine.serve.schemas.errors import ApiError

Message = Mapping[str, Any]


async def conversation_ids(
    host: ModelHost,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    variables: Mapping[str, Any],
    shorten: bool,
    notes: list[str],
) -> PromptIds:
    """Messages to token ids and images. shorten: the oldest turns are left out as the context asks for, which `notes`
    gets a line for. Raises ApiError."""
    kept, fetched = messages, dict[str, bytes]()
    for _ in range(MOST_TRIES if shorten else 0):
        try:
            prompt = await chat_ids(host, kept, tools, variables, "input", fetched=fetched)
        except ApiError as error:
            share = kept_share(error)
            if share is None or (shorter := without_oldest(kept, share)) is None:
                raise
            kept = shorter
            continue
        if left := len(messages) - len(kept):
            shortened(notes, f"truncation: the oldest {left} of {len(messages)} messages are left out")
        return prompt
    return await chat_ids(host, kept, tools, variables, "input", fetched=fetched)
