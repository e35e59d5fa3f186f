"""Models for EleutherAI's lm-evaluation-harness (`pip install lm-eval`), under the name `quengine`.

    python -m quengine.evaluation.lm_eval_model --model quengine --model_args pretrained=MODEL --batch_size auto ...

Importing this module registers the name. Run as a program, it then acts as `lm_eval`, with all of its arguments.
"""

import sys
from collections.abc import Sequence
from typing import Any

import lm_eval.models  # noqa: F401  (lm-eval registers its own only while no other model is)
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from quengine.errors import EngineError
from quengine.llm import LLM
from quengine.request.output import BatchProgress
from quengine.request.sampling_params import SamplingParams
from quengine.scoring.choices import score_continuations
from quengine.scoring.prompt_logits import ScoredTokens

_AUTO_PARALLEL = 8
_MOST_TOKENS = 256
"""Of a text where a task names no limit, as lm-eval's own models have it."""
_LIMITS = ("max_gen_toks", "max_tokens", "max_new_tokens", "max_completion_tokens")
_SAMPLING = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": None}
"""What tasks may set beside a temperature, and what holds where they do not."""


@register_model("quengine")
class QuengineLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A model of lm-eval; its `--model_args` are `pretrained` and the options of `LLM`.

    Args:
        pretrained: what `LLM` takes as a model.
        batch_size: sequences at once (`parallel`); "auto": 8.
        max_length: another name of `ctx_size`.
        options: further arguments of `LLM`.
    """

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        size = str(batch_size)
        options.setdefault("parallel", int(size) if size.isdecimal() else max_batch_size or _AUTO_PARALLEL)
        if max_length is not None:
            options["ctx_size"] = max_length
        self.llm = LLM(pretrained, device or "auto", **options)
        self.max_length = self.llm.ctx_size - 1  # with room for a token after the prompt
        self._is_templated = False

    @property
    def eot_token_id(self) -> int:
        tokenizer = self.llm.tokenizer
        return min(tokenizer.eos_ids) if tokenizer.eos_id is None else tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: BOS, or the end token of a model without BOS."""
        bos = self.llm.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.llm.loaded.path.name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        found = self.llm.chat_template
        return None if found is None or not chat_template else found.source

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        self._is_templated = True
        return self.llm.render_chat(chat_history, continued=not add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        tokenizer = self.llm.tokenizer
        bos = tokenizer.add_bos if add_special_tokens is None else add_special_tokens
        return tokenizer.encode(string, bos=bos, special=self._is_templated)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether a temperature of 0 generates it. A request that is too long
        loses its beginning."""
        scored = score_continuations(self.llm, [self._fitting(*pair) for _, *pair in requests])
        shown = tqdm(scored, desc="Running loglikelihood requests", total=len(requests), disable=disable_tqdm)
        found = list[tuple[float, bool]]()
        for (texts, *_), (logprobs, greedy) in zip(requests, shown, strict=True):
            found.append((sum(logprobs), greedy))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, found[-1])
        return found

    def _fitting(self, context: list[int], after: list[int]) -> ScoredTokens:
        ids = (context + after)[-(self.max_length + 1) :]
        return ScoredTokens(ids, max(1, len(ids) - len(after)))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text, all tokens scored once."""
        windows = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1
                )
            ]
            for request in requests
        ]
        flat = [(None, before, after) for each in windows for before, after in each]
        values = iter(self._loglikelihood_tokens(flat, disable_tqdm))
        found = [sum(next(values)[0] for _ in each) for each in windows]
        for request, value in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        prompts, params = list[list[int]](), list[SamplingParams]()
        for request in requests:
            context, settings = request.args
            params.append(_params(settings))
            most = max(1, self.max_length - (params[-1].max_tokens or 0))
            prompts.append(self.tok_encode(context)[-most:])
        completions = self.llm.generate(prompts, params, progress=False if disable_tqdm else _progress)
        texts = [completion.text for completion in completions]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts


def _params(settings: dict[str, Any]) -> SamplingParams:
    """A task's `generation_kwargs`. Raises EngineError for an unknown one, as it may change a text."""
    given = dict(settings)
    until = given.pop("until", None) or []
    limits = [given.pop(name) for name in _LIMITS if name in given]
    samples, temperature = given.pop("do_sample", None), given.pop("temperature", None)
    if samples is None:
        samples = bool(temperature)
    chosen = {name: given.pop(name, value) for name, value in _SAMPLING.items()}
    if given:
        raise EngineError(f"generation_kwargs: {', '.join(map(str, given))}: not known here")
    return SamplingParams(
        temperature=(1.0 if temperature is None else temperature) if samples else 0.0,
        max_tokens=limits[0] if limits else _MOST_TOKENS,
        stop=tuple(text for text in ([until] if isinstance(until, str) else until) if text),
        **chosen,
    )


def _progress(progress: BatchProgress) -> None:
    end = "\n" if progress.done == progress.total else ""
    print(f"\rRunning generate_until requests: {progress.done}/{progress.total}", end=end, file=sys.stderr)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
