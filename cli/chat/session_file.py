"""Conversations kept in files: `--session`, `/save`, `/load` and `/sessions`.

A name without dots and slashes stands for a file in the user's state folder (XDG_STATE_HOME); all else is a path.
"""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from quengine.errors import EngineError
from quengine.request.chat_session import ChatSession, read_messages
from quengine.request.content_parts import text_of

_NAME = re.compile(r"\w[\w -]*")


def state_folder() -> Path:
    """XDG_STATE_HOME/quengine, ~/.local/state/quengine by default. Raises RuntimeError without a home folder."""
    return (Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "quengine").expanduser()


def session_path(text: str) -> Path:
    """The file that a name or a path stands for. Raises EngineError where there is no home folder for ~."""
    try:
        return _sessions_folder() / f"{text}.json" if _NAME.fullmatch(text) else Path(text).expanduser()
    except RuntimeError as error:
        raise EngineError(f"{text}: {error}") from None


def save(session: ChatSession, path: Path) -> None:
    """Write a conversation; the folder of named ones is made, for the user alone. Raises EngineError."""
    try:
        if path.parent == _sessions_folder():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        raise EngineError(f"cannot save to {path}: {error}") from None
    session.save(path)


def session_names() -> list[str]:
    """The names of kept conversations, the latest first; none where their folder cannot be read."""
    try:
        files = list(_sessions_folder().glob("*.json"))
        return [path.stem for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)]
    except (OSError, RuntimeError):
        return []


def session_lines() -> Iterator[str]:
    """A line for each kept conversation: name, time, number of messages, first words."""
    names = session_names()
    wide = max(map(len, names), default=0)
    for name in names:
        path = session_path(name)
        try:
            messages = read_messages(path)
        except EngineError as error:
            yield f"{name:{wide}}  {error}"
            continue
        saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
        said = next((text_of(each["content"]) for each in messages if each["role"] == "user"), "")
        yield f"{name:{wide}}  {saved}  {len(messages):3} messages  {excerpt(said)}"


def excerpt(text: str) -> str:
    """A message on one line, cut to 50 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 50 else f"{line[:50]}..."


class SessionFile:
    """The file that a conversation is written to whenever its messages have changed.

    Raises:
        EngineError: its folder is not there.
    """

    def __init__(self, session: ChatSession, path: Path) -> None:
        self._session = session
        self.path = path
        self._written = session.messages.copy()
        if path.parent != _sessions_folder() and not path.parent.is_dir():
            folder = path.parent
            raise EngineError(
                f"cannot keep the session in {path}: there is no folder {folder}; make it with mkdir -p {folder}"
            )

    def resume(self) -> bool:
        """Go on with the file's messages, if there is one; a system message given by flag replaces the file's.

        Raises:
            EngineError: the file is not a saved conversation.
        """
        if not self.path.exists():
            return False
        system = self._session.system
        self._session.load(self.path)
        self._written = self._session.messages.copy()
        if system is not None:
            self._session.set_system(system)
        return True

    def write(self) -> None:
        """Write the messages, beside and renamed, unless they are as written. Raises EngineError."""
        messages = self._session.messages
        if messages != self._written:
            save(self._session, self.path)
            self._written = messages.copy()


def _sessions_folder() -> Path:
    return state_folder() / "sessions"
