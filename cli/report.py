"""What a generation cost, for people (a line or a few on standard error) and for programs (one JSON object)."""

import logging
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quengine.errors import visible

if TYPE_CHECKING:
    from quengine.llm import LLM
    from quengine.request.output import Completion, LikelyToken, Timings
    from quengine.request.sampling_params import SamplingParams

_TIMINGS = (
    *(
        "load_s",
        "compile_s",
        "prompt_s",
        "ttft_s",
        "decode_s",
        "prompt_tok_s",
        "decode_tok_s",
        "gb_s",
        "bytes_per_token",
    ),
    *("cached_tokens", "peak_bytes", "drafts", "drafted_tokens", "accepted_tokens"),
    *("accept_rate", "accept_length", "shifts", "discarded_tokens"),
)
"""Of `Timings`, what `--json` prints."""


def print_report(
    completion: "Completion", llm: "LLM", params: "SamplingParams", whole: bool | None = None
) -> None:
    """Print what an answer cost to standard error: a line, or the `whole` report; None: that with -v."""
    if logging.getLogger("quengine").isEnabledFor(logging.DEBUG) if whole is None else whole:
        lines = _whole_report(completion, llm, params)
    else:
        lines = [answer_line(completion, llm, params)]
    print("\n" + "\n".join(f"  {visible(line)}" for line in lines), file=sys.stderr)


def answer_line(completion: "Completion", llm: "LLM", params: "SamplingParams") -> str:
    """Tokens, speed, first token, and why the answer ended."""
    t = completion.timings
    parts = [_tokens(t.generated_tokens)]
    if t.decode_tok_s:  # two tokens or more
        parts.append(f"{t.decode_tok_s:.1f} tok/s")
    compiling = f" ({t.compile_s:.1f} s of it for compiling kernels, once)" if t.compile_s >= 0.1 else ""
    if t.generated_tokens:
        parts.append(f"first token after {t.ttft_s:.2f} s{compiling}")
    return f"{', '.join(parts)}; {why_ended(completion, llm, params)}"


def why_ended(completion: "Completion", llm: "LLM", params: "SamplingParams") -> str:
    """Why an answer has no further token, in words that say what would give more."""
    if completion.finish_reason == "length":
        if (
            completion.prompt_tokens + len(completion.tokens) >= llm.ctx_size
            and not completion.timings.shifts
        ):
            longest = llm.model_config.context_length
            more = f"-c takes up to {longest}" if llm.ctx_size < longest else "the model's own maximum"
            return f"cut: the context of {llm.ctx_size} tokens is full ({more})"
        if params.max_tokens is not None and len(completion.tokens) >= params.max_tokens:
            return f"cut at -n {params.max_tokens}"
        return "cut by a limit"
    if completion.finish_reason == "abort":
        return "interrupted"
    return "ended by the model or a stop string" if params.stop else "ended by the model"


def _whole_report(completion: "Completion", llm: "LLM", params: "SamplingParams") -> list[str]:
    from quengine.memory import gib

    t, threads = completion.timings, llm.loaded.threads
    cached = f" ({t.cached_tokens} from the cache)" if t.cached_tokens else ""
    speed, read = "", ""
    if t.decode_tok_s:  # two tokens or more
        speed = f", {t.decode_tok_s:.1f} tok/s, {1e3 / t.decode_tok_s:.1f} ms/token"
        read = f", {t.gb_s:.1f} GB/s"
    return [
        f"prompt     {_tokens(t.prompt_tokens)}{cached} in {t.prompt_s:.2f} s, {t.prompt_tok_s:.1f} tok/s; "
        f"first token after {t.ttft_s:.2f} s",
        f"generated  {_tokens(t.generated_tokens)} in {t.decode_s:.2f} s{speed}; "
        f"{why_ended(completion, llm, params)}, seed {completion.seed}",
        *([f"compiled   kernels in {t.compile_s:.2f} s, once; no speed counts it"] if t.compile_s else []),
        *_drafts(t),
        *_shifts(t),
        f"read       {gib(t.bytes_per_token)} a token{read}",
        f"load       {t.load_s:.2f} s; peak memory {gib(t.peak_bytes)}; {llm.loaded.device}, "
        f"{threads} thread{'s' * (threads > 1)}, {llm.loaded.decoder.backend.name} backend",
        *_experts(llm),
        *llm.loaded.notes,
    ]


def print_logprobs(completion: "Completion") -> None:
    """Print a line for each token to standard error: its log-probability, and the likeliest tokens with theirs."""

    def shown(entry: "LikelyToken") -> str:
        return f"{entry.logprob:8.4f} {entry.text!r}"

    print("\n  logprobs   token, then the likeliest", file=sys.stderr)
    for entry in completion.logprobs or ():
        line = f"{shown(entry):28}" + "".join(f" {shown(each):22}" for each in entry.top)
        print(f"  {line.rstrip()}", file=sys.stderr)


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count != 1)}"


def _drafts(t: "Timings") -> list[str]:
    """What became of drafted tokens, if any were."""
    if not t.drafts:
        return []
    return [
        f"drafted    {_tokens(t.drafted_tokens)} in {t.drafts} step{'s' * (t.drafts > 1)}, "
        f"{t.accepted_tokens} accepted ({100 * t.accept_rate:.0f}%); {t.accept_length:.2f} tokens a step with a draft"
    ]


def _shifts(t: "Timings") -> list[str]:
    """What a full context has discarded, if it was shifted."""
    if not t.shifts:
        return []
    return [f"shifted    a full context, shifts: {t.shifts}, tokens discarded: {t.discarded_tokens}"]


def _experts(llm: "LLM") -> list[str]:
    """Of a mixture of experts, how much of it computes a token."""
    from quengine.models.parameter_counts import checkpoint_parameters, count_text

    experts = llm.model_config.experts
    if experts is None:
        return []
    counts = checkpoint_parameters(llm.loaded.checkpoint)
    return [
        f"experts    {experts.router.used} of {experts.count} a token and layer; "
        f"{count_text(counts.active_parameters)} of {count_text(counts.parameters)} parameters are active"
    ]


def completion_json(completion: "Completion", llm: "LLM") -> dict[str, Any]:
    """The object that `--json` prints."""
    t = completion.timings
    result: dict[str, Any] = {
        "text": completion.text,
        "tokens": completion.tokens,
        "prompt_tokens": completion.prompt_tokens,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "timings": {name: getattr(t, name) for name in _TIMINGS},
        "model": str(llm.loaded.path),
        "device": str(llm.loaded.device),
        "threads": llm.loaded.threads,
        "backend": llm.loaded.decoder.backend.name,
    }
    if (experts := llm.model_config.experts) is not None:
        from quengine.models.parameter_counts import checkpoint_parameters

        counts = asdict(checkpoint_parameters(llm.loaded.checkpoint))
        result["model_size"] = {**counts, "experts": experts.count, "experts_used": experts.router.used}
    if completion.schema_violation is not None:
        result["schema_violation"] = completion.schema_violation
    if completion.logprobs is not None:
        result["logprobs"] = [
            {
                "token": entry.token,
                "logprob": entry.logprob,
                "top": [{"token": each.token, "logprob": each.logprob} for each in entry.top],
            }
            for entry in completion.logprobs
        ]
    if completion.reasoning:
        result["reasoning"] = completion.reasoning
    return result
