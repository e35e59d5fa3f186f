"""A fake engine that says given texts in harmony, byte by byte, its marks being control tokens as gpt-oss's are; and a
model of it that reasons between tags."""

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import openai

from quengine.models.tokenizer.token_length import TokenLength
from quengine.request.text_stream import TextStream
from quengine.serve.processes.shared_engine import Event, Finished, GenerationRequest
from quengine.structured.answer_format import AnswerFormat, TextFormat
from quengine.structured.calls.format import GENERIC_FORM, CallFormat
from quengine.structured.harmony import HarmonyFormat
from quengine.structured.reasoning_format import ReasoningFormat
from quengine.structured.reasoning_tags import ReasoningTags
from tests.engine.serve.fake_engine import FIRST_BYTE, FakeEngine, FakeModel, _seed, _Sequence, _timings

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>")
FIRST_MARK = FakeModel.vocab_size
_MARK = re.compile("(" + "|".join(map(re.escape, MARKS)) + ")")


class SpeakingModel(FakeModel):
    vocab_size = FakeModel.vocab_size + len(MARKS)
    answer_format: AnswerFormat = HarmonyFormat({mark: FIRST_MARK + n for n, mark in enumerate(MARKS)})

    def __init__(self, ctx_size: int) -> None:
        super().__init__(ctx_size)
        self.template = "{{ reasoning_effort }}"
        self.token_length = TokenLength(20)

    def spoken(self, text: str) -> list[int]:
        """The tokens of an answer."""
        parts = [part for part in _MARK.split(text) if part]
        return [
            token
            for part in parts
            for token in (
                [FIRST_MARK + MARKS.index(part)]
                if part in MARKS
                else self.encode(part, bos=False, special=False)
            )
        ]

    def token_bytes(self, token: int) -> bytes:
        if FIRST_MARK <= token < self.vocab_size:
            return MARKS[token - FIRST_MARK].encode()
        return super().token_bytes(token)


class ThinkingModel(SpeakingModel):
    """Writes <think>, which its prompts open with the variable `opened`, and tool calls as Qwen3 does."""

    answer_format = ReasoningFormat(
        ReasoningTags("<think>\n", "\n</think>\n\n"), TextFormat(CallFormat(GENERIC_FORM))
    )

    def __init__(self, ctx_size: int) -> None:
        super().__init__(ctx_size)
        self.template = "{{ enable_thinking }}"

    def answer_begin(self, variables: Mapping[str, Any]) -> str:
        end = "<think>\n\n</think>\n\n" if variables.get("enable_thinking") is False else ""
        return "<think>\n" if variables.get("opened") else end


class SpeakingEngine(FakeEngine):
    """Says the value of `says` by whose key the prompt ends; behind a server one token at a time (`serving`)."""

    model: SpeakingModel

    def __init__(self, says: Mapping[str, str], model: SpeakingModel | None = None) -> None:
        super().__init__(step_s=0.0)
        self.model = model or SpeakingModel(4096)
        self._says = {key: self.model.spoken(text) for key, text in says.items()}

    def add(self, request: GenerationRequest) -> None:
        super().add(request)
        shown = request.show_special
        hidden = range(FIRST_MARK, self.model.vocab_size)

        def bytes_of(token: int) -> bytes:
            hide = token in hidden and shown is not True and token not in (shown or ())
            return b"" if hide else self.model.token_bytes(token)

        self._sequences[request.id].stream = TextStream(bytes_of, request.params.stop)

    def _advance(self, sequence: _Sequence) -> list[Event]:
        request = sequence.request
        sequence.first = sequence.first or time.perf_counter()
        tokens = self._script(request.prompt)
        events = self._take(sequence, tokens[sequence.generated])
        if sequence.generated == len(tokens) and request.id in self._sequences:
            del self._sequences[request.id]
            ended = Finished(request.id, "stop", None, _timings(sequence), _seed(request.params))
            events.append(ended)
        return events

    def _script(self, prompt: Sequence[int]) -> list[int]:
        text = bytes(token - FIRST_BYTE for token in prompt).decode()
        text = text.removesuffix("<think>\n").removesuffix("<think>\n\n</think>\n\n")
        (tokens,) = (tokens for key, tokens in self._says.items() if text.endswith(key))
        return tokens


def chat(client: openai.OpenAI, text: str, **more: Any) -> Any:
    """The answer to one message."""
    return client.chat.completions.create(model="fake", messages=[{"role": "user", "content": text}], **more)
