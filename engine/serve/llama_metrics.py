"""The server's counters under llama-server's names (tools/server/server-context.cpp), in Prometheus' text format 0.0.4.

As in llama-server, rates are those since the text was last read; the counters give rates over any time. The text is
written here because Prometheus' library adds `_total` to every counter's name, which `llamacpp:n_tokens_max` lacks.
"""

from collections.abc import Iterator

from quengine.serve.processes.server_thread import Worker
from quengine.serve.processes.shared_engine import Finished


class LlamaMetrics:
    """Sums over completions. All of it is called in the event loop."""

    def __init__(self) -> None:
        self._prompt = self._cached = self._predicted = self._later = self._longest = 0
        self._prompt_s = self._predicted_s = 0.0
        self._drafts = self._drafted = self._accepted = 0
        self._read = self._rated  # as they were when the text was last read

    def generated(self, tokens: int) -> None:
        self._predicted += tokens

    def finished(self, event: Finished) -> None:
        """Count a completion."""
        times = event.timings
        self._prompt += times.prompt_tokens - times.cached_tokens
        self._cached += times.cached_tokens
        self._prompt_s += times.prompt_s
        self._later += max(0, times.generated_tokens - 1)
        self._predicted_s += times.decode_s
        self._longest = max(self._longest, times.prompt_tokens + times.generated_tokens)
        self._drafts += times.drafts
        self._drafted += times.drafted_tokens
        self._accepted += times.accepted_tokens

    @property
    def _rated(self) -> tuple[float, ...]:
        """The counts that rates are computed from: prompt tokens and seconds, generated tokens and seconds."""
        return self._prompt, self._prompt_s, self._later, self._predicted_s

    def text(self, worker: Worker) -> bytes:
        families = (*self._counters(worker), *self._gauges(worker))
        self._read = self._rated
        return "".join(
            f"# HELP llamacpp:{name} {about}\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value}\n"
            for kind, name, value, about in families
        ).encode()

    def _counters(self, worker: Worker) -> Iterator[tuple[str, str, float, str]]:
        for name, value, about in (
            ("prompt_tokens_total", self._prompt, "Prompt tokens processed, without those from the cache."),
            ("prompt_tokens_cached_total", self._cached, "Prompt tokens taken from the cache."),
            ("prompt_seconds_total", self._prompt_s, "Time of prompts."),
            ("tokens_predicted_total", self._predicted, "Tokens generated."),
            ("tokens_predicted_seconds_total", self._predicted_s, "Time of generated tokens but the first."),
            ("n_decode_total", worker.steps, "Steps of the engine."),
            ("n_tokens_max", self._longest, "Tokens of the longest completion with its prompt."),
            ("spec_decode_num_draft_tokens_total", self._drafted, "Tokens drafted."),
            ("spec_decode_num_accepted_tokens_total", self._accepted, "Drafted tokens accepted."),
            ("spec_decode_num_drafts_total", self._drafts, "Steps that checked drafted tokens."),
        ):
            yield "counter", name, value, about

    def _gauges(self, worker: Worker) -> Iterator[tuple[str, str, float, str]]:
        prompt, prompt_s, later, later_s = (
            now - then for now, then in zip(self._rated, self._read, strict=True)
        )
        for name, value, about in (
            (
                "prompt_tokens_seconds",
                _rate(prompt, prompt_s),
                "Prompt tokens a second since this was last read.",
            ),
            ("predicted_tokens_seconds", _rate(later, later_s), "Tokens a second since this was last read."),
            ("requests_processing", worker.running, "Requests being computed."),
            ("requests_deferred", worker.waiting, "Requests in the queue."),
            ("n_busy_slots_per_decode", _rate(worker.step_sequences, worker.steps), "Requests a step, mean."),
        ):
            yield "gauge", name, value, about


def _rate(count: float, of: float) -> float:
    return count / of if of else 0.0
