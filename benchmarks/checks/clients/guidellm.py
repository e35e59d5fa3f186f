"""guidellm: loads by chats, completions and responses, of two turns, streamed; embeddings."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

REQUESTS = 4
TOKENS = 12
FORMATS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
BACKENDS = {"/v1/responses": ",server_history=true"}
TURNS = {"/v1/chat/completions": 2, "/v1/responses": 2}


def load(url: str, name: str, model: str, form: str) -> dict[str, Any]:
    """The one benchmark of a run, as the client wrote it."""
    out = Path(form.strip("/").replace("/", "-") + ".json").absolute()
    data = f"kind=synthetic_text,prompt_tokens=40,output_tokens={TOKENS},turns={TURNS.get(form, 1)}"
    flags = {
        "backend": f"kind=openai_http,target={url},model={name},request_format={form}{BACKENDS.get(form, '')}",
        "profile": "kind=concurrent,streams=2",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "tokenizer": f"kind=hf_auto,model={model}",
        "data": data,
        "output": f"kind=json,path={out}",
    }
    given = [part for flag, value in flags.items() for part in (f"--{flag}", value)]
    subprocess.run(["guidellm", "run", *given, "--disable-console"], check=True)
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    return benchmark


def main(url: str, name: str, model: str) -> None:
    for form in FORMATS:
        benchmark = load(url, name, model, form)
        requests = benchmark["requests"]
        assert len(requests["successful"]) == REQUESTS, (form, requests)
        assert not requests["errored"], (form, requests["errored"])
        for request in requests["successful"]:
            if form != "/v1/embeddings":
                assert request["output_metrics"]["text_tokens"] == TOKENS, (form, request)


main(*sys.argv[1:4])
