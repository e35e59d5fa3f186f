"""Sampling parameters of a request: how tokens are chosen and when to stop.

The defaults are those of llama.cpp. The sampler checks that token ids are in the vocabulary. docs/sampling.md gives the
order of the samplers.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from quengine.errors import EngineError, shown
from quengine.options import Flag, ranges
from quengine.options import Range as Range  # also for those who check a request's fields
from quengine.sampling_chain.names import DEFAULT_ORDER, read_flags, read_letters, read_names
from quengine.structured.constraint_spec import ConstraintSpec
from quengine.wrong_names import hinted_options

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_SEED = 2**64 - 1  # the seed is the 64-bit key of the random number generator
MAX_COUNT = 2**31 - 1
"""The largest token id or number of tokens: it fits int32, and exceeds every context and vocabulary."""
MAX_BIAS = 1e9
"""The largest number that may be added to a token's logit: it makes a token certain or impossible."""
MAX_PENALTY = 1e6
"""The largest temperature and penalty."""


MAX_BREAKER = 40
"""The most characters of a DRY sequence breaker; llama.cpp cuts longer ones."""
PANEL = "Sampling"
MORE = "More samplers"
_TOKEN = Range(0, MAX_COUNT)
_BIAS = Range(-MAX_BIAS, MAX_BIAS)
_INTEGERS = (
    *("max_tokens", "min_tokens", "top_k", "repeat_last_n", "seed", "logprobs", "n"),
    *("dry_allowed_length", "dry_penalty_last_n", "mirostat", "n_keep", "n_discard"),
    *("n_indent", "t_max_predict_ms"),
)
_OPTIONAL = ("max_tokens", "seed", "logprobs")
_FIXED = ("penalties", "top_k", "typ_p", "top_p", "min_p", "temperature")
"""The samplers of a CUDA graph, beside bias, in their order."""
_PLAIN: Mapping[str, Any] = {
    "samplers": DEFAULT_ORDER,
    "dry_multiplier": 0.0,
    "xtc_probability": 0.0,
    "mirostat": 0,
    "dynatemp_range": 0.0,
    "top_n_sigma": -1.0,
    "post_sampling_probs": False,
}
"""For each parameter that may need a chain of samplers, the value with which it has no effect."""


def _typed_biases(texts: Iterable[str]) -> dict[int, float]:
    """Reads the texts of --logit-bias, TOKEN_ID+BIAS or TOKEN_ID-BIAS; returns the bias of each token id."""
    return dict(map(_typed_bias, texts))


def _typed_breakers(texts: Iterable[str]) -> tuple[str, ...]:
    """Reads the texts of --dry-sequence-breaker: \\n and \\t are escapes, and "none" alone means no breaker."""
    plain = [text.replace("\\n", "\n").replace("\\t", "\t") for text in texts]
    return () if plain == ["none"] else tuple(plain)


def _typed_bias(text: str) -> tuple[int, float]:
    for sign in "+-":
        token, found, value = text.partition(sign)
        if found and token.isdecimal():
            try:
                return int(token), float(sign + value)
            except ValueError:
                break
    raise EngineError(
        f"--logit-bias {text!r}: must be TOKEN_ID+BIAS or TOKEN_ID-BIAS, such as 15043+1 or 2-inf"
    )


class LogitsProcessor(Protocol):
    """A function that changes the logits before each token."""

    def __call__(self, token_ids: list[int], logits: "NDArray[np.float32]", /) -> "NDArray[np.float32]":
        """The logits to go on with, the given array or another; -inf bans a token.

        Both arguments are copies.

        Args:
            token_ids: the tokens of the prompt and of the text so far.
            logits: the model's own, fp32 [vocab].
        """
        ...


@hinted_options
@dataclass(frozen=True)
class SamplingParams:
    """How one sequence is sampled. Immutable; values are checked when it is made.

    Attributes:
        max_tokens: most tokens to generate; 0: only the prompt is computed; None: until the context is full, or with
            `context_shift` without end.
        min_tokens: fewest tokens before an end token or one of `stop_token_ids`; stop strings and `max_tokens` end
            the text earlier.
        temperature: logits are divided by it; 0 takes the most likely token (greedy).
        top_k: keep the k most likely tokens; 0 or -1: all of them.
        top_p: keep the most likely tokens that together reach this probability; 1: all of them.
        min_p: drop tokens less likely than this share of the most likely one; 0: none.
        typical_p: keep the tokens of most typical surprise that together reach this probability; 1: all.
        repeat_penalty: divides (multiplies when negative) the logits of recent tokens; 1: no penalty.
        repeat_last_n: how many of the last tokens, prompt included, the penalties look at; 0: none, -1: all.
        presence_penalty: subtracted from the logit of every recent token; 0: no penalty.
        frequency_penalty: subtracted once for every time a token is among the recent ones; 0: no penalty.
        logit_bias: token id -> number added to its logit before all else; -inf bans the token.
        seed: makes the text repeatable; None: `with_seed` draws one.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: tokens that end the text, beside the model's own end tokens.
        ignore_eos: go on after the model's end tokens (benchmarks).
        logprobs: report the log-probability of each token, and of this many likely ones; None: no report.
        prompt_logprobs: the same for each token of the prompt but the first; None: no report.
        logits_processors: functions that change the logits before each token, in order (`LogitsProcessor`); the
            constraint and `logit_bias` are applied after them. The host samples such a sequence, so on a GPU each of
            its steps waits for the one before.
        constraint: what the text has to be (a JSON schema, a regex, a grammar); None: anything.
        dry_multiplier: DRY, a penalty on going on with a repetition (`sampling_chain.dry`): its size; 0: off.
        dry_base: the factor by which the penalty grows with each token of the repetition.
        dry_allowed_length: repetitions of fewer tokens are free.
        dry_penalty_last_n: how many of the last tokens are searched for repetitions; -1: all.
        dry_sequence_breakers: texts that end a repetition.
        xtc_probability: XTC: how often the tokens at or above `xtc_threshold` are dropped, but for the least likely.
        xtc_threshold: the least probability of the tokens that XTC considers; above 0.5: off.
        mirostat: version 1 or 2, which keeps the surprise of tokens near a target, with no other sampler but the
            temperature; 0: off.
        mirostat_tau: the target surprise of `mirostat`, in bits.
        mirostat_eta: the learning rate of `mirostat`.
        dynatemp_range: the temperature is up to this much lower or higher, by the entropy; 0: fixed.
        dynatemp_exponent: the exponent of the entropy in that.
        top_n_sigma: keep tokens within this many standard deviations of the largest logit; 0 or -1: all.
        samplers: which samplers are applied, in this order: names, or a string of letters (`sampling_chain.names`).
        post_sampling_probs: `logprobs` are the probabilities after the samplers, from which the token was drawn.
        context_shift: where the context is full, discard tokens and go on, in place of ending.
        n_keep: first tokens that a context shift keeps; -1: the prompt.
        n_discard: tokens after these that a context shift discards; 0: half of the rest.
        n_indent: ends the text before a line, other than its first, with fewer spaces and tabs at its beginning.
        t_max_predict_ms: ends the text at the first line end after this time since its first token; 0 or -1: never.
        lora: the scales of the model's LoRA adapters by number, from 0 in the order of loading; those that are left out
            are 0. None: the scales that they were loaded with.
        n: completions of the prompt; they share the seed and have streams of random numbers of their own.

    Raises:
        EngineError: a value is outside its range; one line with the field, the value and the range.
    """

    max_tokens: Annotated[
        int | None,
        Range(0, MAX_COUNT),
        Flag(
            "-n --max-tokens --n-predict --predict",
            "Most tokens to generate; 0: none, -1: until the context is full.",
            none=-1,
        ),
    ] = None
    min_tokens: Annotated[int, Range(0, MAX_COUNT)] = 0
    temperature: Annotated[
        float, Range(0, MAX_PENALTY), Flag("--temp --temperature", "0 takes the most likely token.", PANEL)
    ] = 0.8
    top_k: Annotated[int, Range(-1, MAX_COUNT), Flag("--top-k", "Keep the K most likely; 0: all.", PANEL)] = (
        40
    )
    top_p: Annotated[
        float, Range(0, 1), Flag("--top-p", "Keep the most likely, which add up to P; 1: all.", PANEL)
    ] = 0.95
    min_p: Annotated[
        float,
        Range(0, 1),
        Flag("--min-p", "Drop tokens with less than P times the highest probability.", PANEL),
    ] = 0.05
    typical_p: Annotated[
        float, Range(0, 1), Flag("--typical --typical-p", "Locally typical mass; 1: off.", PANEL)
    ] = 1.0
    repeat_penalty: Annotated[
        float,
        Range(above=0, high=MAX_PENALTY),
        Flag("--repeat-penalty", "Penalty on recent tokens; 1: off.", PANEL),
    ] = 1.0
    repeat_last_n: Annotated[
        int,
        Range(-1, MAX_COUNT),
        Flag("--repeat-last-n", "How many tokens penalties look at; -1: all.", PANEL),
    ] = 64
    presence_penalty: Annotated[
        float, Range(-MAX_PENALTY, MAX_PENALTY), Flag("--presence-penalty", "0: off.", PANEL)
    ] = 0.0
    frequency_penalty: Annotated[
        float, Range(-MAX_PENALTY, MAX_PENALTY), Flag("--frequency-penalty", "0: off.", PANEL)
    ] = 0.0
    logit_bias: Annotated[
        Mapping[int, float],
        Flag("--logit-bias", "TOKEN_ID+BIAS or TOKEN_ID-BIAS; repeatable.", PANEL, read=_typed_biases),
    ] = field(default_factory=dict, hash=False)
    seed: Annotated[
        int | None,
        Range(0, MAX_SEED),
        Flag("-s --seed", "Same seed, same text; -1: a new one.", PANEL, none=-1),
    ] = None
    stop: Annotated[
        tuple[str, ...], Flag("--stop --reverse-prompt -r", "End before this text; repeatable.", PANEL)
    ] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: Annotated[bool, Flag("--ignore-eos", "Go on after the model's end token.", PANEL)] = False
    logprobs: Annotated[int | None, Range(0, MAX_COUNT)] = None
    prompt_logprobs: int | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    constraint: ConstraintSpec | None = None
    dry_multiplier: Annotated[
        float, Range(0, MAX_PENALTY), Flag("--dry-multiplier", "DRY: penalty on repetitions; 0: off.", MORE)
    ] = 0.0
    dry_base: Annotated[
        float, Range(1, MAX_PENALTY), Flag("--dry-base", "DRY: grows by this with each token.", MORE)
    ] = 1.75
    dry_allowed_length: Annotated[
        int, Range(0, MAX_COUNT), Flag("--dry-allowed-length", "DRY: shorter repetitions are free.", MORE)
    ] = 2
    dry_penalty_last_n: Annotated[
        int, Range(-1, MAX_COUNT), Flag("--dry-penalty-last-n", "DRY: tokens it looks at; -1: all.", MORE)
    ] = 64
    dry_sequence_breakers: Annotated[
        tuple[str, ...],
        Flag(
            "--dry-sequence-breaker",
            'DRY: a text that ends repetitions, or none; repeatable. Default: newline : " *',
            MORE,
            read=_typed_breakers,
        ),
    ] = ("\n", ":", '"', "*")
    xtc_probability: Annotated[
        float, Range(0, 1), Flag("--xtc-probability", "XTC: how often it drops tokens; 0: off.", MORE)
    ] = 0.0
    xtc_threshold: Annotated[
        float, Range(0, 1), Flag("--xtc-threshold", "XTC: how likely those are; above 0.5: off.", MORE)
    ] = 0.1
    mirostat: Annotated[
        int, Range(0, 2), Flag("--mirostat", "1 or 2, with temperature alone; 0: off.", MORE)
    ] = 0
    mirostat_tau: Annotated[
        float,
        Range(0, MAX_PENALTY),
        Flag("--mirostat-ent", "Mirostat: target surprise, in bits.", MORE),
    ] = 5.0
    mirostat_eta: Annotated[
        float, Range(0, MAX_PENALTY), Flag("--mirostat-lr", "Mirostat: learning rate.", MORE)
    ] = 0.1
    dynatemp_range: Annotated[
        float,
        Range(0, MAX_PENALTY),
        Flag("--dynatemp-range", "Temperature -/+ this, by entropy; 0: off.", MORE),
    ] = 0.0
    dynatemp_exponent: Annotated[
        float, Range(0, MAX_PENALTY), Flag("--dynatemp-exp", "Exponent of the entropy in that.", MORE)
    ] = 1.0
    top_n_sigma: Annotated[
        float,
        Range(-1, MAX_PENALTY),
        Flag("--top-n-sigma --top-nsigma", "Drop logits N deviations below the largest; 0 or -1: off.", MORE),
    ] = -1.0
    samplers: Annotated[
        tuple[str, ...],
        Flag(
            "--samplers --sampler-seq --sampling-seq",
            "Which samplers, in order: names with ; between, or llama.cpp's letters. Default: edskypmxt.",
            MORE,
            "NAMES|LETTERS",
            read=read_flags,
        ),
    ] = DEFAULT_ORDER
    post_sampling_probs: bool = False
    n: Annotated[int, Range(1, MAX_COUNT)] = 1
    context_shift: Annotated[
        bool,
        Flag(
            "--context-shift/--no-context-shift",
            "Discard old tokens of a full context and go on (-n bounds it).",
        ),
    ] = False
    n_keep: Annotated[
        int, Range(-1, MAX_COUNT), Flag("--keep", "First tokens that a context shift keeps; -1: the prompt.")
    ] = 0
    n_discard: Annotated[int, Range(0, MAX_COUNT)] = 0
    n_indent: Annotated[int, Range(0, MAX_COUNT)] = 0
    t_max_predict_ms: Annotated[int, Range(-1, MAX_COUNT)] = 0
    lora: Mapping[int, float] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                _check_number(name, value, allowed, name in _INTEGERS)
        if self.prompt_logprobs is not None:  # no field of a request, and so without a range of its own
            _check_number("prompt_logprobs", self.prompt_logprobs, RANGES["logprobs"], whole=True)
        for name in ("ignore_eos", "post_sampling_probs", "context_shift"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, getattr(self, name), "must be True or False")
        if self.constraint is not None and not isinstance(self.constraint, ConstraintSpec):
            raise _invalid("constraint", self.constraint, "must be a ConstraintSpec")
        # A caller may hand in a list, one string or a dict that it goes on to change: keep our own copies.
        object.__setattr__(self, "stop", _texts("stop", self.stop, "stop string"))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "lora", _scales(self.lora))
        object.__setattr__(self, "dry_sequence_breakers", _breakers(self.dry_sequence_breakers))
        object.__setattr__(self, "samplers", _order(self.samplers))
        object.__setattr__(self, "logits_processors", _processors(self.logits_processors))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken, so that no random number is drawn."""
        return self.temperature == 0 and not self.chained

    @property
    def penalizes(self) -> bool:
        """Whether any of the three penalties changes a logit."""
        active = self.repeat_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return active and self.repeat_last_n != 0

    @cached_property
    def _active(self) -> frozenset[str]:
        """The samplers whose values do not switch them off."""
        active = {
            "penalties": self.penalizes,
            "dry": self.dry_multiplier > 0 and self.dry_penalty_last_n != 0,
            "top_n_sigma": self.top_n_sigma > 0,
            "top_k": self.top_k > 0,
            "typ_p": self.typical_p < 1,
            "top_p": self.top_p < 1,
            "min_p": self.min_p > 0,
            "xtc": self.xtc_probability > 0 and self.xtc_threshold <= 0.5,
            "temperature": self.temperature != 1 or self.dynatemp_range > 0,
            "infill": True,
        }
        return frozenset(name for name, is_on in active.items() if is_on)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The samplers that do something, in order; with Mirostat, which then chooses, the temperature alone."""
        return ("temperature",) if self.mirostat else tuple(n for n in self.samplers if n in self._active)

    @cached_property
    def chained(self) -> bool:
        """Whether `sampling_chain` chooses the tokens: other samplers than the fixed order has, or in another order."""
        if self.mirostat or (self.post_sampling_probs and self.logprobs is not None):
            return True
        by_entropy = self.dynatemp_range > 0 and "temperature" in self.order
        return by_entropy or self.order != tuple(name for name in _FIXED if name in self._active)

    def plain(self) -> "SamplingParams":
        """The same parameters without what needs a chain."""
        return replace(self, **_PLAIN) if self.chained else self

    def with_seed(self) -> "SamplingParams":
        """The same parameters with a seed: the given one, or one drawn from the system's entropy.

        A drawn seed has 32 bits, so that a person can type it again.
        """
        if self.seed is not None:
            return self
        seeded = copy(self)  # all else has been checked
        object.__setattr__(seeded, "seed", int.from_bytes(os.urandom(4), "little"))
        return seeded


def params_of_each(given: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """Parameters, with seeds, of each of `count` prompts: the given ones for all, under one seed, or one for each.

    Raises:
        EngineError: there are more or fewer of them than prompts.
    """
    if isinstance(given, SamplingParams):
        return [given.with_seed()] * count
    if len(given) != count:
        raise EngineError(f"{len(given)} sampling parameters for {count} prompts: give one, or one for each")
    return [each.with_seed() for each in given]


RANGES: Mapping[str, Range] = ranges(SamplingParams)
"""The ranges of the parameters that are single numbers. The server's fields and its OpenAPI document use them."""


def _invalid(name: str, value: object, rule: str) -> EngineError:
    return EngineError(f"sampling parameter {name} = {shown(value)}: {rule}")


def _check_number(name: str, value: object, allowed: Range, whole: bool = False) -> None:
    """Raises EngineError if a value is no finite number (or no integer, if `whole`), or is out of its range."""
    of_kind = isinstance(value, int) or (isinstance(value, float) and not whole and math.isfinite(value))
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not of_kind
        or not allowed.holds(value)
    ):
        rule = f"must be a {'whole' if whole else 'finite'} number"
        raise _invalid(name, value, rule if allowed == Range() else f"{rule} {allowed}")


def _strings(name: str, value: object) -> tuple[object, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Iterable):
        raise _invalid(name, value, "must be strings")
    return tuple(value)


def _texts(name: str, value: object, about: str) -> tuple[str, ...]:
    """The strings of `value`, one or several. Raises EngineError for an empty one, or one that no token can write."""
    strings = list[str]()
    for string in _strings(name, value):
        if not isinstance(string, str) or not string:
            raise _invalid(name, string, f"every {about} must be text of at least one character")
        if any("\ud800" <= char <= "\udfff" for char in string):
            raise _invalid(name, string, "half of a surrogate pair is not text: no token writes it")
        strings.append(string)
    return tuple(strings)


def _processors(value: object) -> tuple[LogitsProcessor, ...]:
    found = (value,) if callable(value) else value
    if not isinstance(found, Iterable) or not all(map(callable, each := tuple(found))):
        raise _invalid("logits_processors", value, "must be functions of token ids and logits")
    return each


def _order(value: object) -> tuple[str, ...]:
    return read_letters(value) if isinstance(value, str) else read_names(_strings("samplers", value))


def _breakers(value: object) -> tuple[str, ...]:
    texts = _texts("dry_sequence_breakers", value, "sequence breaker")
    for text in texts:
        if len(text) > MAX_BREAKER:
            rule = f"a sequence breaker has at most {MAX_BREAKER} characters"
            raise _invalid("dry_sequence_breakers", text, rule)
    return texts


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, Iterable):
        raise _invalid(name, value, "must be token ids")
    ids = tuple(value)
    for token in ids:
        _check_number(name, token, _TOKEN, whole=True)
    return ids


def _scales(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _invalid("lora", value, "must map numbers of adapters to scales")
    for number, scale in value.items():
        _check_number("lora adapter", number, _TOKEN, whole=True)
        _check_number(f"lora[{number}]", scale, _BIAS, whole=False)
    return {number: float(scale) for number, scale in value.items()}


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _invalid("logit_bias", value, "must map token ids to numbers")
    for token, bias in value.items():
        _check_number("logit_bias token id", token, _TOKEN, whole=True)
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not number or not (bias == -math.inf or _BIAS.holds(bias)):
            raise _invalid(
                f"logit_bias[{token}]", bias, f"must be a number {_BIAS}, or -inf to ban the token"
            )
    return {token: float(bias) for token, bias in value.items()}
