"""POST /tokenize, /detokenize and /apply-template: what a prompt is made of, without computing it."""

from starlette.responses import Response

from quengine.request.content_parts import IMAGE
from quengine.serve.apis.llama.requests import DetokenizeRequest, TokenizeRequest
from quengine.serve.apis.llama.schemas import DetokenizedText, RenderedPrompt
from quengine.serve.http import off_loop
from quengine.serve.models.model_host import ModelHost
from quengine.serve.processes.shared_text import TextJob
from quengine.serve.routes.constraints import read_tools
from quengine.serve.routes.images import read_urls, without_urls
from quengine.serve.routes.prompts import read_messages, template_variables, token_id
from quengine.serve.schemas.canonical import TemplateRequest
from quengine.serve.schemas.reading import token_ids


async def tokenize(host: ModelHost, body: TokenizeRequest) -> Response:
    """Text to tokens."""
    host.check_model_name(body.model)
    size = host.model.vocab_size
    parts = [body.content] if isinstance(body.content, str) else body.content
    job = TextJob(
        "tokenize",
        [[part if isinstance(part, str) else token_id(part, size, "content") for part in parts]],
        bos=body.add_special,
        special=body.parse_special,
        pieces=body.with_pieces,
    )
    result = await host.text_pool.perform(host.model, job)
    return Response(result.text, media_type="application/json")


async def detokenize(host: ModelHost, body: DetokenizeRequest) -> DetokenizedText:
    """Tokens to text."""
    host.check_model_name(body.model)
    model = host.model
    text = await off_loop(lambda: model.decode(token_ids(body.tokens, "tokens", model.vocab_size)))
    return DetokenizedText(content=text)


async def apply_template(host: ModelHost, body: TemplateRequest) -> RenderedPrompt:
    """A conversation's prompt."""
    host.check_model_name(body.model)
    model = host.model
    use = await read_tools(body, model)
    messages, ending = read_messages(body)
    shown, urls = without_urls(messages)
    await read_urls(host, urls, "messages")
    job = TextJob(
        "render_chat",
        messages=host.settings.chat.opened(shown),
        tools=model.answer_format.tools(use),
        variables=template_variables(
            model,
            body.chat_template_kwargs,
            body.reasoning_effort,
            "reasoning_effort",
            body.enable_thinking,
            host.settings.chat.variables,
        ),
        ending=ending,
    )
    result = await host.text_pool.perform(host.model, job)
    return RenderedPrompt(prompt=result.text.decode().replace(IMAGE, model.marker or IMAGE))
