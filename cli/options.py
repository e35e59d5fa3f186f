"""The flags that several commands share, spelled as llama.cpp's users type them, and what they turn into."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quengine.errors import EngineError
from quengine.platform.input_files import read_text

if TYPE_CHECKING:
    from quengine.kernels.kv.cache_types import CacheType
    from quengine.request.sampling_params import SamplingParams
    from quengine.structured.constraint_spec import ConstraintSpec

_SAMPLING = "Sampling"
_RUN = "How it runs"
_DRAFTS = "Drafts (the text stays the same)"

Model = Annotated[
    str,
    typer.Option(
        "-m", "--model", help="Alias, hf:user/repo:QUANT, GGUF file or checkpoint folder.", show_default=False
    ),
]
CtxSize = Annotated[
    int | None,
    typer.Option(
        "-c", "--ctx-size", help="Context in tokens. [default: the model's, cut to fit]", rich_help_panel=_RUN
    ),
]
CacheTypeName = Annotated[
    str,
    typer.Option(
        "--cache-type", help="Keys and values as f16 or q8_0 (half the memory).", rich_help_panel=_RUN
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="The same bits for every chunk size, history and batch.",
        rich_help_panel=_RUN,
    ),
]
Mmap = Annotated[
    bool,
    typer.Option(
        "--mmap/--no-mmap",
        help="On the CPU: use the weights where the file is mapped, or copy them first (slower start, faster tokens).",
        rich_help_panel=_RUN,
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.", rich_help_panel=_RUN)]
Threads = Annotated[
    int | None,
    typer.Option("-t", "--threads", help="CPU threads. [default: physical cores]", rich_help_panel=_RUN),
]
BackendName = Annotated[
    str, typer.Option("--backend", help="auto, or reference (float64, slow).", rich_help_panel=_RUN)
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        "--model-draft",
        "-md",
        metavar="MODEL",
        help="A small model of the same vocabulary that drafts tokens.",
        rich_help_panel=_DRAFTS,
    ),
]
DraftNgram = Annotated[
    int,
    typer.Option(
        "--draft-ngram",
        metavar="N",
        help="Look runs of up to N tokens up in the text itself, for what followed; 0: off.",
        rich_help_panel=_DRAFTS,
    ),
]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        "--draft-tokens",
        "--draft-max",
        "--draft",
        metavar="K",
        help="Tokens of a draft at most. [default: 4; CUDA: 7]",
        rich_help_panel=_DRAFTS,
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option(
        "-n", "--max-tokens", "--n-predict", help="Most tokens to generate; -1: until the context is full."
    ),
]
Temperature = Annotated[
    float, typer.Option("--temp", help="0 takes the most likely token.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[
    int, typer.Option("--top-k", help="Keep the K most likely; 0: all.", rich_help_panel=_SAMPLING)
]
TopP = Annotated[
    float, typer.Option("--top-p", help="Keep the likely ones up to P; 1: all.", rich_help_panel=_SAMPLING)
]
MinP = Annotated[
    float, typer.Option("--min-p", help="Drop those under P times the likeliest.", rich_help_panel=_SAMPLING)
]
TypicalP = Annotated[
    float, typer.Option("--typical", help="Locally typical mass; 1: off.", rich_help_panel=_SAMPLING)
]
RepeatPenalty = Annotated[
    float, typer.Option("--repeat-penalty", help="Of recent tokens; 1: off.", rich_help_panel=_SAMPLING)
]
RepeatLastN = Annotated[
    int,
    typer.Option(
        "--repeat-last-n", help="How many tokens penalties look at; -1: all.", rich_help_panel=_SAMPLING
    ),
]
PresencePenalty = Annotated[
    float, typer.Option("--presence-penalty", help="0: off.", rich_help_panel=_SAMPLING)
]
FrequencyPenalty = Annotated[
    float, typer.Option("--frequency-penalty", help="0: off.", rich_help_panel=_SAMPLING)
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias", help="TOKEN_ID+BIAS or TOKEN_ID-BIAS; repeatable.", rich_help_panel=_SAMPLING
    ),
]
Seed = Annotated[
    int, typer.Option("-s", "--seed", help="Same seed, same text; -1: a new one.", rich_help_panel=_SAMPLING)
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", "-r", help="End before this text; repeatable.", rich_help_panel=_SAMPLING),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after the model's end token.", rich_help_panel=_SAMPLING)
]
JsonSchema = Annotated[
    str | None,
    typer.Option(
        "-j",
        "--json-schema",
        "--json-schema-file",
        "-jf",
        metavar="FILE|JSON",
        help="Answer in JSON that is valid under this schema; {} takes any JSON.",
        rich_help_panel=_SAMPLING,
    ),
]
Grammar = Annotated[
    str | None,
    typer.Option(
        "--grammar",
        "--grammar-file",
        metavar="FILE|TEXT",
        help="Answer in this grammar's language, GBNF or Lark.",
        rich_help_panel=_SAMPLING,
    ),
]
System = Annotated[str | None, typer.Option("--system", "-sys", help="System message.")]


@dataclass(frozen=True)
class Drafts:
    """What the flags on drafts say, by the names that `LLM` has for it."""

    draft_model: str | None = None
    draft_ngram: int = 0
    draft_tokens: int | None = None


def sampling_params(
    *,
    max_tokens: int,
    temp: float,
    top_k: int,
    top_p: float,
    min_p: float,
    typical: float,
    repeat_penalty: float,
    repeat_last_n: int,
    presence_penalty: float,
    frequency_penalty: float,
    logit_bias: Sequence[str] | None,
    seed: int,
    stop: Sequence[str] | None,
    ignore_eos: bool,
    json_schema: str | None,
    grammar: str | None,
    logprobs: int | None = None,
) -> "SamplingParams":
    """What the sampling flags mean; -1 stands for "no limit" in max_tokens and "draw one" in seed."""
    from quengine.request.sampling_params import SamplingParams

    return SamplingParams(
        max_tokens=None if max_tokens == -1 else max_tokens,
        temperature=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical,
        repeat_penalty=repeat_penalty,
        repeat_last_n=repeat_last_n,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=dict(_bias(text) for text in logit_bias or ()),
        seed=None if seed == -1 else seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        constraint=_constraint(json_schema, grammar),
    )


def cache_type(name: str) -> "CacheType":
    """What --cache-type names. Raises EngineError for a type that there is none of."""
    from quengine.kernels.kv.cache_types import CACHE_TYPES

    for known in CACHE_TYPES:
        if known == name:
            return known
    raise EngineError(f"--cache-type {name!r}: must be {' or '.join(CACHE_TYPES)}")


def _constraint(json_schema: str | None, grammar: str | None) -> "ConstraintSpec | None":
    """What --json-schema and --grammar ask for; each takes a file's name or the text itself."""
    from quengine.structured.constraint_spec import ConstraintSpec, is_grammar

    if json_schema is not None and grammar is not None:
        raise EngineError("--json-schema and --grammar cannot both hold: give one of them")
    if json_schema is not None:
        inline = json_schema.lstrip().startswith(("{", "[", '"'))
        return ConstraintSpec.json_schema(
            json_schema if inline else read_text(Path(json_schema), "--json-schema: cannot read")
        )
    if grammar is not None:
        return ConstraintSpec.grammar(
            grammar if is_grammar(grammar) else read_text(Path(grammar), "--grammar: cannot read")
        )
    return None


def _bias(text: str) -> tuple[int, float]:
    for sign in "+-":
        token, found, value = text.partition(sign)
        if found and token.isdecimal():
            try:
                return int(token), float(sign + value)
            except ValueError:
                break
    raise EngineError(
        f"--logit-bias {text!r}: must be TOKEN_ID+BIAS or TOKEN_ID-BIAS, such as 15043+1 or 2-inf"
    )
