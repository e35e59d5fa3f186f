"""The tokenizer that the rest of the program sees, whatever kind is underneath.

BOS is added as the model's file says; control tokens are parsed in text only where the caller asks for it.
"""

from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from quengine.models.tokenizer.parts import TextEncoder, TokenizerParts, partition
from quengine.models.tokenizer.vocabulary import TokenizerError

if TYPE_CHECKING:
    from quengine.models.gguf import GGUFFile
    from quengine.models.tokenizer.token_length import TokenLength


class Tokenizer:
    """Text to token ids and back.

    The merging engine is built at the first `encode`: opening or showing a model and decoding do not need it. Safe to
    use from several threads. `space_prefix` says that the encoder puts a space before a text, which `decode` removes.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self.space_prefix = parts.space_prefix
        self._length = parts.length
        self._vocabulary = parts.vocabulary
        self._make_encoder: Callable[[], TextEncoder] | None = parts.make_encoder
        self._encoder: TextEncoder | None = None
        self._lock = Lock()

    @classmethod
    def from_gguf(cls, source: "str | Path | GGUFFile") -> "Tokenizer":
        """From the metadata of a GGUF file, which may hold a vocabulary only.

        Raises GGUFError for a file that cannot be read, TokenizerError for a tokenizer that is not supported.
        """
        from quengine.models.gguf import open_gguf
        from quengine.models.tokenizer.from_gguf import read_gguf_tokenizer

        file = open_gguf(source) if isinstance(source, str | Path) else source
        return cls(read_gguf_tokenizer(file))

    @classmethod
    def from_hf(cls, folder: str | Path) -> "Tokenizer":
        """From tokenizer.json (and tokenizer_config.json) of a Hugging Face checkpoint folder.

        Raises EngineError for a file that is missing or cannot be read, TokenizerError for one that does not work.
        """
        from quengine.models.tokenizer.from_hf import read_hf_tokenizer

        return cls(read_hf_tokenizer(Path(folder)))

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary)

    @property
    def bos_id(self) -> int | None:
        return self._vocabulary.named_ids.get("bos")

    @property
    def eos_id(self) -> int | None:
        """The one end token that the file names; `eos_ids` has all."""
        return self._vocabulary.named_ids.get("eos")

    @property
    def eos_ids(self) -> frozenset[int]:
        """All ids that end a generation: the file's eos, eot and eom, and well-known ones found by text."""
        return self._vocabulary.eos_ids

    @property
    def suppressed_ids(self) -> frozenset[int]:
        """Tokens that are never generated, as the model's files say."""
        return self._vocabulary.suppressed_ids

    @property
    def add_bos(self) -> bool:
        """Whether a prompt begins with BOS."""
        return self._vocabulary.add_bos

    @property
    def add_eos(self) -> bool:
        """Whether the file asks for EOS after a text. `encode` leaves that to the caller: a prompt goes on."""
        return self._vocabulary.add_eos

    @property
    def end_of_text(self) -> int | None:
        """EOS, where the file asks for it after a text (`add_eos`): the last token of a text to be embedded."""
        return self.eos_id if self.add_eos else None

    @property
    def pair_gap(self) -> tuple[int, ...]:
        """The tokens between the end token of a pair's first text and its second text, which begins with no BOS."""
        return self._vocabulary.pair_gap

    @property
    def control_texts(self) -> list[str]:
        """The texts that `encode` turns into control tokens if it parses them, longest first."""
        return list(self._vocabulary.control_tokens)

    def control_id(self, text: str) -> int | None:
        """The control token of this text; None where there is none."""
        return self._vocabulary.control_tokens.get(text)

    def fim_id(self, role: str) -> int | None:
        """The token of a role of fill-in-the-middle, such as fim_pre; None for a model without."""
        return self._vocabulary.fim_id(role)

    @cached_property
    def token_length(self) -> "TokenLength | None":
        """The bound on what one token can stand for; None: there is none."""
        return self._length()

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary spells it, e.g. `Ġthe` or `▁the`."""
        return self._vocabulary.texts[self._checked(token_id)]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token stands for, possibly only part of a character; control tokens give their name."""
        return self._vocabulary.token_bytes(self._checked(token_id))

    def is_control(self, token_id: int) -> bool:
        return self._vocabulary.is_control(self._checked(token_id))

    def prepare(self) -> None:
        """Builds the merging engine at once instead of at the first `encode`."""
        self._text_encoder()

    def encode(self, text: str, bos: bool = False, special: bool = False) -> list[int]:
        """The ids of `text`.

        bos: begin with BOS if the model asks for it (`add_bos`) and `text` has not already written it.
        special: turn the text of control tokens (`<|im_start|>`, `<s>`) into those tokens. Without it they are
            ordinary text. User-defined tokens are matched in either case.
        A surrogate pair counts as its character, a surrogate alone as U+FFFD.
        """
        ids = self._text_encoder().encode(without_surrogates(text), special)
        return self._with_bos(ids) if bos else ids

    def encode_hidden(self, text: str, restore: Callable[[str], str], bos: bool = False) -> list[int]:
        """As `encode` with special, for a text with hidden parts that must not become control tokens.

        The control tokens in sight are cut out first; then `restore` turns each text between them back into the
        original.
        """
        encoder = self._text_encoder()
        ids: list[int] = []
        for piece in partition(without_surrogates(text), self._vocabulary, user_defined=False, control=True):
            ids += [piece] if isinstance(piece, int) else encoder.encode(restore(piece), False)
        return self._with_bos(ids) if bos else ids

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos_id = self.bos_id
        if not self.add_bos or bos_id is None or ids[:1] == [bos_id]:
            return ids
        return [bos_id, *ids]

    def decode(self, ids: Iterable[int], skip_special: bool = True, continuation: bool = False) -> str:
        """The text of `ids`, without control tokens unless `skip_special` is False.

        Bytes that are no UTF-8 become U+FFFD. The space that encoding put before a text is left out, unless
        `continuation` says that `ids` go on from an earlier text.
        """
        pieces: list[bytes] = []
        strip = self.space_prefix and not continuation
        for token_id in ids:
            control = self.is_control(token_id)
            if not (control and skip_special):
                piece = self.token_bytes(token_id)
                pieces.append(piece[1:] if strip and not control and piece[:1] == b" " else piece)
            strip = strip and control
        return b"".join(pieces).decode(errors="replace")

    def _text_encoder(self) -> TextEncoder:
        with self._lock:
            if self._make_encoder is not None:
                self._encoder = self._make_encoder()
                self._make_encoder = None  # what it was made from is not needed again
            assert self._encoder is not None
            return self._encoder

    def _checked(self, token_id: int) -> int:
        if not 0 <= token_id < len(self._vocabulary):
            raise TokenizerError(f"token {token_id} is not from 0 to {len(self._vocabulary) - 1}")
        return token_id


def without_surrogates(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates, which no UTF-8 can hold, as U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
