"""A server that answers over web sockets: a text comes in, pieces of its answer go out, an empty one ends it.

Usage: python examples/web_socket.py smollm2-135m, then connect to ws://127.0.0.1:8000/chat. It needs `websockets`.
"""

import sys

import uvicorn
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from quengine import AsyncLLM, SamplingParams


def app(llm: AsyncLLM) -> Starlette:
    async def chat(socket: WebSocket) -> None:
        await socket.accept()
        messages = list[dict[str, str]]()
        try:
            while True:
                messages.append({"role": "user", "content": await socket.receive_text()})
                stream = llm.stream_chat(messages, SamplingParams(max_tokens=256))
                async for piece in stream:
                    await socket.send_text(piece)
                await socket.send_text("")
                messages.append({"role": "assistant", "content": stream.completion.text})
        except WebSocketDisconnect:
            pass  # the stream goes with this function, and its request with the stream

    return Starlette(routes=[WebSocketRoute("/chat", chat)])


def main(model: str) -> None:
    llm = AsyncLLM(model, ctx_size=4096, parallel=8)
    try:
        uvicorn.run(app(llm), host="127.0.0.1", port=8000)
    finally:
        llm.close()


if __name__ == "__main__":
    main(sys.argv[1])
