"""llama-index-llms-openai-like: chats and completions, whole and as streams."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url, name = sys.argv[1:3]
for is_chat in (True, False):
    llm = OpenAILike(
        model=name,
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=is_chat,
        max_tokens=8,
        context_window=4096,
        max_retries=0,
        temperature=0,
    )
    whole = llm.complete("Once upon a time").text
    pieces = "".join(part.delta or "" for part in llm.stream_complete("Once upon a time"))
    assert whole and pieces == whole, (whole, pieces)
    messages = [ChatMessage(role="user", content="Say hi")]
    said = llm.chat(messages).message.content
    assert said and "".join(part.delta or "" for part in llm.stream_chat(messages)) == said
