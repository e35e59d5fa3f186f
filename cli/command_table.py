"""The commands of `engine`: where each is, the heading it stands under in the help, examples of it, and what is
written in place of flags that other programs have."""

from collections.abc import Iterator
from dataclasses import dataclass

import typer
from typer.core import TyperCommand, TyperGroup

from quengine.errors import EngineError

RUN, MODELS, MEASURE = "Run a model", "Models on this machine", "Measure and check"


@dataclass(frozen=True)
class Entry:
    """One command.

    Attributes:
        function: in the file of the command's name; or a typer.Typer there, of several commands.
        panel: its heading.
        examples: command lines, each on a line of its own below the flags.
        room: the folder of `cli/` with its file.
    """

    function: str
    panel: str
    examples: tuple[str, ...]
    room: str = "commands"


class ExampleCommand(TyperCommand):
    """A command whose help ends with its examples, and that says what to write in place of other programs' flags."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if instead := list(self._foreign(args)):
            raise EngineError(f"no such option: {'; '.join(dict.fromkeys(instead))}")
        return super().parse_args(ctx, args)  # type: ignore[arg-type]

    def _foreign(self, args: list[str]) -> Iterator[str]:
        """The flags among `args` that are in `FOREIGN` and not this command's, with what to write instead.

        Some would be read as others: -ngl as -n gl, -fa as -f a, -hf as -h.
        """
        own = {name: each for each in self.params for name in (*each.opts, *each.secondary_opts)}
        takes_value = False
        for arg in args:
            if arg == "--":
                return
            name = arg.partition("=")[0]
            if not takes_value and name not in own and name in FOREIGN:
                yield f"{name} ({FOREIGN[name]})"
            takes_value = arg in own and not getattr(own[arg], "is_flag", False)

    def get_help(self, ctx: typer.Context) -> str:  # type: ignore[override]
        return _with_examples(super().get_help(ctx), self.name)


class ExampleGroup(TyperGroup):
    """A command of several, whose help ends with its examples; alone it shows that."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        return super().parse_args(ctx, args or ["--help"])  # type: ignore[arg-type]

    def get_help(self, ctx: typer.Context) -> str:  # type: ignore[override]
        return _with_examples(super().get_help(ctx), self.name)


def _with_examples(text: str, name: str | None) -> str:
    examples = COMMANDS[name].examples if name in COMMANDS else ()
    return "\n".join([text, "Examples", *(f"  {line}" for line in examples), ""])


COMMANDS = {
    "generate": Entry(
        "generate",
        RUN,
        (
            'engine generate -m smollm2-135m --temp 0 "What is the capital of France?"',
            "engine generate -m qwen3-4b-q4k -c 8192 -f question.txt --json",
            'engine generate -m smollm2-135m "Summarize this:" < notes.txt',
        ),
    ),
    "chat": Entry(
        "chat",
        RUN,
        ("engine chat -m smollm2-135m", 'engine chat -m smollm2-135m --system "Be brief." --session trip'),
    ),
    "run": Entry(
        "run_model",
        RUN,
        (
            "engine run smollm2-135m",
            'engine run smollm2-135m "Why is the sky blue?"',
            'engine run smollm2-135m "Summarize this:" < notes.txt',
        ),
    ),
    "serve": Entry(
        "serve",
        RUN,
        (
            "engine serve -m smollm2-135m",
            "engine serve -m qwen3-4b-q4k -c 8192 --host 0.0.0.0 --api-key-file keys",
        ),
    ),
    "ps": Entry("ps", RUN, ("engine ps",)),
    "stop": Entry("stop", RUN, ("engine stop qwen3-4b-q4k",)),
    "list": Entry("list_models", MODELS, ("engine list --all",)),
    "pull": Entry("pull", MODELS, ("engine pull qwen3-4b-q4k", "engine pull hf:user/repo:Q4_K_M")),
    "show": Entry("show", MODELS, ("engine show smollm2-135m", "engine show model.gguf --tensors")),
    "create": Entry(
        "create",
        MODELS,
        ("engine create pirate -f pirate.toml", "engine create mario -f Modelfile"),
        "presets",
    ),
    "cp": Entry("copy", MODELS, ("engine cp pirate corsair", "engine cp qwen3-4b-q4k small"), "presets"),
    "rm": Entry("remove", MODELS, ("engine rm qwen3-4b-q4k", "engine rm -y pirate")),
    "bench": Entry(
        "bench",
        MEASURE,
        (
            "engine bench -m smollm2-135m -p 128,512 -n 64",
            "engine bench --synthetic mistral-7b -b 1,8,32 -o json",
        ),
    ),
    "parity": Entry(
        "parity",
        MEASURE,
        ("engine parity -m smollm2-135m --quick", "engine parity --a original.gguf --b copy.gguf"),
    ),
    "tokenize": Entry("tokenize", MEASURE, ('engine tokenize -m smollm2-135m "Hello, world!"',)),
    "kernels": Entry(
        "group",
        MEASURE,
        (
            "engine kernels build --arch sm_90 --models mistral-7b -o pack.zip",
            "engine kernels install pack.zip",
            "engine kernels list",
        ),
        "kernels",
    ),
    "doctor": Entry("doctor", MEASURE, ("engine doctor --json",)),
}


_ALWAYS, _OF_FILE, _OF_TEMPLATE = "always on", "the file says it", "found by the chat template"
_FOREIGN_FLAGS = {
    "-ngl --gpu-layers --n-gpu-layers": "all layers are on the --device; cpu for none, --n-cpu-moe for experts",
    "-fa --flash-attn -cb --cont-batching --jinja --embedding --embeddings --enable-prefix-caching": _ALWAYS,
    "--enable-chunked-prefill --enable-auto-tool-choice --props --no-warmup": _ALWAYS,
    "-ctk --cache-type-k -ctv --cache-type-v --kv-cache-dtype": "--cache-type f16 or q8_0, for both",
    "-hf -hfr --hf-repo": "-m hf:user/repo:QUANT",
    "-b --batch-size --max-num-batched-tokens": "--ubatch-size N",
    "-mg --main-gpu -dev": "--device cuda:N",
    "-tb --threads-batch": "--threads N, for prompts too",
    "--log-disable": "--no-stats",
    "--format": "--json-schema {} for any JSON",
    "--think": "--reasoning-effort, or --chat-template-kwargs with the template's own switch",
    "--keepalive": "engine serve --sleep-idle-seconds N",
    "--mlock": "--no-mmap copies the weights into memory",
    "-cnv --conversation -i --interactive": "engine chat",
    "-no-cnv --no-conversation": "--raw",
    "--color": "by itself on a terminal; NO_COLOR=1 for none",
    "-e --escape": "prompts are taken as they are; $'...' of the shell has escapes",
    "--no-display-prompt": "--show-prompt alone shows it",
    "-v --verbose --log-verbose": "before the command: engine -v ...",
    "--lora --lora-adapters --enable-lora": "there are no adapters",
    "--mmproj": "models here read text",
    "--no-webui": "--no-ui",
    "--max-model-len": "-c N",
    "--max-num-seqs": "--parallel N",
    "--tensor-parallel-size": "--tensor-parallel N",
    "--served-model-name": "--alias NAME",
    "--gpu-memory-utilization": "-c and --parallel say how large the cache is",
    "--dtype --quantization -q --load-format --trust-remote-code": _OF_FILE,
    "--tool-call-parser --reasoning-parser": _OF_TEMPLATE,
}
FOREIGN = {name: instead for names, instead in _FOREIGN_FLAGS.items() for name in names.split()}
"""Flags of llama.cpp, Ollama and vLLM that no command has, and what is written here in their place."""
