"""Image files decoded in a process of their own: the same pixels, and whatever a file does there is one line here."""

import errno
import io
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from quengine.kernels.confine import privileges
from quengine.models.images import limited_decoder
from quengine.models.images.decode import ImageError, decode_image
from quengine.models.images.limited_decoder import LimitedDecoder, LimitedDecoders, decode_limited
from quengine.models.template.limited_process import ProcessLimits
from tests.models.images.test_decode import png_of
from tests.models.vision.vision_models import encoded, picture

WORKER = """
import ctypes, fcntl, os, socket, sys, threading
from quengine.models.images import decode_worker

true = decode_worker.decode

def decode(memory, size):
    given = memory[:size]
    if given.startswith(b"run "):
        return {{"error": "image: " + str(run(given[4:].decode()))}}
    return true(memory, size)

def run(text):
    found = {{}}
    exec(text, globals(), found)
    return found.get("found")

decode_worker.decode = decode
{more}
decode_worker.main()
"""
"""Does what a file that has taken it over would do: the text after `run `."""


@pytest.fixture(scope="module")
def decoder() -> Iterator[LimitedDecoder]:
    made = LimitedDecoder()
    yield made
    made.close()


Taken = Callable[[str], str]


@pytest.fixture
def taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Taken]:
    """Runs a text in the process, and gives the line that comes of it. Then the process decodes as before."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(more=""))
    monkeypatch.setattr(limited_decoder, "_WORKER", worker)
    made = LimitedDecoder(ProcessLimits(cpu_seconds=1.0, memory_bytes=1 << 30))

    def run(text: str) -> str:
        with pytest.raises(ImageError) as caught:
            made.decode(f"run {text}".encode())
        assert made.decode(encoded(picture(5, 4))).size == (5, 4)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    yield run
    made.close()


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(picture(9, 5), "JPEG", exif=exif)


def several() -> bytes:
    return encoded(picture(9, 5), "MPO", save_all=True, append_images=[picture(9, 5)])


@pytest.mark.parametrize(
    "data",
    [
        *(encoded(picture(31, 17), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF")),
        encoded(picture(31, 17).convert("CMYK"), "JPEG"),
        encoded(picture(31, 17).convert("P"), transparency=3),
        encoded(Image.fromarray(np.full((4, 4), 0x8123, np.uint16))),
        encoded(Image.new("LA", (4, 4), (7, 9))),
        turned(),
        several(),
    ],
    ids=range(10),
)
def test_pixels_are_those_of_this_process(decoder: LimitedDecoder, data: bytes) -> None:
    """What Pillow imports for one file or another is there, though the process opens no files."""
    assert np.array_equal(np.asarray(decoder.decode(data)), np.asarray(decode_image(data)))


@pytest.mark.parametrize(
    "data",
    [b"", b"hello", encoded(picture(64, 64))[:300], png_of(9_000, 9_000), png_of(40, 40)],
    ids=range(5),
)
def test_errors_are_those_of_this_process(decoder: LimitedDecoder, data: bytes) -> None:
    with pytest.raises(ImageError) as expected:
        decode_image(data)
    with pytest.raises(ImageError) as found:
        decoder.decode(data)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("os._exit(3)", "a file of 15 bytes cannot be decoded: its process ended with status 3"),
        ("os.abort()", "which may use 1024 MiB of memory, ended with SIG"),
        ("ctypes.string_at(0)", "ended with SIGSEGV"),
        ("while True: pass", "takes more than 1 seconds"),
        ("bytearray(2 << 30)", "takes more than 1024 MiB of memory to decode"),
    ],
)
def test_the_end_of_the_process_is_one_line_and_the_next_image_has_another(
    taken: Taken, text: str, line: str
) -> None:
    assert line in taken(text)


@pytest.mark.skipif(
    sys.platform != "linux" or not privileges.supported(), reason="no filter of system calls here"
)
@pytest.mark.parametrize(
    "text",
    [
        "open('/proc/self/environ')",
        "open('/tmp/quengine-image', 'w')",
        "os.listdir('/')",
        "socket.socket()",
        "socket.socket(socket.AF_UNIX)",
        "os.fork()",
        "os.execv('/bin/true', ['true'])",
        "threading.Thread(target=print).start()",
        "os.kill(PARENT, 0)",
        "fcntl.fcntl(3, fcntl.F_GETFL)",
        "os.memfd_create('x')",
    ],
)
def test_the_process_reaches_nothing_else(taken: Taken, text: str) -> None:
    text = text.replace("PARENT", str(os.getpid()))
    tried = f"try:\n  {text}\nexcept (OSError, RuntimeError) as error: found = type(error).__name__"
    assert taken(tried).removeprefix("image: ") in ("PermissionError", "RuntimeError")


def test_the_shared_memory_keeps_its_size(decoder: LimitedDecoder) -> None:
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(decoder._descriptor, 0)


@pytest.mark.parametrize(
    "answer",
    [
        *("{'width': 1 << 40, 'height': 1}", "{'width': 60_000, 'height': 60_000}", "{'height': 1}"),
        *("{'width': 1.5, 'height': 1}", "[]", "5", "'error'"),
    ],
)
def test_what_a_process_gives_that_was_taken_over_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    refuses(tmp_path, monkeypatch, f"decode_worker.decode = lambda *_: {answer}")


def test_an_answer_of_many_levels_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses(tmp_path, monkeypatch, "import json\njson.dumps = lambda _: '[' * 100_000")


def refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(more=more))
    monkeypatch.setattr(limited_decoder, "_WORKER", worker)
    made = LimitedDecoder()
    with pytest.raises(ImageError, match="cannot be decoded: it gives no size in pixels"):
        made.decode(encoded(picture(5, 4)))
    made.close()


def test_a_system_without_a_filter_of_calls_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(more="decode_worker.privileges.supported = lambda: False"))
    monkeypatch.setattr(limited_decoder, "_WORKER", worker)
    made = LimitedDecoder()
    for _ in range(2):
        assert made.decode(encoded(picture(5, 4))).size == (5, 4)
    made.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "may open files and sockets: no filter of system calls is known for" in line


def test_threads_decode_at_once_and_processes_are_kept() -> None:
    decoders = LimitedDecoders()
    images = [picture(side, 7) for side in range(1, 25)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda image: decoders.decode(encoded(image)), images))
    assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(found, images, strict=True))
    processes = [each.process._process for each in decoders._free]
    assert 1 <= len(processes) <= limited_decoder.MOST_PROCESSES
    decoders.decode(encoded(images[0]))
    assert [each.process._process for each in decoders._free] == processes
    for each in decoders._free:
        each.close()


def test_memory_of_a_large_image_is_given_back(decoder: LimitedDecoder) -> None:
    image = Image.new("RGB", (3000, 3000), (1, 2, 3))
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    assert decoder.decode(file.getvalue()).getpixel((2999, 2999)) == (1, 2, 3)
    assert os.fstat(decoder._descriptor).st_blocks * 512 <= limited_decoder._KEPT_BYTES


def test_an_image_of_a_processor_is_decoded_in_a_limited_process() -> None:
    before = limited_decoder._decoders._free[-1:]
    decode_limited(encoded(picture(3, 3)))
    (decoder,) = limited_decoder._decoders._free[-1:]
    assert decoder.process._process is not None and (not before or before == [decoder])


def test_without_memory_to_share_an_image_has_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[int]()

    def full(descriptor: int, _size: int) -> mmap.mmap:
        opened.append(descriptor)
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(limited_decoder.mmap, "mmap", full)
    decoders = LimitedDecoders()
    decoders.start()
    for _ in range(limited_decoder.MOST_PROCESSES + 1):  # none of which is held
        with pytest.raises(ImageError, match="image: no memory to decode it in: Cannot allocate memory"):
            decoders.decode(encoded(picture(3, 3)))
    for descriptor in set(opened):
        with pytest.raises(OSError):
            os.fstat(descriptor)
