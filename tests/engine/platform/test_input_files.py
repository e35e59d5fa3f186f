"""Files named as input are read whole, so only those that end, and not beyond a limit."""

import io
import os
import threading
from pathlib import Path

import pytest

from quengine.errors import EngineError
from quengine.platform.input_files import read_stream, read_text


def test_a_file_and_a_pipe_are_read_to_their_end(tmp_path: Path) -> None:
    path = tmp_path / "prompt"
    path.write_bytes("héllo\r\nworld\n".encode())
    assert read_text(path, "cannot read") == "héllo\nworld\n"
    os.mkfifo(pipe := tmp_path / "pipe")
    threading.Thread(target=pipe.write_bytes, args=(b"from a pipe",), daemon=True).start()
    assert read_text(pipe, "cannot read") == "from a pipe"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("/dev/zero", "it is a device; give a file or a pipe"),
        ("/dev/null", "it is a device; give a file or a pipe"),
        (".", "it is a folder; give a file or a pipe"),
        ("no-such-file", "No such file or directory"),
        ("a" * 5000, "File name too long"),
        ("a\0b", "embedded null"),
    ],
)
def test_what_cannot_be_read_is_one_short_line(name: str, says: str) -> None:
    with pytest.raises(EngineError) as caught:
        read_text(Path(name), "cannot read the keys from")
    message = str(caught.value)
    assert message.startswith("cannot read the keys from ") and says in message
    assert len(message) < 300


def test_no_more_than_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"x" * 101)
    with pytest.raises(EngineError, match="more than 100 bytes"):
        read_text(path, "cannot read", limit=100)
    assert read_text(path, "cannot read", limit=101) == "x" * 101

    class Endless(io.RawIOBase):
        """Standard input that never ends."""

        def read(self, size: int = -1) -> bytes:
            assert 0 < size <= 101
            return b"x" * size

    with pytest.raises(EngineError, match="standard input: more than 100 bytes"):
        read_stream(Endless(), "cannot read from standard input", limit=100)


def test_bytes_that_are_not_utf8_are_refused_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "prompt"
    path.write_bytes(b"ab\xffc")
    with pytest.raises(EngineError, match="not UTF-8, byte 0xff at 2"):
        read_text(path, "cannot read")
    assert read_stream(io.BytesIO(b"ab\xffc\r\n"), "cannot read", replace=True) == "ab\ufffdc\r\n"
