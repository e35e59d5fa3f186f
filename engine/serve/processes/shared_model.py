"""The text side of a model that is served: tokens, chat template, what texts are held to, and what is told of it.

Needs the model's file and no weights, so that it can be had beside an engine in another process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quengine.errors import EngineError
from quengine.models.checkpoint import Checkpoint, open_checkpoint
from quengine.models.template.chat_template import ChatTemplate, encode_chat
from quengine.models.tokenizer import Tokenizer
from quengine.request.sampling_params import SamplingParams
from quengine.structured.constraint import ConstraintCompiler
from quengine.structured.tool_calls_format import ToolFormat


@dataclass(frozen=True)
class TextSide:
    """What a model's file holds beside its weights."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    constraints: ConstraintCompiler

    @classmethod
    def of_file(cls, path: Path) -> "TextSide":
        """Raises EngineError where the file is no model."""
        checkpoint = open_checkpoint(path)
        tokenizer = checkpoint.tokenizer()
        constraints = ConstraintCompiler(tokenizer, checkpoint.config.vocab_size)
        return cls(checkpoint, tokenizer, checkpoint.chat_template(), constraints)


class LLMModel:
    """A `ServedModel`. `ctx_size`, `notes`, `device` and `cache_type` are those of the engine that computes it."""

    def __init__(
        self, text: TextSide, ctx_size: int, notes: Sequence[str], device: str, cache_type: str
    ) -> None:
        self._text = text
        config, template = text.checkpoint.config, text.chat_template
        self.ctx_size = ctx_size
        self.vocab_size = config.vocab_size
        self.template = None if template is None else template.source
        self.notes: Sequence[str] = notes
        self.bos_id = text.tokenizer.bos_id
        self.tool_format = None if self.template is None else ToolFormat.of(self.template, text.tokenizer)
        self.eos_ids = text.tokenizer.eos_ids
        self.token_length = text.tokenizer.token_length
        self.source: Path | None = text.checkpoint.path
        self.facts: Mapping[str, Any] = {
            "architecture": config.architecture,
            "n_ctx_train": config.context_length,
            "n_vocab": config.vocab_size,
            "n_embd": config.embedding_length,
            "n_params": text.checkpoint.weights,
            "size": text.checkpoint.nbytes,
            "path": str(text.checkpoint.path),
            "device": device,
            "cache_type": cache_type,
        }

    def encode(self, text: str, bos: bool, special: bool) -> list[int]:
        return self._text.tokenizer.encode(text, bos=bos, special=special)

    def decode(self, ids: Sequence[int]) -> str:
        return self._text.tokenizer.decode(ids, skip_special=False)

    def token_bytes(self, token: int) -> bytes:
        return self._text.tokenizer.token_bytes(token)

    def prepare(self, params: SamplingParams) -> None:
        if params.constraint is not None:
            self._text.constraints.compile(params.constraint, params.stop_token_ids)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, variables: Mapping[str, Any]
    ) -> str:
        template = self._chat_template()
        return template.render(self._as_read(messages), tools=tools, variables=variables)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, variables: Mapping[str, Any]
    ) -> list[int]:
        template = self._chat_template()
        given = self._as_read(messages)
        return encode_chat(self._text.tokenizer, template, given, tools=tools, variables=variables)

    def _as_read(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        return messages if self.tool_format is None else self.tool_format.messages(messages)

    def _chat_template(self) -> ChatTemplate:
        template = self._text.chat_template
        if template is None:
            raise EngineError(f"{self._text.checkpoint.path.name} has no chat template; use /v1/completions")
        return template
