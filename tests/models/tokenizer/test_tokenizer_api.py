"""What every tokenizer promises: BOS once, no control tokens out of text, surrogates, decoding, errors."""

from pathlib import Path

import pytest

from quengine.errors import EngineError
from quengine.models.gguf import GGUFError
from quengine.models.tokenizer import Tokenizer, TokenizerError
from tests.gguf_builder import GGUFBuilder, bpe_vocabulary, spm_vocabulary

SPECIAL = ("<|begin|>", "<|im_end|>", "<|user|>")


def write(folder: Path, values: dict[str, object]) -> Path:
    kept = {key: value for key, value in values.items() if value is not None}
    return GGUFBuilder().kv("general.architecture", "llama").kvs(kept).write(folder / "vocab.gguf")


def chatty(folder: Path, **changes: object) -> Tokenizer:
    """Byte-level, with three control tokens of which the first is BOS."""
    values = bpe_vocabulary(special=SPECIAL) | {"tokenizer.ggml.add_bos_token": True}
    return Tokenizer.from_gguf(write(folder, values | {f"tokenizer.ggml.{k}": v for k, v in changes.items()}))


def test_bos_comes_once_where_the_model_wants_it(tmp_path: Path) -> None:
    tokenizer = chatty(tmp_path)
    bos = tokenizer.bos_id
    assert bos is not None and tokenizer.add_bos
    plain = tokenizer.encode("hi")
    assert bos not in plain
    assert tokenizer.encode("hi", bos=True) == [bos, *plain]
    assert tokenizer.encode("<|begin|>hi", bos=True, special=True) == [bos, *plain]
    assert tokenizer.encode("", bos=True) == [bos]


def test_no_bos_where_the_model_wants_none(tmp_path: Path) -> None:
    tokenizer = chatty(tmp_path, add_bos_token=False)
    assert not tokenizer.add_bos
    assert tokenizer.encode("hi", bos=True) == tokenizer.encode("hi")


@pytest.mark.parametrize(("pre", "expected"), [("gpt-2", False), ("llama-bpe", True), ("tekken", True)])
def test_whether_bos_is_wanted_depends_on_the_kind_where_the_file_does_not_say(
    tmp_path: Path, pre: str, expected: bool
) -> None:
    assert chatty(tmp_path, add_bos_token=None, pre=pre).add_bos is expected
    assert Tokenizer.from_gguf(write(tmp_path, spm_vocabulary())).add_bos


def test_bos_wanted_but_not_named_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"add_bos_token.*names no BOS token"):
        chatty(tmp_path, bos_token_id=None)


def test_the_id_that_means_none_is_none(tmp_path: Path) -> None:
    tokenizer = chatty(tmp_path, bos_token_id=(1 << 32) - 1, add_bos_token=None)
    assert tokenizer.bos_id is None and not tokenizer.add_bos


def test_text_becomes_control_tokens_only_when_asked(tmp_path: Path) -> None:
    tokenizer = chatty(tmp_path)
    text = "a<|im_end|><|user|>b"
    assert not any(map(tokenizer.is_control, tokenizer.encode(text)))
    marked = tokenizer.encode(text, special=True)
    assert [tokenizer.token_text(i) for i in marked] == ["a", "<|im_end|>", "<|user|>", "b"]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(marked) == "ab"
    assert tokenizer.decode(marked, skip_special=False) == text


def test_ends_of_generation_are_found_by_role_and_by_text(tmp_path: Path) -> None:
    tokenizer = chatty(tmp_path, eos_token_id=0)
    im_end = tokenizer.encode("<|im_end|>", special=True)
    assert tokenizer.eos_ids == {0, *im_end}
    assert not tokenizer.is_control(0), "an ordinary token named as eos stays ordinary text"
    assert tokenizer.encode(tokenizer.decode([0])) == [0]


def test_a_mark_with_the_wrong_type_is_a_control_token_all_the_same(tmp_path: Path) -> None:
    values = bpe_vocabulary(special=SPECIAL)
    values["tokenizer.ggml.token_type"][:] = 1
    tokenizer = Tokenizer.from_gguf(write(tmp_path, values))
    im_end = tokenizer.vocab_size - 2
    assert tokenizer.is_control(im_end) and im_end in tokenizer.eos_ids
    assert not tokenizer.is_control(tokenizer.vocab_size - 1)


def test_of_overlapping_names_the_longest_counts_as_in_llama_cpp(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_gguf(write(tmp_path, bpe_vocabulary(special=("ab<", "<end>", "<e"))))
    ids = tokenizer.encode("ab<end>ab<", special=True)
    assert [tokenizer.token_text(i) for i in ids] == ["a", "b", "<end>", "ab<"]


@pytest.mark.parametrize(
    ("text", "same_as"),
    [
        ("a\ud83d\ude00b", "a😀b"),
        ("a\ud83d", "a\ufffd"),
        ("\ude00b", "\ufffdb"),
        ("\udcff\udc80", "\ufffd\ufffd"),
    ],
)
def test_surrogate_pairs_are_joined_and_lone_ones_replaced(tmp_path: Path, text: str, same_as: str) -> None:
    tokenizer = chatty(tmp_path)
    assert tokenizer.encode(text) == tokenizer.encode(same_as)
    assert tokenizer.decode(tokenizer.encode(text)) == same_as


def test_half_a_character_decodes_to_a_replacement(tmp_path: Path) -> None:
    tokenizer = chatty(tmp_path)
    first, *rest = tokenizer.encode("é")
    assert tokenizer.token_bytes(first) == b"\xc3"
    assert tokenizer.decode([first]) == "\ufffd"
    assert tokenizer.decode([first, *rest]) == "é"


@pytest.mark.parametrize("token_id", [-1, 259 + 3])
def test_an_id_outside_of_the_vocabulary_is_an_error_with_both_numbers(tmp_path: Path, token_id: int) -> None:
    tokenizer = chatty(tmp_path)
    assert tokenizer.vocab_size == 262
    for ask in (tokenizer.token_bytes, tokenizer.token_text, tokenizer.is_control):
        with pytest.raises(TokenizerError, match=f"token {token_id} is not from 0 to 261"):
            ask(token_id)


def test_an_unknown_kind_is_named_with_those_supported(tmp_path: Path) -> None:
    with pytest.raises(
        TokenizerError, match=r"vocab\.gguf.*'rwkv'.* is not supported; supported: gpt2, llama"
    ):
        chatty(tmp_path, model="rwkv")


def test_a_file_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"tokenizer\.ggml\.model.*missing"):
        Tokenizer.from_gguf(write(tmp_path, {}))


def test_two_tokens_of_one_text_are_an_error_that_names_both(tmp_path: Path) -> None:
    values = spm_vocabulary(["▁", "a", "b", "a"])
    with pytest.raises(GGUFError, match=r"'a' is both token 260 and token 262"):
        Tokenizer.from_gguf(write(tmp_path, values))


def test_an_open_file_serves_as_well_as_a_path(tmp_path: Path) -> None:
    from quengine.models.gguf import open_gguf

    path = write(tmp_path, bpe_vocabulary())
    assert Tokenizer.from_gguf(open_gguf(path)).encode("the") == Tokenizer.from_gguf(str(path)).encode("the")


def test_errors_are_the_users() -> None:
    assert issubclass(TokenizerError, EngineError) and TokenizerError("").exit_code == 1
