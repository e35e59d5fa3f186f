"""A served model without its weights: tokenizer, chat template, constraints and description.

Any process of the server can make it from the model's file, while the engine runs in another one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quengine.models.checkpoint import Checkpoint, open_checkpoint
from quengine.models.config import Ranker, Task
from quengine.models.template.chat_template import ChatTemplate
from quengine.models.tokenizer import Tokenizer
from quengine.request.adapter_scales import NO_ADAPTERS, AdapterScales
from quengine.request.chat_format import ChatFormat, Ending
from quengine.request.pooling import pair_ids, ranks_pairs, tasks_of
from quengine.request.sampling_params import SamplingParams
from quengine.structured.answer_format import PROMPT_TOKENS, AnswerFormat
from quengine.structured.constraint import ConstraintCompiler

if TYPE_CHECKING:
    from quengine.models.vision import ImageProcessor


@dataclass(frozen=True)
class TextFiles:
    """The source of a `TextSide`: the model's file or folder, and a chat template instead of the model's own."""

    path: Path
    template: str | None = None


@dataclass(frozen=True)
class TextSide:
    """The contents of a model's file beside its weights. `given_template`: a chat template instead of its own."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    constraints: ConstraintCompiler
    given_template: str | None = None

    @classmethod
    def of_file(cls, path: Path, template: str | None = None) -> "TextSide":
        """Opens a model's file. Raises EngineError where it is none."""
        checkpoint = open_checkpoint(path)
        tokenizer = checkpoint.tokenizer()
        constraints = ConstraintCompiler(tokenizer, checkpoint.config.vocab_size)
        return cls(checkpoint, tokenizer, checkpoint.chat_template(template), constraints, template)


class ServedModel:
    """A served model without its weights. Any thread may use it while the engine computes.

    `ctx_size` (positions of one sequence), `notes`, `device`, `cache_type` and `memory` (bytes of weights and cache)
    are those of the engine.

    Attributes:
        marker: the text of an image in a prompt; "": the model reads text alone.
        template: the source of the chat template; None where the model has none.
        facts: the model's description for /v1/models and /props, as JSON values.
        notes: lines for the terminal: device, context, memory.
        token_length: a bound of the text that one token can stand for; None: there is no bound.
        source: what another process makes the same object from; None where that is impossible.
        pooling: the pooling of embeddings that the model was trained with; None where its file does not say.
        ranks: a trained head scores pairs of texts. ranker: the head and prompt of a decoder that scores pairs.
        tasks: the tasks of embeddings for which it has adapters.
        adapters: the LoRA adapters beside its weights.
        end_of_text: the token that ends a text to be embedded; None: there is none.
    """

    pooling: str | None = None
    ranks: bool = False
    ranker: Ranker | None = None
    tasks: Sequence[Task] = ()
    end_of_text: int | None = None
    marker: str = ""
    adapters: AdapterScales = NO_ADAPTERS

    def __init__(
        self,
        text: TextSide,
        ctx_size: int,
        notes: Sequence[str],
        device: str,
        cache_type: str,
        memory: int = 0,
        marker: str = "",
        projector: str = "",
        adapters: AdapterScales = NO_ADAPTERS,
    ) -> None:
        self._text, self.adapters = text, adapters
        config = text.checkpoint.config
        missing = f"{text.checkpoint.path.name} has no chat template; use /v1/completions, or --chat-template chatml"
        self._chat = ChatFormat(text.tokenizer, text.chat_template, missing)
        self.ctx_size = ctx_size
        self.marker, self._projector = marker, projector
        self.vocab_size = config.vocab_size
        self.pooling = config.pooling
        self.ranks, self.ranker, self.tasks = ranks_pairs(config), config.ranker, tasks_of(config)
        self.template = self._chat.source
        self.notes = notes
        self.bos_id: int | None = text.tokenizer.bos_id
        self.pair_gap: list[int] = list(text.tokenizer.pair_gap)
        self.eos_id: int | None = text.tokenizer.eos_id
        self.eos_ids = text.tokenizer.eos_ids
        self.end_of_text = text.tokenizer.end_of_text
        self.token_length = text.tokenizer.token_length
        self.source: TextFiles | None = TextFiles(text.checkpoint.path, text.given_template)
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
            "memory": memory,
        }

    @cached_property
    def answer_format(self) -> AnswerFormat:
        """The format of the model's answers: reasoning, text, tool calls."""
        return self._chat.answers

    def encode(self, text: str, bos: bool, special: bool) -> list[int]:
        return self._text.tokenizer.encode(text, bos=bos, special=special)

    def encode_pair(self, query: str, document: str) -> list[int]:
        """The prompt of a pair of texts, of a model with a `ranker`."""
        assert self.ranker is not None
        return pair_ids(self._text.tokenizer, self.ranker, query, document)

    def decode(self, ids: Sequence[int]) -> str:
        return self._text.tokenizer.decode(ids, skip_special=False)

    def end_of(self, prompt: Sequence[int], continued: str = "") -> str:
        """The text of a prompt's end, as `answer_format` takes it, without `continued`, the answer to be continued."""
        return self.decode(prompt[-PROMPT_TOKENS - len(continued.encode(errors="replace")) :]).removesuffix(
            continued
        )

    @cached_property
    def _processor(self) -> "ImageProcessor":
        from quengine.models.vision import load_processor

        return load_processor(Path(self._projector))

    def image_tokens(self, data: bytes) -> int:
        """The number of tokens that an image adds to a prompt with its marker. The image is decoded for this.

        Raises EngineError where it is no image, or of a kind that is not read.
        """
        parts = self._processor.prepare(data).layout
        rows = sum(part for part in parts if isinstance(part, int))
        texts = sum(len(self.encode(part, False, True)) for part in parts if isinstance(part, str))
        return rows + texts - len(self.encode(self.marker, False, True))

    def token_bytes(self, token: int) -> bytes:
        return self._text.tokenizer.token_bytes(token)

    def fim_id(self, role: str) -> int | None:
        """The token of a fill-in-the-middle role, such as fim_pre; None where the vocabulary has none."""
        return self._text.tokenizer.fim_id(role)

    def prepare(self, params: SamplingParams) -> None:
        """Compiles the constraint, so that no step waits for it. Raises EngineError where it cannot be compiled."""
        if params.constraint is not None:
            self._text.constraints.compile(params.constraint, params.stop_token_ids)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
        ending: Ending = "answer",
    ) -> str:
        """The prompt of a conversation as text. Raises EngineError where the template refuses it."""
        return self._chat.render(messages, tools, variables, ending)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
        ending: Ending = "answer",
        marker: str = "",
    ) -> list[int]:
        """The prompt of a conversation as token ids. Control tokens in messages are encoded as plain text. marker: the
        text of an image; "": there are none."""
        return self._chat.encode(messages, tools, variables, ending, marker)
