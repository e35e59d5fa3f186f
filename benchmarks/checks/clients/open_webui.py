"""What Open WebUI 0.12 calls, by its two kinds of connections: lists of models, chats, titles, embeddings."""

import json
import sys

import httpx

url, name = sys.argv[1:3]
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Say hi"}]
TITLE = '### Task: Generate a concise title. ### Output: JSON format: { "title": "your title" }'

with httpx.Client(base_url=url, timeout=60, headers={"Authorization": "Bearer none"}) as client:
    # A connection of OpenAI's kind.
    listed = client.get("/v1/models").raise_for_status().json()
    assert name in [model["id"] for model in listed["data"]]
    chat = {"model": name, "messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/chat/completions", json={**chat, "max_tokens": 8}) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    asked = {
        "model": name,
        "messages": [{"role": "user", "content": TITLE}],
        "stream": False,
        "max_tokens": 8,
    }
    title = client.post("/v1/chat/completions", json=asked).raise_for_status().json()
    assert title["choices"][0]["message"]["role"] == "assistant"
    embedded = (
        client.post("/v1/embeddings", json={"input": ["a", "b"], "model": name}).raise_for_status().json()
    )
    assert len(embedded["data"]) == 2

    # A connection of Ollama's kind.
    assert client.get("/api/version").raise_for_status().json()["version"]
    assert name in [each["model"].partition(":")[0] for each in client.get("/api/tags").json()["models"]]
    assert "models" in client.get("/api/ps").raise_for_status().json()
    assert client.post("/api/show", json={"model": name}).raise_for_status().json()["capabilities"]
    body = {"model": f"{name}:latest", "messages": MESSAGES, "stream": True, "options": {"num_predict": 8}}
    with client.stream("POST", "/api/chat", json=body) as answer:
        parts = [json.loads(line) for line in answer.iter_lines()]
    assert parts[-1]["done"] and parts[-1]["eval_count"] > 0
    vectors = client.post("/api/embed", json={"model": name, "input": ["a", "b"]}).raise_for_status().json()
    assert len(vectors["embeddings"]) == 2
