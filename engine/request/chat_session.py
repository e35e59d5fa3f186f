"""A conversation with one model: the messages so far, and the token ids that stand for them in the cache.

The model goes on from the tokens that it generated, not from their text: a new turn computes only what was added after
them.
"""

import json
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quengine.errors import EngineError
from quengine.platform.input_files import read_text
from quengine.request.chat_options import ChatOptions
from quengine.request.content_parts import image_paths, images_of, read_image, text_of, why_text_alone
from quengine.request.sampling_params import MAX_SEED, SamplingParams
from quengine.structured.tool_calls import Delta, TextDelta

if TYPE_CHECKING:
    from quengine.llm import LLM
    from quengine.request.output import Completion

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class _Turn:
    """Token ids of one exchange: its prompt as the template gives it and as the model saw it, and its answer.

    `messages` is the number of messages in the prompt.
    """

    messages: int
    rendered: list[int]
    prompt: list[int]
    answer: list[int]


class ChatSession:
    """A conversation; `llm` should have been made with `reuse_prefix=True`.

    `messages` are the turns so far, `last` is the latest completion, `attached` are the files of images that go with
    the next message. The seed is drawn once, here. `variables` are more names for the template; `options` have the
    system message and messages that every conversation begins with, and say what becomes of reasoning.
    """

    def __init__(
        self,
        llm: "LLM",
        params: SamplingParams,
        variables: Mapping[str, Any] | None = None,
        options: ChatOptions | None = None,
    ) -> None:
        self.llm = llm
        self.variables = variables
        self.options = options or ChatOptions()
        self.params = params.with_seed()
        self.messages: list[dict[str, Any]] = [dict(each) for each in self.options.opened(())]
        self.last: Completion | None = None
        self.progress: Callable[[int, int], None] | None = None  # of prompts (`CompletionStream.progress`)
        self.attached: list[Path] = []
        self._turns: list[_Turn] = []
        self._retries = 0  # how often the last message was answered again

    @property
    def system(self) -> str | None:
        """The system message, if there is one."""
        first = self.messages[:1]
        return text_of(first[0]["content"]) if first and first[0]["role"] == "system" else None

    @property
    def used_tokens(self) -> int:
        """Tokens of the context that the latest prompt and its answer take."""
        return 0 if self.last is None else self.last.prompt_tokens + len(self.last.tokens)

    def set_system(self, text: str | None) -> None:
        """Replace the system message, from the next turn on; None or "" removes it. The other messages stay."""
        rest = self.messages[1:] if self.system is not None else self.messages
        self.messages = ([{"role": "system", "content": text}] if text else []) + rest

    def reset(self) -> None:
        """Remove all messages but the system message and those that every conversation begins with."""
        system = [] if self.system is None else self.messages[:1]
        self.messages = [*system, *map(dict, self.options.messages)]
        self.last, self.attached = None, []
        self._turns.clear()

    def change_model(self, llm: "LLM", variables: Mapping[str, Any], options: ChatOptions) -> None:
        """Go on with another model, which computes the conversation anew."""
        self.llm, self.variables, self.options = llm, variables, options
        self.last = None
        self._turns.clear()

    def attach(self, image: Path) -> None:
        """Sends an image file with the next message. Raises EngineError if it is no image, or the model reads none."""
        if self.llm.images is None:
            raise EngineError(why_text_alone(self.llm.loaded.notes))
        self.llm.with_images(self.llm.images.marker, [read_image(image)])
        self.attached.append(image.absolute())

    def ask(self, text: str) -> Generator[str, None, None]:
        """Send `text` as the user's message; yields the answer's text as it comes. See `deltas`."""
        with closing(self.deltas(text)) as deltas:
            for delta in deltas:
                if isinstance(delta, TextDelta):
                    yield delta.text

    def deltas(self, text: str) -> Generator[Delta, None, None]:
        """Send `text` as the user's message; yields the answer as it comes, and appends both to `messages`.

        Closing the generator early (Ctrl-C) keeps the answer as far as it came. A turn without any answer is removed.

        Raises:
            EngineError: the conversation does not fit the context, the template refuses it, or the model failed.
        """
        self._retries = 0
        return self._exchange(text)

    def retry(self, text: str | None = None) -> Generator[Delta, None, None]:
        """Answer the last message again, or `text` in its place; yields and raises what `deltas` does.

        The n-th retry of the same message is sampled with seed + n, so it differs, and repeats with the session's
        seed. Without any answer the old exchange stays.
        """
        before, last = self.messages.copy(), self.last
        asked = next((each["content"] for each in reversed(before) if each["role"] == "user"), "")
        old = self.undo()
        self.attached = image_paths(asked)
        self._retries = self._retries + 1 if text is None or text == old else 0
        answered = False
        try:
            yield from self._exchange(old if text is None else text)
        finally:
            answered = self.last is not None and bool(self.last.tokens)
            if not answered:
                self.messages, self.last = before, last

    def undo(self) -> str:
        """Remove the last exchange (the user's last message and all after it) and return the user's message.

        Raises:
            EngineError: there is no message of the user.
        """
        at = max((i for i, each in enumerate(self.messages) if each["role"] == "user"), default=None)
        if at is None:
            raise EngineError("the conversation has no message yet")
        content = self.messages[at]["content"]
        del self.messages[at:]
        self.last, self.attached = None, []
        return text_of(content)

    def _exchange(self, text: str) -> Generator[Delta, None, None]:
        """Sends a message and yields its answer, as `deltas` describes."""
        images = [{"type": "image", "image": str(path)} for path in self.attached]
        content = [*images, {"type": "text", "text": text}] if images else text
        self.messages.append({"role": "user", "content": content})
        self.attached, answered = [], False
        try:
            rendered = self.llm.encode_chat(self.messages, variables=self.variables)
            self._turns = [turn for turn in self._turns if turn.messages < len(self.messages)]
            prompt = self._continued(rendered)
            stream = self.llm.stream_answer(
                self.llm.with_images(prompt, images_of(self.messages)),
                self._seeded(),
                reasoning_budget=self.options.reasoning_budget,
                reasoning_format=self.options.reasoning_format,
            )
            stream.progress = self.progress
            try:
                yield from stream.deltas()
            finally:
                stream.close()
                self.last = stream.completion
                if self.last.tokens:
                    self._turns.append(_Turn(len(self.messages), rendered, prompt, self.last.tokens))
                    self.messages.append({"role": "assistant", "content": self.last.text})
                    answered = True
        finally:
            if not answered:
                self.messages.pop()

    def _seeded(self) -> SamplingParams:
        """The parameters of the next answer: those of the session, with another seed for a retry."""
        seed = self.params.seed
        if seed is None or not self._retries:
            return self.params
        return replace(self.params, seed=(seed + self._retries) % (MAX_SEED + 1))

    def _continued(self, rendered: list[int]) -> list[int]:
        """`rendered`, with the tokens of the latest answer replaced by those that were generated, if their text is the
        same.

        A template gives text, and text that is tokenized again need not give the tokens it came from; everything after
        the first difference would then be computed again. The answer ends at the first control token after the prompt;
        if the text up to there is not the answer (a template may trim or cut it), the template's tokens are taken.
        """
        turn = self._turns[-1] if self._turns else None
        if turn is None or rendered[: len(turn.rendered)] != turn.rendered:
            return rendered
        tokenizer, start = self.llm.tokenizer, len(turn.rendered)
        end = next((i for i in range(start, len(rendered)) if tokenizer.is_control(rendered[i])), start)
        again = tokenizer.decode(rendered[start:end], continuation=True)
        answer = tokenizer.decode(turn.answer, continuation=True)
        if again.strip() != answer.strip():
            return rendered
        return turn.prompt + turn.answer + rendered[end:]

    def save(self, path: Path) -> None:
        """Writes the messages as JSON to a file beside `path`, and renames it. Raises EngineError if that fails."""
        from quengine.models.gguf.whole_file import beside

        content = {"model": self.llm.loaded.path.name, "messages": self.messages}
        text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
        try:
            with beside(path) as file:
                file.write(text.encode())
        except OSError as error:
            raise EngineError(f"cannot save to {path}: {error.strerror or error}") from None

    def load(self, path: Path) -> None:
        """Go on with the messages of a saved conversation.

        Raises:
            EngineError: the file cannot be read or does not hold messages; the conversation stays as it was.
        """
        self.messages = read_messages(path)
        self.last = None
        self._turns.clear()


def read_messages(path: Path) -> list[dict[str, Any]]:
    """The messages of a saved conversation. Raises EngineError where the file cannot be read or holds none."""
    try:
        content = json.loads(read_text(path, "cannot load"))
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{path} is not a saved conversation: {error}") from None
    return _checked(content, path)


def _checked(content: object, path: Path) -> list[dict[str, Any]]:
    messages = content.get("messages") if isinstance(content, dict) else None
    if not isinstance(messages, list):
        raise EngineError(f'{path} is not a saved conversation: it has no list "messages"')
    for i, message in enumerate(messages):
        good = isinstance(message, dict) and message.get("role") in ROLES
        if not good or not _is_content(message.get("content")):
            raise EngineError(
                f"{path}: message {i} needs a role ({', '.join(ROLES)}) and a content that is text, or text and images"
            )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _is_content(value: object) -> bool:
    """Text, or parts that are text or the paths of images."""
    if not isinstance(value, list):
        return isinstance(value, str)
    return all(
        isinstance(part, dict)
        and part.get("type") in ("text", "image")
        and isinstance(part.get(part["type"]), str)
        for part in value
    )
