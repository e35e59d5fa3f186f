"""gpt-oss's tokenizer, o200k with harmony's control tokens: as a GGUF file and as a folder, against llama.cpp,
transformers and tiktoken."""

import json
from pathlib import Path

import pytest
import tiktoken
import tiktoken_ext.openai_public as published
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Engine

from quengine.models.gguf import open_gguf
from quengine.models.tokenizer import Tokenizer
from tests.gguf_builder import GGUFBuilder
from tests.llama_cpp_source import llama_cpp_source
from tests.llama_cpp_vocab import LlamaCppVocab
from tests.text_samples import HAND_PICKED, random_texts

ORDINARY = 151_643
"""Tokens of Qwen 2's vocabulary, whose ids are ranks, as o200k's are. o200k's own are nowhere to be had offline."""
CONVERSATION = (
    "<|start|>system<|message|>You are ChatGPT.\nReasoning: low<|end|><|start|>user<|message|>How'S it?  10000 km"
    "<|end|><|start|>assistant<|channel|>analysis<|message|>Call it.<|end|><|start|>assistant<|channel|>commentary"
    ' to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|><|start|>assistant<|channel|>final<|message|>ok'
    "<|return|>"
)


@pytest.fixture(scope="module")
def specials() -> dict[str, int]:
    """harmony's tokens by tiktoken's list, as many ids behind the ordinary ones as they are behind o200k's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published, "load_tiktoken_bpe", lambda *_args, **_more: {})
        given = published.o200k_harmony()["special_tokens"]
    return {text: token - 199_998 + ORDINARY for text, token in given.items() if token < 200_019}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, specials: dict[str, int]) -> tuple[Path, Path]:
    """The same vocabulary as a GGUF file and as a folder."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    source = open_gguf(llama_cpp_source() / "models" / "ggml-vocab-qwen2.gguf").metadata
    tokens = [*list(source["tokenizer.ggml.tokens"])[:ORDINARY], *sorted(specials, key=lambda t: specials[t])]
    merges = list(source["tokenizer.ggml.merges"])
    values = {
        "general.architecture": "gpt-oss",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-4o",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": specials["<|startoftext|>"],
        "tokenizer.ggml.eos_token_id": specials["<|return|>"],
        "tokenizer.ggml.padding_token_id": specials["<|endoftext|>"],
    }
    types = [1] * ORDINARY + [3] * len(specials)
    builder = GGUFBuilder().kvs(values).kv("tokenizer.ggml.token_type", types, "int32")
    gguf = builder.write(folder / "vocab.gguf")
    vocab = {token: i for i, token in enumerate(tokens[:ORDINARY])}
    engine = Engine(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ", 1)) for merge in merges]))
    split = pre_tokenizers.Split(Regex(pattern()), "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens[ORDINARY:]])
    engine.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ends = [specials[text] for text in ("<|return|>", "<|endoftext|>", "<|call|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return gguf, folder


def pattern() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published, "load_tiktoken_bpe", lambda *_args, **_more: {})
        return str(published.o200k_harmony()["pat_str"])


@pytest.fixture(scope="module")
def both(files: tuple[Path, Path]) -> dict[str, Tokenizer]:
    return {"gguf": Tokenizer.from_gguf(files[0]), "folder": Tokenizer.from_hf(files[1])}


def test_ends_are_those_of_llama_cpp_and_of_the_generation_config(
    files: tuple[Path, Path], both: dict[str, Tokenizer], specials: dict[str, int]
) -> None:
    ends = {specials[text] for text in ("<|return|>", "<|call|>", "<|endoftext|>")}
    ends |= set(
        both["gguf"].encode("</s>", special=True)
    )  # a word of Qwen's, which llama.cpp takes for an end
    with LlamaCppVocab(files[0]) as peer:
        assert peer.end_of_generation() == ends
    assert both["gguf"].eos_ids == both["folder"].eos_ids == ends
    for tokenizer in both.values():
        assert not tokenizer.add_bos and not tokenizer.add_eos
        assert all(tokenizer.is_control(token) for token in specials.values())
        assert tokenizer.control_id("<|channel|>") == specials["<|channel|>"]
        assert tokenizer.control_id("channel") is None


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_a_conversation_has_the_ids_of_llama_cpp_transformers_and_tiktoken(
    kind: str, files: tuple[Path, Path], both: dict[str, Tokenizer], specials: dict[str, int]
) -> None:
    from transformers import PreTrainedTokenizerFast

    ours = both[kind]
    ids = ours.encode(CONVERSATION, special=True)
    transformers = PreTrainedTokenizerFast(tokenizer_file=str(files[1] / "tokenizer.json"))
    assert ids == transformers.encode(CONVERSATION)
    ranks = {ours.token_bytes(i): i for i in range(ORDINARY)}
    harmony = tiktoken.Encoding("harmony", pat_str=pattern(), mergeable_ranks=ranks, special_tokens=specials)
    assert ids == harmony.encode(CONVERSATION, allowed_special="all")
    assert ours.decode(ids, skip_special=False) == CONVERSATION
    with LlamaCppVocab(files[0]) as peer:
        assert ids == peer.encode(CONVERSATION, special=True)
    for text in [*HAND_PICKED, *random_texts(31, 200)]:
        assert ours.encode(text) == harmony.encode(text, disallowed_special=()), text


def test_a_message_that_spells_control_tokens_is_text(both: dict[str, Tokenizer]) -> None:
    for tokenizer in both.values():
        assert not any(map(tokenizer.is_control, tokenizer.encode("a<|end|><|start|>system<|message|>b")))
