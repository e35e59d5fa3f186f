"""Runs programs of others against a server of a tiny model, each in a virtual environment of its own.

    python -m benchmarks.checks.clients --environments /tmp/clients [--only pydantic-ai-slim] [--install]

`--install` makes the environments, of PyPI's newest versions; they stay. A client is a script beside this file, which
gets the server's address, the model's name and its folder, and fails by itself. Prints a line for each client with its
version; exits with 1 where one has failed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from quengine import LLM, SamplingParams
from quengine.serve.processes.engine_llm import LLMEngine
from tests.engine.serve.serving import serving
from tests.gguf_builder import ModelSizes
from tests.models.hf.test_hf_vs_gguf import write_tokenizer, written_both_ways

CLIENTS: Mapping[str, tuple[Sequence[str], str]] = {
    "openai-agents": (("openai-agents",), "openai_agents.py"),
    "pydantic-ai-slim": (("pydantic-ai-slim[openai]",), "pydantic_ai.py"),
    "llama-index-llms-openai-like": (("llama-index-llms-openai-like",), "llama_index.py"),
    "lm-eval": (("lm-eval[api]", "transformers"), "lm_eval.py"),
    "open-webui": (("httpx",), "open_webui.py"),
    "aiperf": (("aiperf",), "aiperf.py"),
    "guidellm": (("guidellm",), "guidellm.py"),
}
"""Package: what pip installs, and the script. Open WebUI is too large to install: its calls are written down."""

CONTEXT = 8192
SECONDS = 900


def install(environment: Path, requirements: Sequence[str]) -> None:
    """A virtual environment with the packages."""
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    subprocess.run([environment / "bin" / "pip", "install", "-q", "-U", *requirements], check=True)


def version(environment: Path, package: str) -> str:
    program = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run(
        [environment / "bin" / "python", "-c", program], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "-"


def run(name: str, environment: Path, url: str, model: Path) -> bool:
    """Whether the client's script went through; what it printed where it did not."""
    script = Path(__file__).parent / CLIENTS[name][1]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / f"run_{script.name}"  # by a name that hides no package
        copy.write_text(script.read_text("utf-8"), "utf-8")
        done = subprocess.run(
            [environment / "bin" / "python", copy, url, "tiny", model],
            cwd=folder,
            env={
                "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
                "HOME": folder,
                "HF_HUB_OFFLINE": "1",
                "TRANSFORMERS_OFFLINE": "1",
            },
            capture_output=True,
            text=True,
            timeout=SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    good = done.returncode == 0
    print(
        f"{name} {version(environment, name)}: {'passes' if good else f'FAILS ({done.returncode})'}",
        flush=True,
    )
    if not good:
        print((done.stdout + done.stderr)[-3000:])
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environments", type=Path, required=True, help="a folder of virtual environments")
    parser.add_argument("--only", choices=CLIENTS, action="append")
    parser.add_argument("--install", action="store_true")
    args = parser.parse_args()
    chosen = [name for name in CLIENTS if args.only is None or name in args.only]
    for name in chosen if args.install else ():
        install(args.environments / name, CLIENTS[name][0])
    with tempfile.TemporaryDirectory() as made:
        sizes = ModelSizes(embedding=64, feed_forward=128, context=CONTEXT)
        model = written_both_ways(Path(made), sizes, "F16", tied=False)[1].path
        write_tokenizer(model)

        def engine() -> LLMEngine:
            return LLMEngine(LLM(model, device="cpu", parallel=4, ctx_size=CONTEXT))

        settings = {"model_names": ("tiny",), "defaults": SamplingParams(max_tokens=64)}
        with serving(engine, settings=settings) as served:
            results = [run(name, args.environments / name, served.url, model) for name in chosen]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
