"""Coding agents, headless, against a server whose model says given texts: what each finds in the prefix cache.

    npm install --prefix /tmp/agents @anthropic-ai/claude-code @openai/codex opencode-ai @qwen-code/qwen-code cline
    python3 -m venv /tmp/agents && /tmp/agents/bin/pip install aider-chat
    python -m benchmarks.checks.agents --clients /tmp/agents [--only claude] [--template Qwen3.5-4B]

Run from the repository root. Each client is given two tasks, the second in the same conversation where it can do that
headless; for each the model calls a tool that reads a file, then answers. The engine is a real one, with random
weights and a grammar that allows the given text alone, so that prompts, cache and counts are those of any model.
Prints a line for each request and the clients' versions. Exits with 1 where a request computes again what an earlier
one of its conversation had in its prompt, or where a client does not come to its answers.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from quengine import LLM, SamplingParams
from quengine.cli.agents import AGENTS, Endpoint
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.serve.processes.engine_llm import LLMEngine
from quengine.serve.processes.shared_engine import EngineWork, Event, Finished, GenerationRequest
from quengine.structured.constraint_spec import ConstraintSpec
from tests.engine.serve.serving import Served, serving
from tests.gguf_builder import ModelSizes, bpe_vocabulary
from tests.llama_cpp_source import llama_cpp_source
from tests.tiny_models import write_tiny

CONTEXT = 131072
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONTENT = "the-text-of-the-file"
TASKS = ("What is in notes.txt? (first task)", "And in notes.txt now? (second task)")
ANSWERS = ("First-answer.", "Second-answer.")
BESIDE = "A-title."
"""The answer to a request beside the conversation, as for its title."""
TIMEOUT = float(os.environ.get("AGENT_SECONDS", 300))
"""Time limit of a task; a machine with other work takes longer."""
KEPT = 0.99
"""Least share of a prompt that the client's next prompt begins with; the newest message may be rewritten."""


@dataclass(frozen=True)
class Turn:
    """A request of the conversation: its prompt, and the tokens of it that were found in the cache."""

    prompt: Sequence[int]
    cached: int


@dataclass(frozen=True)
class Client:
    """A program and its arguments for a task; `tool` and `arguments` of the call by which it reads a file, where it has
    tools. kept: as KEPT, across tasks."""

    name: str
    tool: Sequence[str]
    arguments: Callable[[Path], Mapping[str, Any]]
    command: Callable[[str, bool, Path], Sequence[str]]
    kept: float = KEPT


CLIENTS = (
    Client(
        "claude",
        ("Read",),
        lambda folder: {"file_path": str(folder / "notes.txt")},
        lambda task, again, _: ["-p", *(["--continue"] if again else []), task],
    ),
    Client(
        "codex",
        ("exec_command", "shell_command", "shell"),
        lambda _: {"cmd": "cat notes.txt"},
        lambda task, again, _: [
            *("exec", "--skip-git-repo-check", "-s", "danger-full-access"),
            *(["resume", "--last", task] if again else [task]),
        ],
    ),
    Client(
        "opencode",
        ("read",),
        lambda folder: {"filePath": str(folder / "notes.txt")},
        lambda task, again, folder: ["run", *(["--continue"] if again else []), "--dir", str(folder), task],
    ),
    Client(
        "qwen",
        ("read_file",),
        lambda folder: {"file_path": str(folder / "notes.txt")},
        lambda task, again, _: ["--yolo", *(["--continue"] if again else []), "-p", task],
    ),
    Client(
        "cline",
        ("read_files",),
        lambda folder: {"files": [{"path": str(folder / "notes.txt")}]},
        lambda task, _, folder: ["-c", str(folder), task],  # headless it goes on with no conversation
        kept=0.95,
    ),
    Client(
        "aider",
        (),
        lambda _: {},
        lambda task, again, folder: [
            *("--yes-always", "--no-git", "--no-pretty", "--no-detect-urls"),
            *(["--restore-chat-history"] if again else []),
            *(str(folder / "notes.txt"), "--message", task),
        ],
        kept=0.5,  # the conversation goes between its instructions and the files
    ),
)


class ScriptedEngine(LLMEngine):
    """Says what a client's conversation has next: the call while the newest task has no result, then its answer."""

    def __init__(self, llm: LLM, client: Client, folder: Path) -> None:
        super().__init__(llm)
        self._client, self._folder = client, folder
        self._told: dict[int, Sequence[int]] = {}
        self.turns: list[Turn] = []

    def add(self, request: EngineWork) -> None:
        if isinstance(request, GenerationRequest):
            text = self._text(self.model.decode(request.prompt))
            constraint = ConstraintSpec.grammar(f"root ::= {json.dumps(text)}")
            params = replace(request.params, constraint=constraint)
            request = msgspec.structs.replace(request, params=params)
            if text != BESIDE:
                self._told[request.id] = request.prompt
        super().add(request)

    def step(self) -> list[Event]:
        events = super().step()
        for event in events:
            if isinstance(event, Finished) and event.request_id in self._told:
                prompt = self._told.pop(event.request_id)
                self.turns.append(Turn(prompt, event.timings.cached_tokens))
        return events

    def _text(self, prompt: str) -> str:
        newest = max(range(len(TASKS)), key=lambda n: prompt.rfind(TASKS[n]))
        tool = next((name for name in self._client.tool if f'"{name}"' in prompt), None)
        if (self._client.tool and tool is None) or prompt.rfind(TASKS[newest]) < 0:
            return BESIDE
        ends_thought = "</think>\n\n" if prompt.endswith("<think>\n") else ""
        if tool is None or CONTENT in prompt[prompt.rfind(TASKS[newest]) :]:
            return ends_thought + ANSWERS[newest]
        arguments = "".join(
            f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
            for name, value in self._client.arguments(self._folder).items()
        )
        return f"{ends_thought}<tool_call>\n<function={tool}>\n{arguments}</function>\n</tool_call>"


def common(first: Sequence[int], second: Sequence[int]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )


def run(client: Client, model: Path) -> bool:
    """Both tasks; whether all went well."""
    version = subprocess.run([client.name, "--version"], capture_output=True, text=True, timeout=60).stdout
    print(f"{client.name} {(re.search(r'[0-9]+[.][0-9.]+', version) or ['?'])[0]}")
    engines: list[ScriptedEngine] = []
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "notes.txt").write_text(CONTENT + "\n")

        def engine() -> ScriptedEngine:
            llm = LLM(model, device="cpu", parallel=4, ctx_size=CONTEXT)
            engines.append(ScriptedEngine(llm, client, Path(folder)))
            return engines[0]

        with serving(engine, settings={"model_names": ("tiny",), "defaults": SamplingParams()}) as served:
            outputs = [ask(client, served, task, n > 0, home, folder) for n, task in enumerate(TASKS)]
    good = all(answer in output for answer, output in zip(ANSWERS, outputs, strict=True))
    for answer, output in zip(ANSWERS, outputs, strict=True):
        if answer not in output:
            print(f"  no {answer} in: {' '.join(output.split())[-400:]}")
    return report(client, engines[0].turns) and good


def ask(client: Client, served: Served, task: str, again: bool, home: str, folder: str) -> str:
    """What a client prints, set up as `engine launch` does."""
    start = AGENTS[client.name].start(Endpoint(served.url, "none", "tiny", CONTEXT), Path(home))
    done = subprocess.run(
        [client.name, *start.arguments, *client.command(task, again, Path(folder))],
        cwd=folder,
        env={"HOME": home, "PATH": os.environ["PATH"], **start.environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout + done.stderr


def report(client: Client, turns: Sequence[Turn]) -> bool:
    """A line for each request; whether each begins with nearly all of the one before, and found that in the cache."""
    requests = 2 if client.tool else 1  # of a task
    good = len(turns) >= requests * len(TASKS)
    for n, (before, turn) in enumerate(zip((None, *turns), turns, strict=False)):
        shared = 0 if before is None else common(turn.prompt, before.prompt)
        line = f"  prompt {len(turn.prompt):6} tokens, {turn.cached:6} cached, {shared:6} shared with the one before"
        kept = KEPT if n % requests else client.kept
        whole = before is None or shared >= kept * len(before.prompt)
        reused = turn.cached >= shared // BLOCK_SIZE * BLOCK_SIZE
        print(line + ("" if whole and reused else ": computed again"))
        good = good and whole and reused
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=Path, required=True, help="where npm and pip installed the clients")
    parser.add_argument("--only", choices=[client.name for client in CLIENTS], action="append")
    parser.add_argument("--template", default="Qwen3.5-4B", help="of llama.cpp's models/templates")
    args = parser.parse_args()
    programs = args.clients.resolve()
    os.environ["PATH"] = f"{programs}/node_modules/.bin:{programs}/bin:{os.environ['PATH']}"
    template = (llama_cpp_source() / "models" / "templates" / f"{args.template}.jinja").read_text("utf-8")
    words = bpe_vocabulary(special=(*MARKS, "<think>", "</think>", "<tool_call>", "</tool_call>"))
    tokens = words["tokenizer.ggml.tokens"]
    changes = {"tokenizer.chat_template": template, "tokenizer.ggml.eos_token_id": tokens.index(MARKS[2])}
    with tempfile.TemporaryDirectory() as folder:
        sizes = ModelSizes(embedding=64, feed_forward=64, context=CONTEXT, blocks=1)
        model = write_tiny(Path(folder) / "tiny.gguf", kind="Q8_0", sizes=sizes, vocabulary=words | changes)
        chosen = [client for client in CLIENTS if args.only is None or client.name in args.only]
        results = [run(client, model) for client in chosen]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
