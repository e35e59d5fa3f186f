"""How BPE models split text into words before merging, by the name in `tokenizer.ggml.pre`.

The names are those that llama.cpp gives (src/llama-vocab.cpp); `split_patterns` has the expressions.
"""

from dataclasses import dataclass, replace

from quengine.models.tokenizer import split_patterns as p
from quengine.models.tokenizer.errors import TokenizerError


@dataclass(frozen=True)
class DigitGroups:
    """Runs of `digits`, an expression, are cut into groups of three from their right end, before all patterns.

    cut_before: the first group begins a piece if it has three digits, and the last may go on into what follows; else
    the first stays with what comes before it, and the last ends a piece.
    """

    digits: str
    cut_before: bool


@dataclass(frozen=True)
class PreTokenizer:
    """How text becomes the words that merges work in, and what else a name of `tokenizer.ggml.pre` stands for.

    patterns: each in turn splits the pieces that the one before it left; matches and the text between are words.
    ignore_merges: a word that is a token is taken whole, whatever the merges would give.
    add_bos: whether a prompt begins with BOS where the file does not say.
    always_bos: a prompt begins with BOS whatever the file says.
    byte_level: tokens are spelled in GPT-2's byte alphabet; else in characters, spaces as U+2581.
    whole_newlines: a run of newlines that is a token is taken whole (spelled in characters only).
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    always_bos: bool = False
    digit_groups: DigitGroups | None = None
    byte_level: bool = True
    whole_newlines: bool = False


# As llama.cpp does it, where white space before digits stays in one piece with the first of them.
_FROM_THE_RIGHT = DigitGroups(p.unicode_15(p.DIGITS), cut_before=False)
_PRE_TOKENIZERS = {
    "default": PreTokenizer((p.PUNCTUATION, p.GPT2, p.DIGITS, p.THREE_ASCII_DIGITS)),
    "gpt-2": PreTokenizer((p.GPT2,)),
    "starcoder": PreTokenizer((p.DIGIT, p.GPT2)),
    "falcon": PreTokenizer((p.PUNCTUATION_AND_TICK, p.GPT2, p.THREE_ASCII_DIGITS)),
    "llama-bpe": PreTokenizer((p.LLAMA3,), ignore_merges=True, add_bos=True),
    "dbrx": PreTokenizer((p.LLAMA3,)),
    "glm4": PreTokenizer((p.LLAMA3,), ignore_merges=True),
    "jais-2": PreTokenizer((p.JAIS2,)),
    "minicpm5": PreTokenizer((p.THREE_DIGITS, p.MINICPM5), ignore_merges=True),
    "qwen2": PreTokenizer((p.QWEN2,)),
    "qwen35": PreTokenizer((p.QWEN35,)),
    "ufakzeka": PreTokenizer((p.QWEN2_WITHOUT_CONTRACTIONS,)),
    "laguna": PreTokenizer((p.NEWLINE_RUNS, p.QWEN2)),
    "seed-coder": PreTokenizer((p.SEED_CODER,)),
    "bailingmoe": PreTokenizer((p.BAILING,)),
    "exaone-moe": PreTokenizer((p.EXAONE_MOE,)),
    "tekken": PreTokenizer((p.TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer((p.O200K,)),
    "granite-embed-multi-97m": PreTokenizer((p.GRANITE_EMBEDDING,), ignore_merges=True),
    "tiny_aya": PreTokenizer((p.TINY_AYA,), digit_groups=_FROM_THE_RIGHT),
    "youtu": PreTokenizer(p.YOUTU, ignore_merges=True),
    "kimi-k2": PreTokenizer((p.KIMI_K2,)),
    "superbpe": PreTokenizer((p.DIGITS,), digit_groups=DigitGroups(p.ASCII_DIGITS, cut_before=True)),
    "deepseek-llm": PreTokenizer(p.DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(p.DEEPSEEK_CODER),
    "deepseek-v3": PreTokenizer(p.DEEPSEEK_V3),
    "spark2_5": PreTokenizer(p.SPARK),
    "afmoe": PreTokenizer(p.AFMOE, digit_groups=_FROM_THE_RIGHT),
    "bloom": PreTokenizer((p.BLOOM,)),
    "viking": PreTokenizer((p.BLOOM, p.DIGIT)),
    "chameleon": PreTokenizer(p.CHAMELEON, add_bos=True),
    "gemma4": PreTokenizer((p.NEWLINE_RUNS,), always_bos=True, byte_level=False, whole_newlines=True),
    "sarvam-moe": PreTokenizer((p.NEWLINE_RUNS,), byte_level=False),
}
# Names of models that split as another one does.
_ALIASES = {
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    "gpt-2": """
        olmo phi-2 mpt jais trillion gigachat a.x-4.0 mellum exaone4 granite-docling modern-bert roberta-bpe
        jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code""",
    "starcoder": "smollm refact command-r codeshell exaone minerva-7b mellum2",
    "dbrx": "smaug-bpe chatglm-bpe",
    "glm4": "glm5",
    "qwen2": "deepseek-r1-qwen megrez stablelm2 hunyuan solar-open grok-2 kormo f2llmv2",
    "bailingmoe": "bailingmoe2 llada-moe",
    "tekken": "mistral",
    "gpt-4o": "llama4 kanana2 talkie minimax-m2",
    "tiny_aya": "cohere2moe",
    "deepseek-v3": "hunyuan-dense joyai-llm hy_v4",
    "bloom": "poro-chat gpt3-finnish",
    "gemma4": "granite-embed-multi-311m",
}
_CANONICAL = {alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()}
# Patterns of the models' own tokenizers, whose character categories are the regex engine's.
_OWN_CATEGORIES = ("tekken", "gpt-4o")


def pre_tokenizer_names() -> list[str]:
    """All names of `tokenizer.ggml.pre` that are supported."""
    return sorted(_PRE_TOKENIZERS.keys() | _CANONICAL.keys())


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer of that GGUF name. Raises TokenizerError that lists the supported ones for another."""
    canonical = _CANONICAL.get(name, name)
    found = _PRE_TOKENIZERS.get(canonical)
    if found is None:
        raise TokenizerError(
            f"pre-tokenizer {name!r} is not supported; supported: {', '.join(pre_tokenizer_names())}"
        )
    if canonical in _OWN_CATEGORIES:
        return found
    return replace(found, patterns=tuple(map(p.unicode_15, found.patterns)))
