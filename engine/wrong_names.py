"""Names of options that other programs have: a TypeError says what to write in their place, as the command line does.

    @hinted
    def __init__(self, model: str, ctx_size: int | None = None) -> None: ...

    Model("m", n_ctx=4096)    TypeError: Model() has no n_ctx: use ctx_size

What other names mean is in `foreign_flags`, which the command line uses too, and below.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar, get_type_hints

from quengine.errors import nearest
from quengine.foreign_flags import FOREIGN
from quengine.options import flagged, spellings

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type[Any])

_PLAIN_TEXT = "the model's file says it"
_OF_PEERS: Mapping[str, str] = {
    # LLM(...): llama-cpp-python, vLLM, transformers, ctransformers
    "n_ctx max_seq_len max_seq_length context_length num_ctx": "ctx_size",
    "model_path model_id model_name model_name_or_path pretrained_model_name_or_path": "model",
    "n_threads n_threads_batch num_threads": "threads",
    "n_batch n_ubatch batch_size max_batch_tokens": "chunk_size",
    "n_parallel n_seq_max max_batch_size max_concurrency": "parallel",
    "device_map main_gpu": "device",
    "type_k type_v kv_type kv_cache_type": "cache_type",
    "use_mmap": "mmap",
    "torch_dtype quantization_config load_in_4bit load_in_8bit vocab_only chat_format": _PLAIN_TEXT,
    "logits_all": "LLM.logits, LLM.score or SamplingParams(prompt_logprobs=0)",
    "num_speculative_tokens": "draft_tokens",
    "clip_model_path": "mmproj",
    "verbose": "logging.basicConfig(level=logging.INFO) shows what it does",
    "offload_kqv": "keys and values lie on the device",
    # SamplingParams(...): the same, and OpenAI's names
    "max_new_tokens max_completion_tokens max_length num_predict n_predict": "max_tokens",
    "repetition_penalty repeat_penalty_factor": "repeat_penalty",
    "repetition_context_size penalty_last_n": "repeat_last_n",
    "num_return_sequences best_of": "n",
    "stop_sequences stop_strings stop_words stops": "stop",
    "eos_token_id stop_tokens": "stop_token_ids",
    "top_logprobs n_probs output_scores": "logprobs",
    "random_seed": "seed",
    "typical": "typical_p",
    "do_sample": "temperature=0",
    "num_beams beam_width length_penalty use_beam_search": "beams are not searched",
    "logits_processor": "logits_processors",
    "json_schema response_format guided_json": "constraint=ConstraintSpec.json_schema(...)",
    "guided_regex regex": "constraint=ConstraintSpec.regex(...)",
    "grammar guided_grammar": "constraint=ConstraintSpec.grammar(...)",
    "structured_outputs guided_decoding": "constraint",
    "guided_choice": "a constraint, or LLM.score, which ranks choices",
    "echo": "prompt_logprobs, or LLM.score",
}
_ANSWERS: Mapping[str, str] = {name: answer for names, answer in _OF_PEERS.items() for name in names.split()}
_SHOWN = {"EngineConfig": "LLM", "Configured": "LLM"}
"""The class that a caller makes, by the name of the class that has its options, where they differ."""
_FLAG = re.compile(r"(?<![\w-])(--?[A-Za-z][\w-]*)(?: ([A-Z]+)\b)?")

_groups: dict[str, type[Any]] = {}
"""Classes of options by name, so that an option of one class is found if it is given to another."""
_makers: dict[str, frozenset[str]] = {}
"""Names that each hinted function or class takes."""


def hinted(function: F) -> F:
    """A function, or an `__init__`, whose unknown keyword arguments raise a TypeError with the right name."""
    owner, _, own = function.__qualname__.rpartition(".")
    name = owner if own == "__init__" else own
    takes = frozenset(inspect.signature(function).parameters) - {"self"}
    _makers[name] = takes

    @wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        try:
            return function(*args, **given)
        except TypeError:
            # A TypeError of something else goes on as it is.
            if wrong := next((each for each in given if each not in takes), None):
                shown = type(args[0]).__name__ if own == "__init__" and args else name
                raise TypeError(f"{shown}() has no {wrong}{_hint(wrong, takes)}") from None
            raise

    return checked  # type: ignore[return-value]


def hinted_options(group: C) -> C:
    """A dataclass of options whose `__init__` is `hinted`, and has plain types: no ranges, no flags."""
    init = group.__init__
    init.__annotations__ = get_type_hints(init) | {"return": None}
    _groups[group.__name__] = group
    group.__init__ = hinted(init)  # type: ignore[misc]
    return group


def _hint(wrong: str, takes: frozenset[str]) -> str:
    """The end of the message: what to write in place of a name."""
    name = wrong.lower().replace("-", "_")
    answer = _ANSWERS.get(name) or _own_name(name) or FOREIGN.get(f"--{name.replace('_', '-')}", "")
    if not answer:
        return nearest(name, takes)
    answer = _FLAG.sub(_in_python, answer)
    known, _, value = answer.partition("=")
    if not known.isidentifier():
        return f": {answer}"
    owner = next((owner for owner, names in _makers.items() if known in names), None)
    if known in takes or owner is None:
        return f": use {answer}"
    return f": use {_SHOWN.get(owner, owner)}({known}={value or '...'})"


def _own_name(name: str) -> str | None:
    """The field of which a name is another spelling."""
    for group in _groups.values():
        for field in flagged(group):
            if name in spellings(field):
                return field.name
    return next((name for takes in _makers.values() if name in takes), None)


def _in_python(flag: re.Match[str]) -> str:
    """A command-line flag, with its value, as a keyword argument; a flag that is no option stays as it is."""
    name = _own_name(flag[1].lstrip("-").replace("-", "_"))
    if name is None:
        return flag[0]
    return f"{name}={flag[2]}" if flag[2] else name
