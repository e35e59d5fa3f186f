"""aiperf: loads of its endpoints of text, streamed, and of embeddings; its reading of `/metrics`."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REQUESTS = 4
TOKENS = 12
LOAD = ("--request-count", str(REQUESTS), "--concurrency", "2", "--isl", "40", "--osl", str(TOKENS))
EXACT = ("--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{TOKENS}")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
"""Offline, it looks for a tokenizer among the hub's files alone, and finds none by its path."""
RUNS: Mapping[str, Sequence[str]] = {
    "chat": ("--streaming", "--use-server-token-count", "--per-chunk-usage", *EXACT),
    "completions": ("--streaming", "--use-server-token-count", *EXACT),
    "responses": ("--streaming",),  # it reads no usage of a response that ends at its limit
    "messages": ("--streaming", "--use-server-token-count"),
    "embeddings": (),
}


def profile(url: str, name: str, model: str, kind: str, flags: Sequence[str]) -> Mapping[str, Any]:
    """The results that the client wrote of a run."""
    out = Path(f"out-{len(list(Path().glob('out-*')))}")
    where = (
        "-m",
        name,
        "-u",
        url,
        "--endpoint-type",
        kind,
        "--tokenizer",
        model,
        "--output-artifact-dir",
        str(out),
    )
    subprocess.run(["aiperf", "profile", *where, "--ui", "none", *LOAD, *flags], check=True, env=ENVIRONMENT)
    scraped = json.loads((out / "server_metrics_export.json").read_text())["metrics"]
    assert any(metric.startswith("quengine") for metric in scraped), list(scraped)
    written: Mapping[str, Any] = json.loads((out / "profile_export_aiperf.json").read_text())
    return written


def main(url: str, name: str, model: str) -> None:
    for kind, flags in RUNS.items():
        written = profile(url, name, model, kind, flags)
        assert written["request_count"]["avg"] == REQUESTS, (kind, written)
        assert not written.get("error_summary"), (kind, written["error_summary"])
        if flags:
            assert written["time_to_first_token"]["avg"] > 0, kind
        if EXACT[1] in flags:
            assert written["output_sequence_length"]["avg"] == TOKENS, (
                kind,
                written["output_sequence_length"],
            )


main(*sys.argv[1:4])
