"""POST /v1/responses, and GET and DELETE of a stored one."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quengine.serve.apis.openai.responses.answer import ResponseForm
from quengine.serve.apis.openai.responses.input_items import input_items, messages_of
from quengine.serve.apis.openai.responses.prompt import conversation_ids
from quengine.serve.apis.openai.responses.tools import offered_tools
from quengine.serve.apis.openai.schemas import DeletedResponse, InputItemList, PromptTokens, ResponseRequest
from quengine.serve.http import off_loop
from quengine.serve.models.model_host import ModelHost
from quengine.serve.models.registry import Models
from quengine.serve.routes.answer_events import Answer
from quengine.serve.routes.constraints import answer_constraint, read_constraint, read_tools
from quengine.serve.routes.images import counted
from quengine.serve.routes.prompts import reasoning_wanted
from quengine.serve.routes.sampling import requests_of, sampling_params
from quengine.serve.schemas.errors import bad_request
from quengine.serve.schemas.reading import shown
from quengine.structured.constraint_spec import ConstraintSpec

_MOST_ITEMS = 100


async def response_tokens(host: ModelHost, body: ResponseRequest) -> PromptTokens:
    """Tokens of a conversation's prompt."""
    (asked,) = (await responses(host, body)).requests
    return PromptTokens(input_tokens=await counted(host, asked.prompt, asked.images, "input"))


async def stored_response(models: Models, request: Request) -> Response:
    """A stored response."""
    if request.query_params.get("stream", "false") != "false":
        raise bad_request("stream is not supported of a stored response; only false is accepted", "stream")
    return Response(models.responses.response(request.path_params["id"]), media_type="application/json")


async def response_input_items(models: Models, request: Request) -> InputItemList:
    """The items that a stored response was made of.

    Newest first, unless `order` is asc, at most `limit` after `after`.

    Raises ApiError for a parameter that is wrong, or an item that is not there.
    """
    query = request.query_params
    order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    if order not in ("asc", "desc"):
        raise bad_request(f"order = {shown(order)}: must be asc or desc", "order", "invalid_value")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:4]) <= _MOST_ITEMS and len(limit) < 4):
        rule = f"must be a whole number from 1 to {_MOST_ITEMS}"
        raise bad_request(f"limit = {shown(limit)}: {rule}", "limit", "invalid_value")
    items = models.responses.input_items(request.path_params["id"])
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise bad_request(f"after = {shown(after)}: no such item is among them", "after", "invalid_value")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + int(limit)]
    return InputItemList(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=start + len(page) < len(items),
    )


async def delete_response(models: Models, request: Request) -> DeletedResponse:
    """Delete a stored response."""
    response_id = request.path_params["id"]
    models.responses.delete(response_id)
    return DeletedResponse(id=response_id)


async def responses(host: ModelHost, body: ResponseRequest) -> ResponseForm:
    """Answer items with items."""
    host.check_model_name(body.model)
    model, notes = host.model, list[str]()
    tools = offered_tools(body.tools, body.tool_choice, notes)
    asked = msgspec.structs.replace(body, tools=tools.functions, tool_choice=tools.choice)
    use = await read_tools(asked, model)
    text = await _text_constraint(body)
    _note_options(body, notes)
    earlier = host.responses.conversation(body.previous_response_id)
    items = input_items(body.input, host.responses)
    messages = messages_of(items, earlier, notes, bool(model.marker))
    if not messages:
        raise bad_request("input holds nothing that this model reads", "input")
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    variables, budget = reasoning_wanted(host, body, body.reasoning.effort, "reasoning.effort")
    described, shorten = model.answer_format.tools(use), body.truncation == "auto"
    prompt = await conversation_ids(host, [*system, *messages], described, variables, shorten, notes)
    end = model.end_of(prompt.ids)
    constraint = await answer_constraint(use, model, text, end, budget)
    params = await sampling_params(host, body, logprobs=None, constraint=constraint)
    shown = model.answer_format.shown(use)
    (request,) = requests_of(
        [prompt.ids], 1, params, shown, progress=body.reports, slot=body.id_slot, images=[prompt.images]
    )
    answer = Answer(host, request, 0, model.answer_format, use, end)
    return ResponseForm(host, body, answer, tools, [*earlier, *items], notes)


def _note_options(body: ResponseRequest, notes: list[str]) -> None:
    if body.text.verbosity not in (None, "medium"):
        notes.append(f'text.verbosity = "{body.text.verbosity}": it has no effect')
    if "message.output_text.logprobs" in (body.include or ()):
        notes.append("include: message.output_text.logprobs are not given")


async def _text_constraint(body: ResponseRequest) -> ConstraintSpec | None:
    """The constraint of `text.format`, or another that the request has. Raises ApiError for both."""
    other = await read_constraint(body)
    spec = await off_loop(lambda: ConstraintSpec.from_response_format(body.text.format), "text.format")
    if spec is not None and other is not None:
        raise bad_request("text.format and another constraint: only one of them can hold", "text.format")
    return spec or other
