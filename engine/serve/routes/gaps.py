"""Prompts with a gap to fill (/infill, and completions with `suffix`), written with the vocabulary's FIM tokens.

    [BOS] [FIM_REP]myproject\\n {[FIM_SEP]name\\n text} ... [FIM_SEP]filename\\n [FIM_PRE]before[FIM_SUF]after[FIM_MID]

The part before FIM_PRE is written only with `input_extra` (Qwen2.5-Coder's form of several files, arXiv:2409.12186).
Control tokens in the texts are encoded as plain text.
"""

from collections.abc import Sequence
from typing import Any

from quengine.serve.processes.shared_model import ServedModel
from quengine.serve.schemas.canonical import CompletionRequest
from quengine.serve.schemas.errors import ApiError, bad_request

_MARKS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}


def suffix_prompt(model: ServedModel, body: CompletionRequest) -> list[Any]:
    """The prompt of a completion before `suffix`. Raises ApiError."""
    if not isinstance(body.prompt, str) or body.echo:
        raise bad_request("suffix needs a prompt that is one text, and no echo", "suffix", "invalid_value")
    return [gap_parts(gap_marks(model, 400), [], body.prompt, body.suffix)]


def fills_gaps(model: ServedModel) -> bool:
    """Whether the vocabulary has the tokens for gaps."""
    return all(model.fim_id(role) is not None for role in _MARKS)


def gap_marks(model: ServedModel, status: int) -> list[int]:
    """The FIM tokens prefix, suffix and middle. Raises ApiError where the vocabulary lacks one."""
    found = {name: model.fim_id(role) for role, name in _MARKS.items()}
    if missing := [name for name, token in found.items() if token is None]:
        message = f"this model fills no gaps: its vocabulary has no {' and no '.join(missing)} token"
        raise ApiError(status, message, param="suffix" if status == 400 else None, code="unsupported")
    return [token for token in found.values() if token is not None]


def gap_parts(marks: Sequence[int], extra: Sequence[str | int], before: str, after: str) -> list[str | int]:
    pre, suf, mid = marks
    # An empty text first becomes BOS, where the model wants one.
    return ["", *extra, pre, before, suf, after, mid]
