"""Raw prompts: text, token ids, or several of either. Control tokens that text spells are read as such, as
llama-server and vLLM do, unless `parse_special` is false."""

import json
from typing import Any

from quengine.serve.engine_port import ServedModel
from quengine.serve.errors import bad_request
from quengine.serve.fields import Fields, token_ids, whole_number
from quengine.serve.http import off_loop
from quengine.serve.service import Service


async def read_prompts(fields: Fields, service: Service, key: str = "prompt") -> list[list[int]]:
    """The ids of every prompt in the field `key` of a request, checked against the limits. Raises ApiError."""
    special = fields.flag("parse_special")
    values, model = fields.any(key), service.model
    prompts = await off_loop(
        lambda: [_ids(value, model, special is not False, key) for value in _separate(values, key)]
    )
    for prompt in prompts:
        service.check_prompt(prompt, key)
    return prompts


def _separate(value: Any, key: str) -> list[Any]:
    """One entry a prompt: an array of ids, or of ids and texts mixed, is one; one of texts or arrays several."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise bad_request(f"{key} must be a string, token ids, or an array of these", key)
    one = any(whole_number(part) is not None for part in value)
    return [value] if one else value


def _ids(value: Any, model: ServedModel, special: bool, key: str) -> list[int]:
    parts = value if isinstance(value, list) else [value]
    ids: list[int] = []
    for position, part in enumerate(parts):
        if isinstance(part, str):
            ids += model.encode(part, bos=position == 0, special=special)
        elif whole_number(part) is not None:
            ids += token_ids([part], key, model.vocab_size)
        else:
            raise bad_request(f"{key}: {json.dumps(part)[:40]} is neither text nor a token id", key)
    return ids
