"""An engine without a model, for load tests: token = hash of request and position, many sequences at once.

The tokens of a request are known beforehand (`expected_tokens`), so that one that is missing, doubled or
in another stream's text shows. Its vocabulary is words `w0 ` .. `w9999 `; text is encoded as its bytes.
"""

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quengine.errors import EngineError
from quengine.models.tokenizer.token_length import TokenLength
from quengine.request.chat_format import Ending
from quengine.request.output import Timings
from quengine.request.pooling import Pooling
from quengine.request.sampling_params import SamplingParams
from quengine.request.text_stream import TextStream
from quengine.sampler import TokenLogprobs
from quengine.serve.processes.shared_engine import (
    EngineStats,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Piece,
    PromptProgress,
    SlotAction,
    SlotDone,
    SlotStats,
    Work,
)
from quengine.serve.processes.shared_model import ServedModel
from quengine.structured.answer_format import AnswerFormat, TextFormat

WORDS = 10_000
EMBEDDING = 8
"""Values of a vector."""
FIM = {"fim_pre": 1, "fim_suf": 2, "fim_mid": 3}
FIRST_BYTE = WORDS
"""Token FIRST_BYTE + b is the byte b; prompts consist of these."""
FAILING_PROMPT = "please fail"
"""A prompt that ends so fails at its first step."""
CRASHING_PROMPT = "please crash"
"""A prompt that ends so takes the engine with it."""


def expected_tokens(prompt: Sequence[int], seed: int, index: int, count: int) -> list[int]:
    """The first `count` tokens after `prompt`."""
    key = hashlib.blake2b(b"".join(t.to_bytes(4, "little") for t in prompt), digest_size=16).digest()
    return [_token(key, seed, index, position) for position in range(count)]


def _token(key: bytes, seed: int, index: int, position: int) -> int:
    what = b"%b %d %d %d" % (key, seed, index, position)
    return int.from_bytes(hashlib.blake2b(what, digest_size=8).digest(), "little") % WORDS


class FakeModel(ServedModel):
    """A model without a file."""

    vocab_size = WORDS + 256
    answer_format: AnswerFormat = TextFormat()

    def __init__(self, ctx_size: int) -> None:
        self.ctx_size = ctx_size
        self.template = "the messages as role: content, a line each"
        self.notes = ("a fake engine: tokens are hashes",)
        self.bos_id = self.eos_id = None
        self.pair_gap: list[int] = []
        self.eos_ids = frozenset()
        self.token_length = TokenLength(1)
        self.source = None
        self.facts = {"n_ctx_train": ctx_size, "n_vocab": self.vocab_size, "n_embd": EMBEDDING}

    def encode(self, text: str, bos: bool, special: bool) -> list[int]:
        del bos, special
        return [FIRST_BYTE + byte for byte in text.encode(errors="replace")]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.vocab_size:
            raise EngineError(f"token {token} is not from 0 to {self.vocab_size - 1}")
        return b"w%d " % token if token < WORDS else bytes([token - FIRST_BYTE])

    def fim_id(self, role: str) -> int | None:
        return FIM.get(role)

    def prepare(self, params: SamplingParams) -> None:
        if params.constraint is not None:
            raise EngineError(f"{params.constraint.kind}: the fake engine holds to none")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
        ending: Ending = "answer",
    ) -> str:
        del tools, ending
        lines = "\n".join(f"{m['role']}: {m.get('content') or ''}" for m in messages)
        return lines + self.answer_begin(variables)

    def answer_begin(self, variables: Mapping[str, Any]) -> str:
        """What a prompt has begun of its answer."""
        del variables
        return ""

    def encode_chat(self, *given: Any, **named: Any) -> list[int]:
        *rendered, _ = given  # it has no images
        return self.encode(self.render_chat(*rendered, **named), bos=True, special=False)


@dataclass
class _Sequence:
    request: GenerationRequest
    key: bytes
    stream: TextStream
    computed: int = 0
    generated: int = 0
    started: float = field(default_factory=time.perf_counter)
    first: float = 0.0


class FakeEngine:
    """See the module docstring. A step takes `step_s` seconds and prefills `chunk` tokens of every new prompt."""

    def __init__(
        self, ctx_size: int = 4096, capacity: int = 64, step_s: float = 0.002, chunk: int = 256
    ) -> None:
        self.model = FakeModel(ctx_size)
        self.capacity = capacity
        self._step_s = step_s
        self._chunk = chunk
        self._sequences: dict[int, _Sequence] = {}
        self._slots_done: list[Event] = []

    silent_seconds = 0.0

    def add(self, request: Work) -> None:
        if isinstance(request, SlotAction):
            self._slots_done.append(SlotDone(request.id, 0))
            return
        if len(self._sequences) >= self.capacity:
            raise EngineError(f"all {self.capacity} slots are taken")
        prompt = b"".join(t.to_bytes(4, "little") for t in request.prompt)
        key = hashlib.blake2b(prompt, digest_size=16).digest()
        stream = TextStream(self.model.token_bytes, request.params.stop)
        self._sequences[request.id] = _Sequence(request, key, stream)

    def cancel(self, request_id: int) -> None:
        self._sequences.pop(request_id, None)

    def step(self) -> list[Event]:
        time.sleep(self._step_s)
        events, self._slots_done = self._slots_done, []
        for sequence in list(self._sequences.values()):
            events += self._advance(sequence)
        return events

    def stats(self) -> EngineStats:
        slots = tuple(
            SlotStats(s.request.id, len(s.request.prompt), s.computed, s.generated)
            for s in self._sequences.values()
        )
        used = sum(slot.computed for slot in slots)
        return EngineStats(slots, used, self.capacity * self.model.ctx_size)

    def kill(self) -> None:
        """Nothing: it runs in this process."""

    def close(self) -> None:
        self._sequences.clear()

    def _advance(self, sequence: _Sequence) -> list[Event]:
        request = sequence.request
        missing = len(request.prompt) - sequence.computed
        if missing > self._chunk:
            sequence.computed += self._chunk
            return self._progress(sequence, sequence.computed)
        if sequence.generated == 0:
            text = self.model.decode(request.prompt[-20:])
            if text.endswith(CRASHING_PROMPT):
                raise RuntimeError("the device is gone")
            if text.endswith(FAILING_PROMPT):
                del self._sequences[request.id]
                return [Failed(request.id, "logits are not finite")]
            sequence.first = time.perf_counter()
            if request.pooling is not None:
                del self._sequences[request.id]
                vector = expected_embedding(request.prompt, request.pooling)
                return [Finished(request.id, "stop", None, _timings(sequence), _seed(request.params), vector)]
        token = _token(sequence.key, _seed(request.params), request.index, sequence.generated)
        done = self._progress(sequence, len(request.prompt)) if sequence.generated == 0 else []
        return done + (
            self._end_unsaid(sequence) if request.params.max_tokens == 0 else self._take(sequence, token)
        )

    def _end_unsaid(self, sequence: _Sequence) -> list[Event]:
        """The end of a prompt behind which no token is wanted."""
        request = sequence.request
        del self._sequences[request.id]
        scores = self._scores(request)
        end = Finished(request.id, "length", None, _timings(sequence), _seed(request.params))
        return [*([Piece(request.id, (), "", (), scores)] if scores else []), end]

    def _scores(self, request: GenerationRequest) -> tuple[TokenLogprobs, ...]:
        top = request.params.logprobs
        if not request.score_prompt or top is None:
            return ()
        return tuple(_logprobs(given, top) for given in request.prompt[1:])

    def _progress(self, sequence: _Sequence, processed: int) -> list[Event]:
        """Of a prompt of which nothing was in the cache."""
        request, begins = sequence.request, processed <= self._chunk
        reports = tuple(
            PromptProgress(len(request.prompt), 0, each, 1.0)
            for each in ((0, processed) if begins else (processed,))
        )
        return [Piece(request.id, (), "", progress=reports)] if request.progress else []

    def _take(self, sequence: _Sequence, token: int) -> list[Event]:
        request, params = sequence.request, sequence.request.params
        sequence.generated += 1
        sequence.computed = len(request.prompt) + sequence.generated - 1
        text = sequence.stream.push(token)
        reason = None
        if sequence.stream.stopped is not None:
            reason = "stop"
        elif (
            sequence.generated == params.max_tokens
            or len(request.prompt) + sequence.generated >= self.model.ctx_size
        ):
            reason = "length"
            text += sequence.stream.finish()
        logprobs = () if params.logprobs is None else (_logprobs(token, params.logprobs),)
        scores = self._scores(request) if sequence.generated == 1 else ()
        events: list[Event] = [Piece(request.id, (token,), text, logprobs, scores)]
        if reason is not None:
            del self._sequences[request.id]
            events.append(
                Finished(request.id, reason, sequence.stream.stopped, _timings(sequence), _seed(params))
            )
        return events


def expected_embedding(prompt: Sequence[int], pooling: Pooling) -> tuple[float, ...]:
    """The vector of a prompt: a hash, of unit length; without pooling a row a token."""
    if pooling == "none":
        return tuple(float(token + each) for token in prompt for each in range(EMBEDDING))
    raw = hashlib.blake2b(repr((list(prompt), pooling)).encode(), digest_size=EMBEDDING).digest()
    length = math.hypot(*raw)
    return tuple(byte / length for byte in raw)


def _seed(params: SamplingParams) -> int:
    assert params.seed is not None
    return params.seed


def _logprobs(token: int, top: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, tuple(((token + i) % WORDS, -0.5 - i) for i in range(top)))


def _timings(sequence: _Sequence) -> Timings:
    now = time.perf_counter()
    return Timings(
        prompt_tokens=len(sequence.request.prompt),
        prompt_s=sequence.first - sequence.started,
        ttft_s=sequence.first - sequence.request.arrived,
        generated_tokens=sequence.generated,
        decode_s=now - sequence.first,
    )
