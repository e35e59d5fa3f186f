"""The commands of `engine`: where each is, the heading it stands under in the help, and examples of it."""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from quengine.errors import EngineError
from quengine.foreign_flags import FOREIGN, NO_EFFECT

logger = logging.getLogger("quengine")

RUN, MODELS, MEASURE = "Run a model", "Models on this machine", "Measure and check"


@dataclass(frozen=True)
class CommandEntry:
    """One command.

    Attributes:
        function: in the file of the command's name; or a typer.Typer there, of several commands.
        panel: its heading.
        examples: command lines, each on a line of its own below the flags.
    """

    function: str
    panel: str
    examples: tuple[str, ...]


class PanelCommand(TyperCommand):
    """A command whose help has its flags under their headings, in plain text, where no table cuts a name."""

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for flag in self.get_params(ctx):
            heading = getattr(flag, "rich_help_panel", None) or f"{flag.param_type_name.title()}s"
            if (row := flag.get_help_record(ctx)) is not None:
                panels.setdefault(heading, []).append(row)
        _write_panels(panels, formatter)


class PanelGroup(TyperGroup):
    """A command of several, whose help has the first paragraph of each under its heading."""

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        rows = [row for flag in self.get_params(ctx) if (row := flag.get_help_record(ctx)) is not None]
        panels: dict[str, list[tuple[str, str]]] = {"Options": rows}
        for name, command in self.commands.items():
            heading = getattr(command, "rich_help_panel", None)
            about = (command.help or "").partition("\n\n")[0]
            panels.setdefault(heading if isinstance(heading, str) else "Commands", []).append((name, about))
        _write_panels(panels, formatter)


def _write_panels(panels: Mapping[str, list[tuple[str, str]]], formatter: Any) -> None:
    for panel, rows in panels.items():
        if rows:
            with formatter.section(panel):
                formatter.write_dl(rows)


class ExampleCommand(PanelCommand):
    """A command whose help ends with its examples, and that says what to write in place of other programs' flags."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if self.name == "serve":
            args = _effective(args)
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

    def format_epilog(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        del ctx
        _write_examples(self.name, formatter)


class ExampleGroup(PanelGroup):
    """A command of several, whose help ends with its examples; alone it shows that."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        return super().parse_args(ctx, args or ["--help"])  # type: ignore[arg-type]

    def format_epilog(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        del ctx
        _write_examples(self.name, formatter)


def _effective(args: list[str]) -> list[str]:
    """The arguments without the flags of llama-server that ask for what is so anyhow, which are named in a line."""
    left, dropped = list[str](), list[str]()
    given = iter(enumerate(args))
    for place, arg in given:
        if arg == "--":
            left += args[place:]
            break
        name, equals, value = arg.partition("=")
        values = NO_EFFECT.get(name)
        if values is None or (equals and not re.fullmatch(values, value)):
            left.append(arg)
            continue
        following = args[place + 1] if place + 1 < len(args) else ""
        if not equals and values and re.fullmatch(values, following):
            next(given)
        elif not equals and not re.fullmatch(values, ""):
            left.append(arg)  # another value, which would have an effect
            continue
        dropped.append(name)
    if dropped:
        logger.warning("without effect here: %s", ", ".join(f"{name} ({FOREIGN[name]})" for name in dropped))
    return left


def _write_examples(name: str | None, formatter: Any) -> None:
    with formatter.section("Examples"):
        for line in COMMANDS[name].examples if name in COMMANDS else ():
            formatter.write(f"  {line}\n")


COMMANDS = {
    "generate": CommandEntry(
        "generate",
        RUN,
        (
            'engine generate -m smollm2-135m --temp 0 "What is the capital of France?"',
            "engine generate -m qwen3-4b-q4k -c 8192 -f question.txt --json",
            'engine generate -m smollm2-135m "Summarize this:" < notes.txt',
        ),
    ),
    "chat": CommandEntry(
        "chat",
        RUN,
        ("engine chat -m smollm2-135m", 'engine chat -m smollm2-135m --system "Be brief." --session trip'),
    ),
    "run": CommandEntry(
        "run_model",
        RUN,
        (
            "engine run smollm2-135m",
            'engine run smollm2-135m "Why is the sky blue?"',
            'engine run smollm2-135m "Summarize this:" < notes.txt',
        ),
    ),
    "serve": CommandEntry(
        "serve",
        RUN,
        (
            "engine serve -m smollm2-135m",
            "engine serve -m qwen3-4b-q4k -c 8192 --host 0.0.0.0 --api-key-file keys",
        ),
    ),
    "launch": CommandEntry(
        "launch",
        RUN,
        (
            "engine launch claude -m qwen3-coder-next-q4k -c 65536",
            "engine launch codex                  # on the server that runs",
            'engine launch opencode -m qwen3-8b-q4k -- run "Explain this repository"',
        ),
    ),
    "ps": CommandEntry("ps", RUN, ("engine ps",)),
    "stop": CommandEntry("stop", RUN, ("engine stop qwen3-4b-q4k",)),
    "list": CommandEntry("list_models", MODELS, ("engine list --all",)),
    "pull": CommandEntry("pull", MODELS, ("engine pull qwen3-4b-q4k", "engine pull hf:user/repo:Q4_K_M")),
    "show": CommandEntry("show", MODELS, ("engine show smollm2-135m", "engine show model.gguf --tensors")),
    "create": CommandEntry(
        "create",
        MODELS,
        ("engine create pirate -f pirate.toml", "engine create mario -f Modelfile"),
    ),
    "cp": CommandEntry("copy", MODELS, ("engine cp pirate corsair", "engine cp qwen3-4b-q4k small")),
    "rm": CommandEntry("remove", MODELS, ("engine rm qwen3-4b-q4k", "engine rm -y pirate")),
    "convert": CommandEntry(
        "convert",
        MODELS,
        (
            "engine convert folder -o model-f16.gguf",
            "engine convert folder -o model-bf16.gguf --type bf16 --split-max-size 4G",
            "engine convert folder --mmproj -o mmproj-f16.gguf",
            "engine convert adapter-folder --base folder -o adapter.gguf",
        ),
    ),
    "imatrix": CommandEntry(
        "imatrix",
        MODELS,
        (
            "engine imatrix -m model-f16.gguf -f text.txt -o imatrix.gguf",
            "engine imatrix -m model-f16.gguf -f text.txt -o imatrix.gguf --save-every 50 --resume",
        ),
    ),
    "quantize": CommandEntry(
        "quantize",
        MODELS,
        (
            "engine quantize model-f16.gguf -o model-q4_k_m.gguf --type Q4_K_M",
            "engine quantize model-f16.gguf -o model-q4.gguf --type Q4_K_M --imatrix imatrix.gguf "
            "--tensor-type ffn_down=q6_k",
            "engine quantize model-f16.gguf --type IQ4_XS --dry-run",
        ),
    ),
    "merge": CommandEntry(
        "merge",
        MODELS,
        (
            "engine merge model.gguf --lora adapter.gguf -o merged.gguf",
            "engine merge model-f16.gguf --lora adapter-folder:0.5 --lora other.gguf -o merged.gguf --type Q4_K_M",
        ),
    ),
    "bench": CommandEntry(
        "bench",
        MEASURE,
        (
            "engine bench -m smollm2-135m -p 128,512 -n 64",
            "engine bench --synthetic mistral-7b -b 1,8,32 -o json",
        ),
    ),
    "parity": CommandEntry(
        "parity",
        MEASURE,
        ("engine parity -m smollm2-135m --quick", "engine parity --a original.gguf --b copy.gguf"),
    ),
    "perplexity": CommandEntry(
        "perplexity",
        MEASURE,
        (
            "engine perplexity -m smollm2-135m -f text.txt",
            "engine perplexity -m smollm2-135m --hellaswag hellaswag_val.txt --tasks 400 --json",
        ),
    ),
    "compare": CommandEntry(
        "compare",
        MEASURE,
        (
            "engine compare model-f16.gguf model-q4_k_m.gguf -f text.txt",
            "engine compare model-f16.gguf model-q4_k_m.gguf -f text.txt --by-tensor --plot costs.html",
            "engine compare model-f16.gguf model-q4_k_m.gguf -f text.txt --budget 4.5bpw",
            "engine compare logits.kld model-q4_k_m.gguf --json   # a file of llama-perplexity",
        ),
    ),
    "tokenize": CommandEntry("tokenize", MEASURE, ('engine tokenize -m smollm2-135m "Hello, world!"',)),
    "kernels": CommandEntry(
        "group",
        MEASURE,
        (
            "engine kernels build --arch sm_90 --models mistral-7b -o pack.zip",
            "engine kernels install pack.zip",
            "engine kernels list",
        ),
    ),
    "doctor": CommandEntry("doctor", MEASURE, ("engine doctor --json",)),
}
