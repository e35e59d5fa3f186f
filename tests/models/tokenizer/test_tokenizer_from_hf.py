"""Tokenizers of Hugging Face checkpoint folders, written here with the `tokenizers` library."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Engine

from quengine.errors import EngineError
from quengine.models.gguf import open_gguf
from quengine.models.hub.hub import resolve_model
from quengine.models.tokenizer import Tokenizer, TokenizerError
from tests.gguf_builder import byte_level_alphabet
from tests.text_samples import HAND_PICKED, random_texts


def byte_level(folder: Path, added: list[AddedToken], bos: str | None = None, **config: Any) -> Path:
    """A folder with all bytes, `th` and the added tokens; BOS written by the post-processor where given."""
    tokens = [*byte_level_alphabet(), "th"]
    engine = Engine(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[("t", "h")]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_tokens([token for token in added if not token.special])
    engine.add_special_tokens([token for token in added if token.special])
    if bos is not None:
        pair = (bos, engine.token_to_id(bos))
        engine.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[pair])
    return save(engine, folder, **config)


def save(engine: Engine, folder: Path, **config: Any) -> Path:
    engine.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def special(text: str) -> AddedToken:
    return AddedToken(text, special=True, normalized=False)


def test_ids_are_those_of_the_same_model_in_gguf(tmp_path: Path) -> None:
    """SmolLM2 written as its own tokenizer.json is, against the GGUF of it."""
    path = resolve_model("smollm2-135m")
    metadata = open_gguf(path).metadata
    tokens, merges = list(metadata["tokenizer.ggml.tokens"]), list(metadata["tokenizer.ggml.merges"])
    vocab = {token: i for i, token in enumerate(tokens)}
    engine = Engine(models.BPE(vocab=vocab, merges=[tuple(m.split(" ")) for m in merges]))
    digits, gpt2 = (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    engine.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([special(token) for token in tokens[:17]])
    folder = save(
        engine, tmp_path, bos_token="<|im_start|>", eos_token={"content": "<|im_end|>"}, add_bos_token=False
    )
    ours, gguf = Tokenizer.from_hf(folder), Tokenizer.from_gguf(path)
    for text in [*HAND_PICKED[:-12], *(t for t in random_texts(8, 300) if t.isascii())]:
        for asked in (False, True):
            assert ours.encode(text, bos=True, special=asked) == gguf.encode(text, bos=True, special=asked), (
                text
            )
    assert (ours.bos_id, ours.add_bos, ours.eos_ids) == (gguf.bos_id, gguf.add_bos, gguf.eos_ids)
    ids = range(gguf.vocab_size)
    assert list(map(ours.token_bytes, ids)) == list(map(gguf.token_bytes, ids))
    assert list(map(ours.is_control, ids)) == list(map(gguf.is_control, ids))


def test_white_space_beside_a_token_goes_though_its_neighbours_were_hidden(tmp_path: Path) -> None:
    """The library takes it off a whole text; a chat's prompt whose messages spell tokens is encoded in pieces."""
    added = [
        AddedToken("<|user|>", special=True, normalized=False, rstrip=True),
        AddedToken("<mask>", special=True, normalized=False, lstrip=True),
        special("<|end|>"),
    ]
    tokenizer = Tokenizer.from_hf(byte_level(tmp_path, added))
    for text in ("<|user|> \n hi <mask> th", " <mask>\n<|user|>", "<|end|> a <|end|>\n", "<|user|>\t<mask>"):
        assert tokenizer.encode_hidden(text, str) == tokenizer.encode(text, special=True), text


def test_text_becomes_special_tokens_only_when_asked_and_added_ones_always(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_hf(byte_level(tmp_path, [special("<|user|>"), AddedToken("<think>")]))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("<|user|>", special=True)] == ["<|user|>"]
    assert len(tokenizer.encode("<|user|>")) == 8
    think = tokenizer.encode("<think>")
    assert [tokenizer.token_text(i) for i in think] == ["<think>"]
    assert tokenizer.decode(think) == "<think>"


def test_a_mark_that_the_file_forgot_to_make_special_is_special(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_hf(byte_level(tmp_path, [AddedToken("<|im_end|>")]))
    (im_end,) = tokenizer.encode("<|im_end|>", special=True)
    assert im_end in tokenizer.eos_ids and tokenizer.is_control(im_end)
    assert im_end not in tokenizer.encode("<|im_end|>")


@pytest.mark.parametrize(
    ("post", "config", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (False, {"add_bos_token": True}, True),
        (True, {"add_bos_token": False}, False),
    ],
)
def test_bos_is_added_as_the_configuration_says_or_the_post_processor_does(
    tmp_path: Path, post: bool, config: dict[str, bool], expected: bool
) -> None:
    folder = byte_level(tmp_path, [special("<bos>")], "<bos>" if post else None, bos_token="<bos>", **config)
    tokenizer = Tokenizer.from_hf(folder)
    assert tokenizer.add_bos is expected
    assert tokenizer.encode("<bos>x", bos=True, special=True) == [tokenizer.bos_id, *tokenizer.encode("x")]
    assert tokenizer.encode("x", bos=True)[:-1] == ([tokenizer.bos_id] if expected else [])


@pytest.mark.parametrize(
    ("post", "config", "older"),
    [
        ("<s>", {}, {"bos_token": "<s>", "eos_token": {"content": "</s>"}}),
        ("<s>", {"added_tokens_decoder": {}}, {"bos_token": "<s>", "eos_token": "</s>"}),
        ("<s>", {"bos_token": "<x>"}, {"bos_token": "<s>"}),
        ("<s>", {}, None),
        (None, {}, {"bos_token": "<s>"}),
        ("</s>", {"eos_token": "</s>"}, None),
    ],
    ids=["older file", "ignored", "both", "no name", "not added", "an end token"],
)
def test_bos_of_older_folders_and_without_a_name_is_that_of_transformers(
    tmp_path: Path, post: str | None, config: dict[str, Any], older: dict[str, Any] | None
) -> None:
    """But for a post-processor that puts the end token in front, which `encode` leaves out as it does behind a text."""
    from transformers import AutoTokenizer

    added = [special(text) for text in ("<x>", "<s>", "</s>")]
    folder = byte_level(tmp_path, added, post, tokenizer_class="PreTrainedTokenizerFast", **config)
    if older is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(older))
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_hf(folder)
    expected = theirs("the").input_ids
    assert ours.encode("the", bos=True) == expected[expected[:1] == [ours.encode("</s>", special=True)[0]] :]
    if theirs.bos_token is not None:
        assert ours.bos_id == theirs.bos_token_id
    if theirs.eos_token is not None:
        assert theirs.eos_token_id in ours.eos_ids


def test_ends_of_generation_come_from_generation_config_too(tmp_path: Path) -> None:
    folder = byte_level(tmp_path, [special("<a>"), special("<b>")], eos_token="<a>")
    ids = [Tokenizer.from_hf(folder).encode(text, special=True)[0] for text in ("<a>", "<b>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids[1:]}))
    assert Tokenizer.from_hf(folder).eos_ids == set(ids)


def test_tokens_that_are_never_generated_come_from_generation_config(tmp_path: Path) -> None:
    folder = byte_level(tmp_path, [])
    assert Tokenizer.from_hf(folder).suppressed_ids == frozenset()
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": [3, 5, 1 << 30, "x"]}))
    assert Tokenizer.from_hf(folder).suppressed_ids == {3, 5}


def test_rows_of_the_model_beyond_the_tokens_are_unused_ids(tmp_path: Path) -> None:
    folder = byte_level(tmp_path, [])
    (folder / "config.json").write_text(json.dumps({"vocab_size": 300}))
    tokenizer = Tokenizer.from_hf(folder)
    assert (tokenizer.vocab_size, tokenizer.token_bytes(299), tokenizer.is_control(299)) == (300, b"", False)


def test_a_llama_style_tokenizer_spells_spaces_and_bytes(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "▁a"]
    vocab = {token: i for i, token in enumerate(tokens)}
    engine = Engine(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    engine.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    engine.add_special_tokens([special("<unk>"), special("<s>")])
    tokenizer = Tokenizer.from_hf(save(engine, tmp_path, bos_token="<s>", unk_token="<unk>"))
    ids = tokenizer.encode("a é")
    assert [tokenizer.token_text(i) for i in ids] == ["▁a", "▁", "<0xC3>", "<0xA9>"]
    assert [tokenizer.token_bytes(i) for i in ids] == [b" a", b" ", b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids) == "a é"
    assert tokenizer.space_prefix


def test_a_metaspace_that_never_prepends_has_no_space_prefix(tmp_path: Path) -> None:
    engine = Engine(models.BPE(vocab={"▁": 0, "a": 1}, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("x"), "isolated"), pre_tokenizers.Metaspace(prepend_scheme="never")]
    )
    assert not Tokenizer.from_hf(save(engine, tmp_path)).space_prefix
    engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    assert Tokenizer.from_hf(save(engine, tmp_path)).space_prefix


def test_surrogates_do_no_harm(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_hf(byte_level(tmp_path, []))
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_a_folder_without_tokenizer_json_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        Tokenizer.from_hf(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {"type": "Nonsense"}}', "{}"])
def test_a_broken_tokenizer_json_is_one_line_with_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(EngineError, match=r"tokenizer\.json: ") as raised:
        Tokenizer.from_hf(tmp_path)
    assert "\n" not in str(raised.value)
