"""Parts that answers of several APIs have, as structs."""

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from quengine.serve.schemas.fields import Token
from quengine.serve.schemas.written import Count, Written

Rate = Annotated[float, Meta(ge=0)]


class Timings(Written, kw_only=True):
    """As llama-server's clients read them; drafts and context shifts only where there were any."""

    cache_n: Count
    prompt_n: Count
    prompt_ms: Rate
    prompt_per_token_ms: Rate
    prompt_per_second: Rate
    predicted_n: Count
    predicted_ms: Rate
    predicted_per_token_ms: Rate
    predicted_per_second: Rate
    draft_n: Count | UnsetType = UNSET
    draft_n_accepted: Count | UnsetType = UNSET
    draft_steps: Count | UnsetType = UNSET
    draft_accept_rate: Rate | UnsetType = UNSET
    draft_accept_length: Rate | UnsetType = UNSET
    shift_n: Count | UnsetType = UNSET
    shift_discarded_n: Count | UnsetType = UNSET


class PromptProgress(Written):
    """`time_ms` is since the prompt's first step."""

    total: Count
    cache: Count
    processed: Count
    time_ms: Rate


class TokenScore(Written, kw_only=True):
    """A token with its log-probability, or with post_sampling_probs its probability."""

    id: Token
    token: str
    bytes: list[Count]
    logprob: float | UnsetType = UNSET
    prob: float | UnsetType = UNSET


class ScoredToken(TokenScore, kw_only=True):
    """A token of the text, and the likeliest ones in its place."""

    top_logprobs: list[TokenScore] | UnsetType = UNSET
    top_probs: list[TokenScore] | UnsetType = UNSET
