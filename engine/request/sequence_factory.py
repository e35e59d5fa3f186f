"""Requests' prompts and parameters, checked and made into sequences that the scheduler takes."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property

from quengine.context.context_shift import ContextShift
from quengine.errors import EngineError
from quengine.kernels.sampling import Choose
from quengine.models.config import ModelConfig
from quengine.models.tokenizer import Tokenizer
from quengine.request.adapter_scales import NO_ADAPTERS, AdapterScales
from quengine.request.prompt_images import PromptImages
from quengine.request.prompt_scores import PromptScores
from quengine.request.sampling_params import SamplingParams
from quengine.request.sequence import Sequence
from quengine.request.text_stream import TextStream
from quengine.sampler import Sampler
from quengine.sampling_chain.dry import BreakerFinder
from quengine.sampling_chain.pool import Infill
from quengine.structured.constraint import ConstraintCompiler
from quengine.structured.token_mask import MinTokens, TokenMask


@dataclass(frozen=True)
class SequenceFactory:
    """Makes sequences for one model. `choose` chooses tokens on the host. adapters: the model's."""

    tokenizer: Tokenizer
    config: ModelConfig
    ctx_size: int
    constraints: ConstraintCompiler
    choose: Choose
    adapters: AdapterScales = NO_ADAPTERS

    def make(
        self,
        ids: list[int],
        params: SamplingParams,
        index: int = 0,
        show_special: bool | Collection[int] = False,
        answers: bool = True,
        images: PromptImages | None = None,
    ) -> Sequence:
        """The sequence of a prompt; `index` and `show_special` as for `LLM.stream`. answers: tokens follow the prompt.
        images: the prompt's.

        Raises:
            EngineError: the prompt does not fit; a parameter names a token outside the vocabulary or an adapter that is
                not loaded; the constraint cannot be compiled; or a prompt with images is to be scored.
        """
        ids, params = self.checked(ids, answers), self.resolved(params)
        spec = params.constraint
        constraint = None if spec is None else self.constraints.compile(spec, params.stop_token_ids)
        end_ids = self.tokenizer.eos_ids | set(params.stop_token_ids)
        mask: TokenMask | None = constraint
        if params.min_tokens:
            mask = MinTokens(params.min_tokens, end_ids, self.config.vocab_size, constraint)
        breakers = self._breakers.find(params.dry_sequence_breakers) if "dry" in params.order else None
        infill = Infill(self.tokenizer.eos_ids, self._bytes.__getitem__) if "infill" in params.order else None
        sampler = Sampler(params, self.config.vocab_size, index, mask, self.choose, breakers, infill)
        stream = TextStream(self._shown_bytes(show_special), params.stop, params.n_indent)
        shift = ContextShift.of(params, len(ids), self.tokenizer.add_bos)
        top = params.prompt_logprobs
        if top is not None and images is not None:
            raise EngineError("prompt_logprobs: a prompt with images has no log-probabilities")
        return Sequence(
            *(ids, params, sampler, stream, end_ids, self.ctx_size),
            shift=shift,
            images=images,
            scores=None if top is None else PromptScores(ids, top),
            opening=self._opening(ids) if self._keeps_states else 0,
            adapters=self.adapters.of(params.lora),
        )

    @cached_property
    def _keeps_states(self) -> bool:
        return any(group.is_state for group in self.config.cache_groups)

    def _opening(self, ids: list[int]) -> int:
        """The number of tokens of a chat's first message. All messages begin with the same control token, so the second
        one begins at the first control token that occurs again. 0 if none does."""
        # Models may have more rows than their tokenizer has tokens.
        known = (token for token in set(ids) if token < self.tokenizer.vocab_size)
        control, seen = set(filter(self.tokenizer.is_control, known)), set[int]()
        for position, token in enumerate(ids) if control else ():
            if token in control and token in seen:
                return position
            seen.add(token)
        return 0

    @cached_property
    def _breakers(self) -> BreakerFinder:
        return BreakerFinder(self.tokenizer, self.config.vocab_size)

    def resolved(self, params: SamplingParams) -> SamplingParams:
        """The parameters with a seed, and with biases of -inf for the tokens that the model never generates and, with
        `ignore_eos`, for its end tokens."""
        params, known = params.with_seed(), self.tokenizer
        tokens = known.suppressed_ids | known.eos_ids if params.ignore_eos else known.suppressed_ids
        if not tokens:
            return params
        # Some tokenizers have more tokens than the model's embedding has rows.
        banned = dict.fromkeys((token for token in tokens if token < self.config.vocab_size), -math.inf)
        return replace(params, logit_bias={**params.logit_bias, **banned})

    def checked(self, ids: list[int], answers: bool = True) -> list[int]:
        """A prompt's ids. If it `answers`, the context must hold one token more.

        Raises EngineError if there are none, too many, or one is not in the vocabulary.
        """
        if not ids:
            raise EngineError("the prompt is empty: it has no tokens, and this model adds none of its own")
        if len(ids) > self.ctx_size - answers:
            longest = self.config.context_length
            more = (
                f"shorten the prompt or raise -c (this model: up to {longest})"
                if self.ctx_size < longest
                else "shorten the prompt: that is the model's own maximum"
            )
            raise EngineError(
                f"the prompt has {len(ids)} tokens and the context holds {self.ctx_size}"
                f"{', of which one is for the answer' if answers else ''}; {more}"
            )
        vocab = self.config.vocab_size
        for position, token in enumerate(ids):
            if not 0 <= token < vocab:
                raise EngineError(
                    f"token id {token} at position {position} is not in the vocabulary of {vocab}"
                )
        return ids

    def _shown_bytes(self, special: bool | Collection[int]) -> Callable[[int], bytes]:
        tokenizer = self.tokenizer
        if special is True:
            return tokenizer.token_bytes
        if not special:
            return self._bytes.__getitem__
        return lambda token: tokenizer.token_bytes(token) if token in special else self._bytes[token]

    @cached_property
    def _bytes(self) -> "_ShownBytes":
        return _ShownBytes(self.tokenizer)


class _ShownBytes(dict[int, bytes]):
    """The bytes of each token by id, looked up once; control tokens have none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> bytes:
        known = self._tokenizer
        self[token] = found = b"" if known.is_control(token) else known.token_bytes(token)
        return found
