"""Tokenizer arrays that contradict themselves are refused before anything uses them."""

import numpy as np
import pytest

from quengine.models.gguf import GGUFError, open_gguf
from quengine.models.gguf.vocab_checks import SPECIAL_ID_KEYS, check_chat_templates, check_vocabulary
from tests.gguf_builder import GGUFBuilder, bpe_vocabulary, spm_vocabulary

SPM, BPE = spm_vocabulary(), bpe_vocabulary()
P = "tokenizer.ggml."


def check(tmp_path, values):
    builder = GGUFBuilder()
    for key, value in values.items():
        if isinstance(value, tuple):
            builder.kv(key, *value)
        elif value is not None:
            builder.kv(key, value)
    return check_vocabulary(open_gguf(builder.write(tmp_path / "v.gguf")))


@pytest.mark.parametrize("vocabulary", [SPM, BPE])
def test_whole_vocabularies_pass(tmp_path, vocabulary):
    check(tmp_path, vocabulary)


@pytest.mark.parametrize(
    ("base", "changes", "field", "says"),
    [
        (SPM, {"tokens": None}, "tokens", "missing"),
        (SPM, {"tokens": ([], "string")}, "tokens", "0 tokens"),
        (SPM, {"tokens": [1, 2]}, "tokens", "must be an array of strings"),
        (SPM, {"tokens": "abc"}, "tokens", "must be an array of strings"),
        (SPM, {"tokens": [*SPM[P + "tokens"][:-1], b"\xff"]}, "tokens[263]", "UTF-8"),
        (SPM, {"scores": [0.0] * 263}, "scores", "263 scores for 264 tokens"),
        (SPM, {"scores": [0] * 264}, "scores", "must be an array of floats"),
        (SPM, {"scores": [float("nan")] * 264}, "scores[0]", "not a finite score"),
        (SPM, {"scores": [0.0] * 263 + [float("inf")]}, "scores[263]", "not a finite score"),
        (SPM, {"token_type": ([1] * 265, "int32")}, "token_type", "265 token types for 264 tokens"),
        (SPM, {"token_type": [1.0] * 264}, "token_type", "must be an array of integers"),
        (SPM, {"token_type": ([1] * 263 + [7], "int32")}, "token_type[263]", "not a token type"),
        (SPM, {"token_type": ([-1] + [1] * 263, "int32")}, "token_type[0]", "not a token type"),
        (SPM, {"token_type": ([6] * 264, "int32")}, "tokens[0]", "typed as a byte"),
        (SPM, {"tokens": ["a"] * 3 + ["<0x00>"] * 256 + ["b"] * 5}, "tokens[4]", "is token 3 too"),
        (SPM, {"tokens": ["a"] * 3 + ["<0xGG>"] * 256 + ["b"] * 5}, "tokens[3]", "typed as a byte"),
        (SPM, {"bos_token_id": 264}, "bos_token_id", "264 is not a token"),
        (SPM, {"eos_token_id": (-1, "int32")}, "eos_token_id", "not from 0"),
        (SPM, {"eos_token_id": 1.0}, "eos_token_id", "must be an integer"),
        (SPM, {"eos_token_id": "2"}, "eos_token_id", "must be an integer"),
        (BPE, {"merges": [1, 2]}, "merges", "must be an array of strings"),
        (BPE, {"merges": "a b"}, "merges", "must be an array of strings"),
        (BPE, {"merges": ["t h", "th"]}, "merges[1]", "not two tokens"),
        (BPE, {"merges": ["t h", "th "]}, "merges[1]", "not two tokens"),
        (BPE, {"merges": ["t h", ""]}, "merges[1]", "not two tokens"),
        (BPE, {"merges": ["t h", "q q"]}, "merges[1]", "qq is no token"),
        (BPE, {"merges": ["zz h"]}, "merges[0]", "zz is no token"),
        (BPE, {"merges": [b"\xff a"]}, "merges[0]", "UTF-8"),
    ],
)
def test_contradictions_are_refused_where_they_lie(tmp_path, base, changes, field, says):
    with pytest.raises(GGUFError) as caught:
        check(tmp_path, base | {P + key: value for key, value in changes.items()})
    assert caught.value.field == P + field
    assert says in str(caught.value)
    assert (caught.value.offset is None) == ("missing" in says)


@pytest.mark.parametrize("key", SPECIAL_ID_KEYS)
def test_every_special_token_id_must_be_a_token(tmp_path, key):
    check(tmp_path, SPM | {key: 263})
    check(tmp_path, SPM | {key: 2**32 - 1})  # "none", as some converters write it
    with pytest.raises(GGUFError, match="is not a token"):
        check(tmp_path, SPM | {key: 264})


def test_the_special_id_keys_are_the_gguf_packages():
    import gguf

    ids = {v for k, v in vars(gguf.Keys.Tokenizer).items() if k.endswith("_ID") and isinstance(v, str)}
    in_no_writer = {P + f"fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")}
    assert set(SPECIAL_ID_KEYS) <= ids | in_no_writer


def test_a_merge_may_start_with_a_space(tmp_path):
    values = {P + "tokens": [" ", "a", " a", "aa"], P + "merges": ["  a", "a a"]}
    checked = check(tmp_path, values)
    assert checked.texts == [" ", "a", " a", "aa"] and checked.merges == [(" ", "a"), ("a", "a")]


def test_merges_are_given_as_pairs(tmp_path):
    assert check(tmp_path, BPE).merges[0] == tuple(BPE[P + "merges"][0].split(" "))
    assert check(tmp_path, SPM).merges == []


@pytest.mark.parametrize("key", ["tokenizer.chat_template", "tokenizer.chat_template.tool_use"])
def test_chat_templates_over_a_mebibyte_are_refused(tmp_path, key):
    def open_with(size):
        # Two-byte characters: the limit is on bytes.
        return open_gguf(GGUFBuilder().kv(key, "\u00e9" * (size // 2)).write(tmp_path / "t.gguf"))

    check_chat_templates(open_with(2**20))
    with pytest.raises(GGUFError, match="at most 1048576"):
        check_chat_templates(open_with(2**20 + 2))


def test_a_template_of_another_type_is_refused(tmp_path):
    file = open_gguf(GGUFBuilder().kv("tokenizer.chat_template", 3).write(tmp_path / "t.gguf"))
    with pytest.raises(GGUFError, match="must be a string"):
        check_chat_templates(file)


def test_scores_may_be_float64_and_types_any_integer(tmp_path):
    types = np.asarray(SPM[P + "token_type"]).tolist()
    check(tmp_path, SPM | {P + "scores": ([0.0] * 264, "float64"), P + "token_type": (types, "uint8")})
