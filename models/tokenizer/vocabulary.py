"""A vocabulary: each token's text, type and bytes, and which tokens begin and end a sequence.

Token types are those of GGUF (`tokenizer.ggml.token_type`, after sentencepiece's `ModelProto`).
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property

from quengine.errors import EngineError


class TokenizerError(EngineError):
    """The model's tokenizer is of a kind that is not supported, or contradicts itself."""


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type` (GGUF specification, "Tokenizer")."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_ENDS = """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s>
    <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response>
    <｜end▁of▁sentence｜> [e~["""
# The marks of fill-in-the-middle models, by role: what is before the gap, after it, and in it.
_FIM_MARKS = {
    "fim_pre": (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
}

# Texts that end a turn or a document in known models, whatever `eos_token_id` says. The list is llama.cpp's
# (src/llama-vocab.cpp, "special_eog_ids"), for which GGUF files are made.
END_OF_GENERATION = frozenset(_ENDS.split())
# Padding and file separators of fill-in-the-middle models, by role: each ends a completion.
# If the file does not name a role's token, the first of these texts that the vocabulary has is taken.
_FIM_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Control tokens even if a file marks them as normal.
_FIM_TEXTS = frozenset(text for texts in _FIM_MARKS.values() for text in texts)
_NAMED_ENDS = ("eos", "eot", "eom", *_FIM_ENDS)
# In vocabularies with one of these sets, <|end|> ends a message and the turn goes on.
_GEMMA_4_MARK = "<|tool_response>"  # in its vocabulary </s> is HTML
_MESSAGE_ENDS = ({"<|return|>", "<|call|>", "<|end|>"}, {"<|call|>", "<|flush|>", "<|end|>"})


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model, and the ids that have a role.

    texts, types: of every token, by id. named_ids: the roles that the file assigns: bos, eos, eot, eom, unk, pad and so
    on. add_bos, add_eos: whether the file asks for BOS before, or EOS after, a text. to_bytes: turns a normal token's
    text into the bytes that it stands for. eos_ids: tokens that end a generation. ids: text -> id, made of `texts` if
    not given. lstrip_ids, rstrip_ids: tokens that absorb the white space before or after them when matched by text.
    normal_controls: tokens that the file calls normal and that are control tokens by their text alone. pair_gap: the
    tokens between the end token of a pair's first text and the second text, which begins without BOS. suppressed_ids:
    tokens that are never generated.
    """

    texts: Sequence[str]
    types: Sequence[int]
    named_ids: dict[str, int]
    add_bos: bool
    add_eos: bool
    to_bytes: Callable[[str], bytes]
    eos_ids: frozenset[int] = field(default=frozenset())
    ids: dict[str, int] = field(default_factory=dict, repr=False)
    lstrip_ids: frozenset[int] = field(default=frozenset())
    rstrip_ids: frozenset[int] = field(default=frozenset())
    normal_controls: frozenset[int] = field(default=frozenset())
    pair_gap: tuple[int, ...] = ()
    suppressed_ids: frozenset[int] = field(default=frozenset())

    def __post_init__(self) -> None:
        if not self.ids:
            object.__setattr__(self, "ids", {text: i for i, text in enumerate(self.texts)})

    def __len__(self) -> int:
        return len(self.texts)

    def fim_id(self, role: str) -> int | None:
        """The token of a fill-in-the-middle role (fim_pre, fim_suf, fim_mid, fim_rep, fim_sep, ...), named by the file
        or found by its text."""
        texts = (*_FIM_MARKS.get(role, ()), *_FIM_ENDS.get(role, ()))
        by_text = next((self.ids[text] for text in texts if text in self.ids), None)
        return self.named_ids.get(role, by_text)

    def is_control(self, token_id: int) -> bool:
        """Whether the token stands for no text: begin and end marks, roles, padding, the unknown token."""
        return self.types[token_id] in (TokenType.CONTROL, TokenType.UNKNOWN)

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """Text to id of the tokens that only template text may turn into, longest first."""
        return self._added((TokenType.CONTROL, TokenType.UNKNOWN))

    @cached_property
    def user_defined_tokens(self) -> dict[str, int]:
        """Text to id of the tokens that are cut out of any text before everything else, longest first."""
        return self._added((TokenType.USER_DEFINED,))

    def _added(self, kinds: tuple[TokenType, ...]) -> dict[str, int]:
        found = [i for i, kind in enumerate(self.types) if kind in kinds and self.texts[i]]
        found.sort(key=lambda i: -len(self.texts[i].encode()))
        return {self.texts[i]: i for i in found}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, possibly only part of a character. Unused and undefined tokens have none."""
        text, kind = self.texts[token_id], self.types[token_id]
        if kind == TokenType.NORMAL:
            return self.to_bytes(text)
        if kind == TokenType.BYTE:
            return bytes([byte_value(text)])
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED):
            return text.encode()
        return b""


def byte_value(text: str) -> int:
    """The byte that a byte token `<0x0A>` stands for. Raises TokenizerError for another text."""
    try:
        if text[:3] != "<0x" or text[5:] != ">":
            raise ValueError
        return int(text[3:5], 16)
    except ValueError:
        raise TokenizerError(f"{text!r} is marked as a byte token but is not of the form <0x0A>") from None


def control_texts(vocabulary: Container[str], named_roles: Container[str]) -> set[str]:
    """The texts in `vocabulary` that are control tokens, whatever type a file gives them. `named_roles`: roles whose
    token the file names itself."""
    found = {text for text in END_OF_GENERATION | _FIM_TEXTS if text in vocabulary}
    for role, texts in _FIM_ENDS.items():
        if role not in named_roles:
            found |= set([text for text in texts if text in vocabulary][:1])
    if _GEMMA_4_MARK in found:
        found.discard("</s>")
    return found


def with_roles_by_text(vocabulary: Vocabulary) -> Vocabulary:
    """The same vocabulary with all `eos_ids`, and with end and fill-in-the-middle marks made control tokens.

    Files often lack a type or a role: `<|im_end|>` may be marked normal, or `eot_token_id` be absent.
    """
    ids = vocabulary.ids
    texts = control_texts(ids, vocabulary.named_ids)
    ends = vocabulary.eos_ids | {ids[text] for text in texts - _FIM_TEXTS}
    ends |= {vocabulary.named_ids[role] for role in _NAMED_ENDS if role in vocabulary.named_ids}
    if any(group <= ids.keys() for group in _MESSAGE_ENDS):
        ends -= {ids["<|end|>"]}
    types = list(vocabulary.types)
    normal = frozenset(ids[text] for text in texts if types[ids[text]] == TokenType.NORMAL)
    for text in texts:
        types[ids[text]] = TokenType.CONTROL
    return replace(vocabulary, types=types, eos_ids=frozenset(ends), normal_controls=normal)
