"""Log-probabilities of a prompt's tokens: the prompt as a text whose tokens are known, one decode step each.

In a batch its steps are those of any other text, so it waits for nobody and nobody waits for it; its logits are those
of the decode step. Knows sequences and samplers; not which engine computes them.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING

from quengine.request.sampling_params import SamplingParams
from quengine.request.sequence import Sequence
from quengine.request.text_stream import TextStream
from quengine.sampler import Sample, Sampler, token_logprobs

if TYPE_CHECKING:
    from torch import Tensor


class KnownTokens(Sampler):
    """Takes the token that stands at each position of `tokens`, and says how likely it was."""

    def __init__(self, params: SamplingParams, vocab_size: int, tokens: Seq[int]) -> None:
        super().__init__(params, vocab_size)
        self._tokens = tokens

    def sample(self, logits: "Tensor", history: Seq[int], position: int) -> Sample:
        chosen = super().sample(logits, history, position)  # which also sees that the logits are finite
        assert chosen.logprobs is not None
        token, given = self._tokens[position], logits.float().cpu().numpy()
        return Sample(token, token_logprobs(given, token, len(chosen.logprobs.top)))


def scoring_sequence(prompt: Seq[int], params: SamplingParams, vocab_size: int, ctx_size: int) -> Sequence:
    """A sequence whose `logprobs`, when it has finished, are those of prompt[1:]. The prompt has two tokens or more."""
    plain = replace(
        SamplingParams(temperature=0, max_tokens=len(prompt) - 1, logprobs=params.logprobs), seed=params.seed
    )
    sampler = KnownTokens(plain, vocab_size, list(prompt))
    return Sequence([prompt[0]], plain, sampler, TextStream(_no_text, ()), frozenset(), ctx_size)


def _no_text(token: int) -> bytes:
    del token
    return b""
