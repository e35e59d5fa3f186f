"""SentencePiece-style BPE: Mistral's real vocabularies against mistral-common and llama.cpp, and small made-up ones."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quengine.models.gguf import GGUFError
from quengine.models.tokenizer import Tokenizer, TokenizerError
from quengine.models.tokenizer.scored_bpe import ScoredBPE, scored_bytes
from quengine.models.tokenizer.vocabulary import TokenType, Vocabulary
from tests.gguf_builder import GGUFBuilder, spm_vocabulary
from tests.llama_cpp_vocab import LlamaCppVocab
from tests.mistral_vocab_files import SENTENCEPIECE, data_file, write_vocabulary
from tests.text_samples import HAND_PICKED, random_texts


@pytest.fixture(scope="module", params=list(SENTENCEPIECE))
def named_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name: str = request.param
    return name, write_vocabulary(name, tmp_path_factory.mktemp("vocab") / f"{name}.gguf")


def test_ids_are_those_of_mistral_common(named_file: tuple[str, Path]) -> None:
    from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer

    name, path = named_file
    ours, theirs = Tokenizer.from_gguf(path), SentencePieceTokenizer(data_file(name))
    for text in [*HAND_PICKED, *random_texts(3, 1500)]:
        assert ours.encode(text, bos=True) == theirs.encode(text, bos=True, eos=False), text


@pytest.mark.parametrize("special", [False, True])
def test_ids_are_those_of_llama_cpp(named_file: tuple[str, Path], special: bool) -> None:
    ours = Tokenizer.from_gguf(named_file[1])
    names = [ours.token_text(i) for i in range(3, 20) if ours.is_control(i)]
    texts = [*HAND_PICKED, *random_texts(4, 1000), *(f"a {name} b{name}{name}  c" for name in names)]
    with LlamaCppVocab(named_file[1]) as peer:
        for text in texts:
            # llama.cpp puts BOS before one that the text has written.
            theirs = peer.encode(text, bos=not special, special=special)
            assert ours.encode(text, bos=not special, special=special) == theirs, text


def test_text_comes_back_without_the_space_prefix(named_file: tuple[str, Path]) -> None:
    tokenizer = Tokenizer.from_gguf(named_file[1])
    for text in [*HAND_PICKED, *random_texts(5, 500)]:
        # The sign that spells a space cannot be told from one.
        assert tokenizer.decode(tokenizer.encode(text, bos=True)) == text.replace("▁", " ")
    assert tokenizer.decode(tokenizer.encode("so it goes"), continuation=True) == " so it goes"


def test_token_bytes_are_those_of_llama_cpp(named_file: tuple[str, Path]) -> None:
    tokenizer = Tokenizer.from_gguf(named_file[1])
    with LlamaCppVocab(named_file[1]) as peer:
        for i in range(tokenizer.vocab_size):
            assert tokenizer.token_bytes(i) == peer.piece(i)
        assert tokenizer.eos_ids == peer.end_of_generation()


def encoder(pieces: dict[str, float], space_prefix: bool = False, fallback: bool = True) -> ScoredBPE:
    """Normal tokens with scores after an unknown token and, with `fallback`, the 256 bytes."""
    start = ["<unk>", *([f"<0x{b:02X}>" for b in range(256)] if fallback else [])]
    types = [TokenType.UNKNOWN, *[TokenType.BYTE] * (len(start) - 1), *[TokenType.NORMAL] * len(pieces)]
    vocabulary = Vocabulary([*start, *pieces], types, {"unk": 0}, False, False, scored_bytes)
    return ScoredBPE(vocabulary, [0.0] * len(start) + list(pieces.values()), space_prefix)


def merge_plainly(word: str, scores: dict[str, float]) -> list[str]:
    """The definition: of all neighbours whose union is a token, the best-scored, then leftmost, merge; again."""
    symbols = list(word)
    while True:
        unions = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not unions:
            return symbols
        at = min(unions)[1]
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]


@settings(deadline=None, max_examples=400, derandomize=True)
@given(
    word=st.text("ab▁", max_size=24),
    scores=st.dictionaries(
        st.text("ab▁", min_size=1, max_size=5), st.integers(-3, 0).map(float), max_size=14
    ),
)
def test_merging_follows_the_definition_with_ties_and_gaps(word: str, scores: dict[str, float]) -> None:
    """Few scores for many tokens make ties; tokens whose characters are none make gaps."""
    subject = encoder(scores)
    ids = {text: 257 + i for i, text in enumerate(scores)}
    expected = [
        i
        for s in merge_plainly(word, scores)
        for i in ([ids[s]] if s in ids else [1 + b for b in s.encode()])
    ]
    assert subject.encode(word, after_special=False) == expected


def test_equal_scores_merge_from_the_left_as_in_llama_cpp(tmp_path: Path) -> None:
    """Converters that find no scores write one for all."""
    pieces = ["▁", "a", "b", "c", "ab", "bc", "abc", "aa", "aaa", "aaaa", "▁▁", "▁▁▁", "▁a", "ca"]
    values = spm_vocabulary(pieces)
    values["tokenizer.ggml.scores"] = [-1000.0] * (259 + len(pieces))
    types = values.pop("tokenizer.ggml.token_type")
    builder = GGUFBuilder().kv("general.architecture", "llama").kvs(values)
    path = builder.kv("tokenizer.ggml.token_type", types, "int32").write(tmp_path / "v.gguf")
    ours = Tokenizer.from_gguf(path)
    rng = np.random.default_rng(0)
    with LlamaCppVocab(path) as peer:
        for _ in range(500):
            text = "".join(rng.choice(list("abc  "), int(rng.integers(1, 30))))
            assert ours.encode(text) == peer.encode(text), text


def test_a_token_that_crosses_a_space_is_found() -> None:
    subject = encoder({"▁": -1.0, "a": -2.0, "b": -3.0, "a▁": -4.0, "a▁b": -5.0})
    assert subject.encode("a b", after_special=False) == [257 + 4]


def test_a_long_text_without_spaces_is_no_trouble() -> None:
    subject = encoder({"a": -1.0, "aa": -2.0, "aaaa": -3.0})
    assert subject.encode("a" * 100_000, after_special=False) == [257 + 2] * 25_000


def test_the_space_prefix_follows_the_beginning_and_every_added_token(tmp_path: Path) -> None:
    values = spm_vocabulary(["▁", "a", "▁a", "<ext>"])
    values["tokenizer.ggml.token_type"][-1] = 4
    ids = {text: i for i, text in enumerate(values["tokenizer.ggml.tokens"])}
    with_prefix = tokenizer(values, tmp_path)
    without = tokenizer(values | {"tokenizer.ggml.add_space_prefix": False}, tmp_path)
    # User-defined tokens are matched unasked, control tokens are not.
    assert with_prefix.encode("a<ext>a") == [ids["▁a"], ids["<ext>"], ids["▁a"]]
    assert without.encode("a<ext>a") == [ids["a"], ids["<ext>"], ids["a"]]
    assert with_prefix.encode("<s>a", special=True) == [1, ids["▁a"]]
    assert with_prefix.encode("") == []
    assert without.decode(without.encode(" a")) == " a"


def tokenizer(values: dict[str, object], folder: Path) -> Tokenizer:
    builder = GGUFBuilder().kv("general.architecture", "llama")
    return Tokenizer.from_gguf(builder.kvs(values).write(folder / "vocab.gguf"))


def test_text_never_becomes_a_control_or_byte_token_by_merging() -> None:
    """llama.cpp's merging looks up all tokens: `<s>` out of `<s` and `>`. Here, as in sentencepiece, it does not."""
    start = ["<unk>", "<s>", "<0x41>", "<", "s", ">", "<s", "0", "x", "4", "1", "<0", "<0x", "<0x4", "<0x41"]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.BYTE, *[TokenType.NORMAL] * (len(start) - 3)]
    vocabulary = Vocabulary(start, types, {"unk": 0}, False, False, scored_bytes)
    subject = ScoredBPE(vocabulary, [0.0] * len(start), space_prefix=False)
    assert subject.encode("<s>", after_special=False) == [6, 5]
    assert subject.encode("<0x41>", after_special=False) == [14, 5]


def test_a_character_without_token_or_bytes_is_the_unknown_token() -> None:
    subject = encoder({"a": 0.0}, fallback=False)
    assert subject.encode("aéa", after_special=False) == [1, 0, 1]


def test_without_an_unknown_token_it_is_an_error_that_names_the_character() -> None:
    vocabulary = Vocabulary(["a"], [TokenType.NORMAL], {}, False, False, scored_bytes)
    with pytest.raises(TokenizerError, match="no token for 'é'"):
        ScoredBPE(vocabulary, [0.0], space_prefix=False).encode("é", after_special=False)


def test_missing_scores_are_an_error(tmp_path: Path) -> None:
    values = spm_vocabulary()
    del values["tokenizer.ggml.scores"]
    with pytest.raises(GGUFError, match=r"vocab\.gguf: tokenizer\.ggml\.scores.*merges by score"):
        tokenizer(values, tmp_path)
