"""The folder that file tools are confined to.

A path is resolved with all its links, and must then lie in the folder. It is opened component by component from the
folder's descriptor without following any link (openat, O_NOFOLLOW), so that a link that appears in between leads
nowhere. Files in a folder named `.git` are never written: git runs programs that are named there.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

from quengine.serve.tools.tool import ToolError

MAX_FILE = 32 << 20
"""Bytes of a file that is read."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Workspace:
    """`root`: the folder, which exists."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))

    def resolve(self, path: str, folder: Path | None = None) -> Path:
        """The real path of `path`, which may be relative to `folder`. Raises ToolError where it is outside."""
        try:
            real = Path(os.path.realpath(os.path.join(folder or self.root, os.path.expanduser(path))))  # noqa: PTH111, PTH118
            os.fsencode(real)
        except ValueError:
            raise ToolError(f"{path[:80]!r} is no path") from None
        if not real.is_relative_to(self.root):
            raise ToolError(f"{path[:200]}: outside of {self.root}, the folder that tools are confined to")
        return real

    def folder(self, path: str) -> Path:
        """The real path of a folder that exists. Raises ToolError."""
        real = self.resolve(path)
        os.close(self.open(real, os.O_DIRECTORY))
        return real

    def open(self, path: Path, flags: int, *, make_folders: bool = False) -> int:
        """A descriptor of a path that `resolve` gave. Raises ToolError where that fails, with the system's reason."""
        *above, name = (*path.relative_to(self.root).parts,) or (".",)
        try:
            folder = os.open(self.root, _FOLDER)
            try:
                for part in above:
                    if make_folders:
                        with suppress(FileExistsError):
                            os.mkdir(part, dir_fd=folder)
                    deeper = os.open(part, _FOLDER, dir_fd=folder)
                    os.close(folder)
                    folder = deeper
                # A FIFO opened for reading would wait for a writer.
                return os.open(
                    name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder
                )
            finally:
                os.close(folder)
        except OSError as error:
            raise ToolError(f"{path}: {error.strerror}") from None

    def read(self, path: Path) -> bytes:
        """The content of a file. Raises ToolError if it is no regular file, or larger than MAX_FILE."""
        with os.fdopen(self._regular(path, os.O_RDONLY), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_FILE:
                raise ToolError(f"{path}: it has {size} bytes, more than the {MAX_FILE} that are read")
            return file.read(MAX_FILE)

    def write(self, path: Path, content: bytes) -> None:
        """Write a file and make the folders it is in. Raises ToolError."""
        if ".git" in (part.lower() for part in path.relative_to(self.root).parts):
            raise ToolError(f"{path}: nothing is written into .git, where git looks for programs to run")
        descriptor = self._regular(path, os.O_WRONLY | os.O_CREAT, make_folders=True)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.truncate()
                file.write(content)
        except OSError as error:
            raise ToolError(f"{path}: {error.strerror}") from None

    def _regular(self, path: Path, flags: int, *, make_folders: bool = False) -> int:
        descriptor = self.open(path, flags, make_folders=make_folders)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise ToolError(f"{path}: it is no regular file")
