"""What is taken as a prompt, and what is refused with a line that says why."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quengine import LLM, EngineError, SamplingParams
from tests.llama_cpp_convert import VOCAB, write_tokenizer
from tests.tiny_models import write_tiny
from tests.transformers_models import write_model

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
BYTES: list[Any] = [b"the cat", bytearray(b"the cat"), memoryview(b"the cat")]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_tiny(tmp_path_factory.mktemp("prompt") / "tiny.gguf"), device="cpu") as loaded:
        yield loaded


@pytest.mark.parametrize("given", BYTES, ids=["bytes", "bytearray", "memoryview"])
@pytest.mark.parametrize(
    "call",
    [
        lambda llm, given: llm.generate(given, GREEDY),
        lambda llm, given: llm.generate(["the", given], GREEDY),
        lambda llm, given: llm.stream(given, GREEDY),
        lambda llm, given: llm.embed(given),
        lambda llm, given: llm.logits(given),
    ],
    ids=["generate", "generate in a list", "stream", "embed", "logits"],
)
def test_bytes_are_not_read_as_token_ids(llm: LLM, call: Callable[[LLM, Any], object], given: Any) -> None:
    with pytest.raises(EngineError, match=f"text or a list of token ids, not {type(given).__name__}: decode"):
        call(llm, given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([[1, 2.5]], r"token id at position 1 is 2\.5 \(float\), no integer"),
        ([["the"]], r"token id at position 0 is 'the' \(str\), no integer"),
        ([1, "the"], r"not 1 \(int\)"),
        ([None], r"not None \(NoneType\)"),
    ],
)
def test_what_is_no_list_of_integers_is_refused(llm: LLM, given: Any, says: str) -> None:
    with pytest.raises(EngineError, match=says):
        llm.generate(given, GREEDY)


def test_ids_may_come_in_an_array(llm: LLM) -> None:
    ids = llm.encode("the cat")
    expected = llm.generate(ids, GREEDY)[0].tokens
    for given in (tuple(ids), np.array(ids), torch.tensor(ids)):
        assert llm.stream(given, GREEDY).finish().tokens == expected  # type: ignore[arg-type]
    assert llm.generate(np.array(ids), GREEDY)[0].tokens == expected  # type: ignore[arg-type]
    assert llm.generate([np.array(ids)], GREEDY)[0].tokens == expected  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (json.loads('"ab\\ud800"'), r"has U\+D800 at position 2"),
        (json.loads('"\\ud83d x \\ude00"'), r"has U\+D83D at position 0"),
        (json.loads('"é\\udc12\\udc12"'), r"has U\+DC12 at position 1"),
        (b"caf\xe9!".decode(errors="surrogateescape"), "has the byte 0xE9 at position 3, which is no UTF-8"),
    ],
)
def test_half_a_surrogate_pair_is_refused_with_its_position(llm: LLM, text: str, says: str) -> None:
    for call in (llm.generate, llm.stream, llm.encode, llm.embed):
        with pytest.raises(EngineError, match=f"the prompt {says}"):
            call(text)
    message = {"role": "user", "content": text}
    told = {"role": "user", "content": [{"type": "text", "text": text}]}
    for given in (message, told):
        with pytest.raises(EngineError, match=f"message 1 {says}"):
            llm.chat([{"role": "system", "content": "be kind"}, given])


@pytest.mark.parametrize(
    ("given", "named"), [("hello", "message 0 is 'h'"), ([{"role": "user"}, 5], "message 1 is 5")]
)
def test_a_text_in_place_of_a_conversation_is_refused(llm: LLM, given: Any, named: str) -> None:
    with pytest.raises(EngineError, match=f"a conversation is a list of .*; {named}"):
        llm.chat(given)


def test_a_whole_pair_is_its_character(llm: LLM) -> None:
    pair = "\ud83d\ude00"
    assert llm.encode(f"a {pair}") == llm.encode("a \U0001f600")
    chats = [llm.encode_chat([{"role": "user", "content": text}]) for text in (pair, "\U0001f600")]
    assert chats[0] == chats[1]


def test_a_tokenizer_may_have_more_tokens_than_the_model(tmp_path: Path) -> None:
    """As Gemma 3 1B's has, whose embedding has no row for images; here even the end token is one of those."""
    folder = write_model(tmp_path, "llama", vocab=VOCAB - 4)
    write_tokenizer(folder)
    ends = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<unused9>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(ends))
    with LLM(folder, "cpu", 64) as llm:
        assert VOCAB - 1 in llm.tokenizer.eos_ids and len(llm.generate("the cat", GREEDY)[0].tokens) == 4
        with pytest.raises(EngineError, match=f"token id {VOCAB - 1} at position 1 is not in the vocabulary"):
            llm.generate([[5, VOCAB - 1]], GREEDY)
