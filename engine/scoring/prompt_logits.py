"""The logits after a prompt's tokens, given to a function slice by slice on the device that computed them.

Prompts take the engine's usual way: the scheduler's chunks, steps of several prompts, the prefix cache, ranks.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quengine.completion_stream import CompletionStream
from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.models.tokenizer import Tokenizer
from quengine.request.prompt import Prompt
from quengine.request.prompt_scores import PromptScores
from quengine.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

_ROOM = 2048
"""Positions of the prompts that are computed at the same time, at most, unless a single prompt has more."""


class PromptEngine(Protocol):
    """What computes prompts: an LLM."""

    config: EngineConfig
    ctx_size: int
    tokenizer: Tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the beginning-of-text token if the model uses one."""
        ...

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> CompletionStream:
        """A request, which is queued once it is started."""
        ...

    def step(self) -> object:
        """Computes one batch, or waits for the batch that another thread computes."""
        ...

    def end_step(self) -> None:
        """Waits until the current step, if any, is done."""
        ...


class PromptLogits(PromptScores):
    """A prompt whose logits are wanted from position `first` on.

    `take` is called with slices of them in order: fp32 [n, vocab] after the tokens at positions p .. p + n - 1, and p.
    A slice has at most `MAX_LOGITS_BYTES`, and is valid until `take` returns.
    """

    def __init__(self, ids: Seq[int], first: int, take: "Callable[[Tensor, int], None]") -> None:
        super().__init__(ids, top=0)
        self._at = first
        self._take = take

    @property
    def missing_rows(self) -> range:
        """Positions whose logits have yet to be given to `add`."""
        return range(self._at, len(self.prompt))

    def add(self, logits: "Tensor") -> None:
        """Takes the logits [n, vocab] after the tokens at the first n of `missing_rows`, on any device."""
        self._take(logits.float(), self._at)
        self._at += len(logits)


def compute(llm: PromptEngine, prompts: Iterable[PromptLogits]) -> Iterator[PromptLogits]:
    """Computes prompts, up to `parallel` at a time; yields each once all its logits were taken, in order.

    Raises:
        EngineError: a prompt does not fit the context, or `take` raised it.
    """
    waiting, params = iter(prompts), SamplingParams(temperature=0.0, max_tokens=0)
    streams = deque[CompletionStream]()
    try:
        while _fill(llm, streams, waiting, params):
            while not streams[0].sequence.finished:
                llm.step()
            llm.end_step()
            sequence = streams[0].sequence
            if sequence.error is not None:
                raise sequence.error
            streams.popleft()
            assert isinstance(sequence.scores, PromptLogits)
            yield sequence.scores
    finally:
        for stream in streams:
            stream.close()


def _fill(
    llm: PromptEngine,
    streams: deque[CompletionStream],
    waiting: Iterator[PromptLogits],
    params: SamplingParams,
) -> bool:
    """Queues the next prompts; returns whether any is under way."""
    while len(streams) < 2 * llm.config.parallel and (prompt := next(waiting, None)) is not None:
        stream = llm.stream(prompt.prompt, params)
        stream.sequence.scores = prompt
        streams.append(stream)
        stream.start()
    return bool(streams)


def target_logprobs(logits: "Tensor", targets: Seq[int]) -> "Tensor":
    """log p of each row's target: fp32 logits [n, vocab] -> fp64 [n] on their device. The logits are overwritten."""
    import torch

    largest = logits.amax(-1, keepdim=True)
    chosen = logits.gather(1, torch.tensor(targets, device=logits.device)[:, None]) - largest
    sums = logits.sub_(largest).exp_().sum(-1, dtype=torch.float64)
    return chosen[:, 0].double() - sums.log()


class ScoredTokens(NamedTuple):
    """Tokens that are computed together; those from position `first` on are scored."""

    ids: list[int]
    first: int


class TargetLogprobs:
    """Log-probabilities of the tokens of `ids` from position `first` to the last.

    `prompt` is what has to be computed; `values` are valid once it was: fp64, one a token, on the host.
    """

    def __init__(self, ids: Seq[int], first: int, last: int | None = None) -> None:
        self._targets = list(ids[:last])
        self._first = first
        self._parts = list["Tensor"]()
        self.prompt = PromptLogits(self._targets[:-1], first - 1, self._take)

    def _take(self, logits: "Tensor", position: int) -> None:
        targets = self._targets[position + 1 : position + 1 + len(logits)]
        self._parts.append(target_logprobs(logits, targets))

    def values(self) -> list[float]:
        """The log-probabilities, one a token. Raises EngineError if one is not finite."""
        import torch

        values = torch.cat(self._parts).cpu()
        for place in (~values.isfinite()).nonzero()[:1].flatten().tolist():
            raise EngineError(
                f"the log-probability of token {self._first + place} is {float(values[place])}: the model file may be "
                "damaged, or the backend is at fault: try --backend reference"
            )
        found: list[float] = values.tolist()
        return found


def parallel_prompts(ctx: int) -> int:
    """How many prompts of `ctx` tokens are computed at the same time."""
    return max(1, _ROOM // ctx)
