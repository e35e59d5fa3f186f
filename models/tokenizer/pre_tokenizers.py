r"""How BPE models split text into words before merging, by the name in `tokenizer.ggml.pre`.

Names and patterns are facts of the format: those of llama.cpp (src/llama-vocab.cpp, src/unicode.cpp), written for the
Oniguruma engine of the `tokenizers` library. Two patterns follow the model's own tokenizer, which llama.cpp only
approximates: TEKKEN is mistral-common's, O200K is tiktoken's.

Characters have the categories of Unicode 15.1, as in llama.cpp, whatever the regex engine has: otherwise a text's ids
would change with a library's release. TEKKEN and O200K keep the engine's categories, as the originals do.
"""

import re
from dataclasses import dataclass, replace
from functools import cache

from quengine.models.tokenizer.vocabulary import TokenizerError

# Code points that Unicode 16.0 assigned (UCD DerivedAge.txt); in 15.1 they have no category.
NEW_IN_UNICODE_16 = """
    897 1B4E-1B4F 1B7F 1C89-1C8A 2427-2429 31E4-31E5 A7CB-A7CD A7DA-A7DC 105C0-105F3 10D40-10D65 10D69-10D85
    10D8E-10D8F 10EC2-10EC4 10EFC 11380-11389 1138B 1138E 11390-113B5 113B7-113C0 113C2 113C5 113C7-113CA
    113CC-113D5 113D7-113D8 113E1-113E2 116D0-116E3 11BC0-11BE1 11BF0-11BF9 11F5A 13460-143FA 16100-16139
    16D40-16D79 18CFF 1CC00-1CCF9 1CD00-1CEB3 1E5D0-1E5FA 1E5FF 1F8B2-1F8BB 1F8C0-1F8C1 1FA89 1FA8F 1FABE
    1FAC6 1FADC 1FADF 1FAE9 1FBCB-1FBEF"""


def _ranges(spans: str) -> str:
    r"""Hexadecimal code points and spans, `41-5A B5`, as the inside of a character class."""
    return "".join("-".join(rf"\x{{{end}}}" for end in span.split("-")) for span in spans.split())


def unicode_15(pattern: str) -> str:
    r"""`pattern` with every \p{X} cut to the characters that had that category in Unicode 15.1."""
    later = _ranges(NEW_IN_UNICODE_16)
    return re.sub(r"\\p\{\w+\}", lambda category: f"[{category[0]}&&[^{later}]]", pattern)


_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_RUNS_OF_SPACES = r"|\s+(?!\S)|\s+"
_SPACES = r"|\s*[\r\n]+" + _RUNS_OF_SPACES
# A word may begin with one character that is no letter, digit or line end.
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+"

NEWLINE_RUNS = r"[^\n]+|\n+"
DIGIT = r"\p{N}"
DIGITS = r"\p{N}+"
ASCII_DIGITS = r"[0-9]+"
THREE_DIGITS = r"\p{N}{1,3}"
THREE_ASCII_DIGITS = r"[0-9][0-9][0-9]"
PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
PUNCTUATION_AND_TICK = r"[\p{P}\$\+<=>\^~\|`]+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = _CONTRACTION + rf"|{_BEFORE_WORD}\p{{L}}+|\p{{N}}{{1,3}}{_SIGNS}[\r\n]*" + _SPACES
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN2_WITHOUT_CONTRACTIONS = QWEN2.removeprefix(_CONTRACTION + "|")
QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
MINICPM5 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")
JAIS2 = LLAMA3.removesuffix(_RUNS_OF_SPACES) + "".join(
    rf"|\s{{{size}}}(?!\S)" for size in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")
) + r"|\s"  # fmt: skip
SEED_CODER = QWEN2.replace(_SIGNS + r"[\r\n]*", r"| ?[^\s\p{L}\p{N}\r\n]+")
BAILING = QWEN2.replace(r"|\s*[\r\n]+", r"|\s*[\r\n]")
EXAONE_MOE = BAILING.replace(r"\p{L}+", r"\p{L}(?:\p{M}| ?\p{L})*+").replace(r"[\r\n]*", r"[\r\n/]?")

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+|{_BEFORE_WORD}{_UPPER}+{_LOWER}*|\p{{N}}{_SIGNS}[\r\n/]*" + _SPACES
)
_ANY_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_ANY_CONTRACTION}|{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_ANY_CONTRACTION}"
    rf"|\p{{N}}{{1,3}}{_SIGNS}[\r\n/]*" + _SPACES
)
# Only ASCII letters have case in llama.cpp's form of the pattern for this embedding model.
_NOT_LOWER, _NOT_UPPER = r"[[\p{L}\p{M}]&&[^a-z]]", r"[[\p{L}\p{M}]&&[^A-Z]]"
GRANITE_EMBEDDING = O200K.replace(_UPPER, _NOT_LOWER).replace(_LOWER, _NOT_UPPER).replace(
    _ANY_CONTRACTION, _CONTRACTION + "?"
)  # fmt: skip
# llama.cpp has one category for all letters here, so words do not end between cases.
_WORD = rf"{_BEFORE_WORD}[\p{{L}}\p{{M}}]+{_CONTRACTION}?"
TINY_AYA = rf"{_WORD}|\p{{N}}{{1,3}}{_SIGNS}[\r\n/]*" + _SPACES
YOUTU = (
    rf"[{_ranges('AC00-D7A3 3131-318E')}]+"
    rf"|[{_ranges('FF01 2026 201C 201D 2018 2019 2014 FF1A FF1B FF0C 3001-303F FE30-FE4F')}]+"
    rf"|[{_ranges('3105-312F')}]+|[{_ranges('4E00-9FA5 3040-309F 30A0-30FF')}]+",
    rf"{_WORD}|\p{{N}}{_SIGNS}[\r\n/]*" + _SPACES,
)

_HAN = _ranges(
    "4E00-9FFF 3400-4DBF 20000-2A6DF 2A700-2B73F 2B740-2B81F 2B820-2CEAF 2CEB0-2EBEF F900-FAFF 2F800-2FA1F"
)
KIMI_K2 = (
    rf"[{_HAN}]+|{_BEFORE_WORD}[\p{{L}}&&[^{_HAN}]]+{_CONTRACTION}?|\p{{N}}{{1,3}}{_SIGNS}[\r\n]*" + _SPACES
)

# CJK and Hangul; the first range spans other scripts too. llama.cpp excludes white space.
_DEEPSEEK_CJK = rf"[{_ranges('800-9FA5 AC00-D7FF')}&&[^\s]]+"
# Letters with case (and a few that had it when DeepSeek LLM was made), from its tokenizer.json.
_DEEPSEEK_LETTERS = """
    41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A
    38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF
    1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D
    1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4
    1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F
    2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F
    A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3
    104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"""
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_ranges(_DEEPSEEK_LETTERS)}]+",
    r"\s?[!-/:-~！-／：-～‘-‟、。]+",
    r"\s+\z",
    _DEEPSEEK_CJK,
    r"\p{N}+",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")
_MARK_AND_LETTERS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_DEEPSEEK_WORDS = _MARK_AND_LETTERS + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
_DEEPSEEK_3 = _DEEPSEEK_WORDS + r"[\r\n]*" + _SPACES
_HAN_AND_KANA = rf"[{_ranges('4E00-9FA5 3040-309F 30A0-30FF')}]+"
DEEPSEEK_V3 = (THREE_DIGITS, _HAN_AND_KANA, _DEEPSEEK_3)
SPARK = (THREE_DIGITS, _HAN_AND_KANA, _DEEPSEEK_WORDS + r"|[\r\n]" + _RUNS_OF_SPACES, DIGIT)
# Scripts of East Asia that are written without spaces.
_AFMOE_SCRIPTS = """
    4E00-9FFF 3400-4DBF 8C48-FAFF 3040-309F 30A0-30FF FF65-FF9F 2F00-2FDF E40-E7F E80-EFF 1780-17FF
    1000-109F AA60-AA7F A9E0-A9FF AC00-D7AF 1100-11FF"""
AFMOE = (rf"[{_ranges(_AFMOE_SCRIPTS)}]+", _DEEPSEEK_3)

_BLOOM_ENDS = _ranges("2026 3002 FF0C 3001 964 6D4 60C")
BLOOM = rf" ?[^(\s|.,!?{_BLOOM_ENDS})]+"
CHAMELEON = (
    "<sentinel:[0-9]+>",
    "IMGIMG[A-I]{1,4}Z",
    r"[\t\n]|    |  ",
    DIGIT,
    r"[\p{P}!-/:-@\[-`{-~]",
    GPT2,
)


@dataclass(frozen=True)
class DigitGroups:
    """Runs of `digits`, an expression, are cut into groups of three from their right end, before all patterns.

    cut_before: pieces are cut before each group of three: what follows the digits stays with the last group. Otherwise
    they are cut after each group: what precedes the digits stays with the first group.
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
    byte_level: tokens are spelled in GPT-2's byte alphabet; else in characters, with U+2581 for spaces.
    whole_newlines: a run of newlines that is a token is taken whole (only without `byte_level`).
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    always_bos: bool = False
    digit_groups: DigitGroups | None = None
    byte_level: bool = True
    whole_newlines: bool = False


# As in llama.cpp, white space before digits stays in one piece with the first of them.
_FROM_THE_RIGHT = DigitGroups(unicode_15(DIGITS), cut_before=False)
_PRE_TOKENIZERS = {
    "default": PreTokenizer((PUNCTUATION, GPT2, DIGITS, THREE_ASCII_DIGITS)),
    "gpt-2": PreTokenizer((GPT2,)),
    "starcoder": PreTokenizer((DIGIT, GPT2)),
    "falcon": PreTokenizer((PUNCTUATION_AND_TICK, GPT2, THREE_ASCII_DIGITS)),
    "llama-bpe": PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True),
    "dbrx": PreTokenizer((LLAMA3,)),
    "glm4": PreTokenizer((LLAMA3,), ignore_merges=True),
    "jais-2": PreTokenizer((JAIS2,)),
    "minicpm5": PreTokenizer((THREE_DIGITS, MINICPM5), ignore_merges=True),
    "qwen2": PreTokenizer((QWEN2,)),
    "qwen35": PreTokenizer((QWEN35,)),
    "ufakzeka": PreTokenizer((QWEN2_WITHOUT_CONTRACTIONS,)),
    "laguna": PreTokenizer((NEWLINE_RUNS, QWEN2)),
    "seed-coder": PreTokenizer((SEED_CODER,)),
    "bailingmoe": PreTokenizer((BAILING,)),
    "exaone-moe": PreTokenizer((EXAONE_MOE,)),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer((O200K,)),
    "granite-embed-multi-97m": PreTokenizer((GRANITE_EMBEDDING,), ignore_merges=True),
    "tiny_aya": PreTokenizer((TINY_AYA,), digit_groups=_FROM_THE_RIGHT),
    "youtu": PreTokenizer(YOUTU, ignore_merges=True),
    "kimi-k2": PreTokenizer((KIMI_K2,)),
    "superbpe": PreTokenizer((DIGITS,), digit_groups=DigitGroups(ASCII_DIGITS, cut_before=True)),
    "deepseek-llm": PreTokenizer(DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(DEEPSEEK_CODER),
    "deepseek-v3": PreTokenizer(DEEPSEEK_V3),
    "spark2_5": PreTokenizer(SPARK),
    "afmoe": PreTokenizer(AFMOE, digit_groups=_FROM_THE_RIGHT),
    "bloom": PreTokenizer((BLOOM,)),
    "viking": PreTokenizer((BLOOM, DIGIT)),
    "chameleon": PreTokenizer(CHAMELEON, add_bos=True),
    "gemma4": PreTokenizer((NEWLINE_RUNS,), always_bos=True, byte_level=False, whole_newlines=True),
    "sarvam-moe": PreTokenizer((NEWLINE_RUNS,), byte_level=False),
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


@cache
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
    return replace(found, patterns=tuple(map(unicode_15, found.patterns)))
