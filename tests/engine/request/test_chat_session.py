"""ChatSession: what is computed again and what is not, and what remains of a turn that went wrong."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from quengine import LLM, EngineError, SamplingParams
from quengine.request.chat_options import ChatOptions
from quengine.request.chat_session import ChatSession
from tests.gguf_builder import ModelSizes
from tests.tiny_models import CHATML, chat_vocabulary, write_tiny

SIZES = ModelSizes(embedding=64, feed_forward=128, context=256)
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, seed=1)
KIND = ChatOptions(system="be kind")
SHOUTED = CHATML.replace(
    "m['content']", "(m['content'] | upper if m['role'] == 'assistant' else m['content'])"
)


def load(folder: Path, template: str = CHATML) -> LLM:
    path = write_tiny(
        folder / "chat.gguf", kind="Q8_0", sizes=SIZES, changes={"tokenizer.chat_template": template}
    )
    return LLM(path, device="cpu", backend="reference", threads=1, reuse_prefix=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with load(tmp_path_factory.mktemp("chat")) as loaded:
        yield loaded


def ask(session: ChatSession, text: str) -> str:
    return "".join(session.ask(text))


def test_a_turn_computes_only_what_was_added(llm: LLM) -> None:
    session = ChatSession(llm, PARAMS, options=KIND)
    ask(session, "hello")
    assert session.last is not None
    held = session.used_tokens - 1  # the last token was sampled, not computed
    for text in ("and then?", "why <|im_end|> so?"):
        ask(session, text)
        assert session.last.timings.cached_tokens == held > 0
        held = session.used_tokens - 1


def test_the_model_goes_on_from_the_tokens_that_it_generated(llm: LLM) -> None:
    session = ChatSession(llm, PARAMS)
    ask(session, "hello")
    assert session.last is not None
    first = session.last.tokens
    stream = list(llm.encode_chat([{"role": "user", "content": "hello"}])) + first
    newline = llm.encode("\n")
    end, start = (chat_vocabulary()["tokenizer.ggml.tokens"].index(t) for t in ("<|im_end|>", "<|im_start|>"))
    expected = [*stream, end, *newline, start, *llm.encode("user\nmore"), end, *newline, start]
    expected += llm.encode("assistant\n")
    ask(session, "more")
    assert session._turns[-1].prompt == expected
    assert session.last.tokens == llm.generate(expected, PARAMS)[0].tokens


def test_a_template_that_changes_the_answer_has_the_last_word(tmp_path: Path) -> None:
    with load(tmp_path, SHOUTED) as llm:
        bias = {llm.encode(letter)[0]: 50.0 for letter in "abc"}
        session = ChatSession(llm, SamplingParams(temperature=0, max_tokens=4, seed=1, logit_bias=bias))
        answer = ask(session, "hello")
        assert answer != answer.upper()
        ask(session, "more")
        assert session._turns[-1].prompt == llm.encode_chat(session.messages[:3])


def test_a_stop_string_is_not_fed_back(llm: LLM) -> None:
    (letter,) = llm.encode("b")
    params = SamplingParams(temperature=0, max_tokens=9, seed=1, logit_bias={letter: 1e6}, stop=("bbb",))
    session = ChatSession(llm, params)
    assert ask(session, "hello") == ""
    assert session.messages[1:] == [{"role": "assistant", "content": ""}]
    ask(session, "more")
    assert session._turns[-1].prompt == llm.encode_chat(session.messages[:3])


def test_an_answer_that_is_broken_off_is_kept_as_far_as_it_came(llm: LLM) -> None:
    session = ChatSession(llm, PARAMS)
    answer = session.ask("hello " * 8)
    first = next(answer)
    answer.close()
    assert session.last is not None and session.last.finish_reason == "abort"
    assert session.messages[-1] == {"role": "assistant", "content": session.last.text}
    assert session.last.text.startswith(first)
    ask(session, "go on")
    assert session.last.timings.cached_tokens > 0


def test_an_interrupt_before_the_answer_drops_the_turn(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    session = ChatSession(llm, PARAMS)
    ask(session, "hello")
    before = list(session.messages)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.runner, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ask(session, "again")
    assert session.messages == before
    ask(session, "again")
    assert len(session.messages) == 4


def test_a_conversation_that_outgrows_the_context_is_an_error_and_not_cut(llm: LLM) -> None:
    session = ChatSession(llm, PARAMS)
    ask(session, "hello")
    before = list(session.messages)
    with pytest.raises(EngineError, match=r"the context holds 256.*the model's own maximum"):
        ask(session, "word " * 300)
    assert session.messages == before


def test_reset_keeps_the_system_message_and_a_new_one_replaces_it(llm: LLM) -> None:
    session = ChatSession(llm, PARAMS, options=KIND)
    ask(session, "hello")
    session.reset()
    assert session.messages == [{"role": "system", "content": "be kind"}]
    ask(session, "hello")
    session.set_system("be terse")
    assert [m["role"] for m in session.messages] == ["system", "user", "assistant"]
    assert session.system == "be terse"
    session.set_system("")
    assert session.system is None
    assert [m["role"] for m in session.messages] == ["user", "assistant"]


def test_the_seed_is_drawn_once_for_the_conversation(llm: LLM) -> None:
    session = ChatSession(llm, SamplingParams(max_tokens=3))
    ask(session, "hello")
    assert session.last is not None and session.last.seed == session.params.seed


def test_a_saved_conversation_is_loaded_as_it_was(llm: LLM, tmp_path: Path) -> None:
    session = ChatSession(llm, PARAMS, options=KIND)
    ask(session, "hällo \u2603")
    session.save(tmp_path / "talk.json")
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]
    other = ChatSession(llm, PARAMS)
    other.load(tmp_path / "talk.json")
    assert other.messages == session.messages
    assert other.system == "be kind"
    ask(other, "more")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "is not a saved conversation"),
        ("[]", 'no list "messages"'),
        ('{"messages": [{"role": "pirate", "content": "x"}]}', "message 0 needs a role"),
        ('{"messages": [{"role": "user", "content": 3}]}', "message 0 needs a role"),
        ('{"messages": ["hello"]}', "message 0 needs a role"),
        ("\udcff", "cannot load .*: not UTF-8"),
    ],
)
def test_a_file_that_is_no_conversation_changes_nothing(
    llm: LLM, tmp_path: Path, content: str, problem: str
) -> None:
    session = ChatSession(llm, PARAMS, options=KIND)
    path = tmp_path / "talk.json"
    path.write_text(content, errors="surrogateescape")
    with pytest.raises(EngineError, match=problem):
        session.load(path)
    assert session.messages == [{"role": "system", "content": "be kind"}]


def test_files_that_cannot_be_read_or_written_are_errors(llm: LLM, tmp_path: Path) -> None:
    session = ChatSession(llm, PARAMS)
    with pytest.raises(EngineError, match="cannot load"):
        session.load(tmp_path / "none.json")
    with pytest.raises(EngineError, match="cannot save"):
        session.save(tmp_path / "none" / "talk.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(EngineError, match="cannot save"):
        session.save(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_saved_file_names_the_model(llm: LLM, tmp_path: Path) -> None:
    ChatSession(llm, PARAMS, options=ChatOptions(system="x")).save(tmp_path / "talk.json")
    assert json.loads((tmp_path / "talk.json").read_text())["model"] == "chat.gguf"


def test_a_retry_computes_only_the_last_token_of_the_prompt_again(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=10, ignore_eos=True, seed=1)
    session = ChatSession(llm, params, options=KIND)
    ask(session, "hello")
    ask(session, "and then?")
    before, prompt = session.messages.copy(), session._turns[-1].prompt
    list(session.retry())
    assert session._turns[-1].prompt == prompt and session.last is not None
    assert session.last.timings.cached_tokens == len(prompt) - 1 > 0
    assert session.messages[:-1] == before[:-1] and session.messages[-1] != before[-1]
    assert session.last.seed == 2


def test_a_retry_without_an_answer_leaves_the_old_one(llm: LLM) -> None:
    session = ChatSession(llm, PARAMS)
    ask(session, "hello")
    before, last = session.messages.copy(), session.last
    with pytest.raises(EngineError, match="context holds"):
        list(session.retry("word " * 500))
    assert session.messages == before and session.last is last


def test_undo_removes_one_exchange(llm: LLM) -> None:
    session = ChatSession(llm, PARAMS, options=KIND)
    ask(session, "hello")
    assert session.undo() == "hello"
    assert session.messages == [{"role": "system", "content": "be kind"}] and session.used_tokens == 0
    with pytest.raises(EngineError, match="no message yet"):
        session.undo()
