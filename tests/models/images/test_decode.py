"""Image files: what is read and how, and hostile ones, which one line refuses."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from quengine.models.images import decode as decoding
from quengine.models.images.decode import ImageError, decode_image
from tests.models.vision.vision_models import encoded, picture

RED, GREEN = (255, 0, 0), (0, 255, 0)


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image)


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("WEBP", {"lossless": True})])
def test_formats_without_loss(kind: str, options: dict[str, bool]) -> None:
    image = picture(31, 17)
    read = decode_image(encoded(image, kind, **options))
    assert read.mode == "RGB" and np.array_equal(pixels(read), pixels(image))


def test_jpeg_and_progressive() -> None:
    image = picture(31, 17)
    for progressive in (False, True):
        data = encoded(image, "JPEG", quality=95, progressive=progressive)
        assert np.array_equal(pixels(decode_image(data)), pixels(Image.open(io.BytesIO(data))))
    cmyk = decode_image(encoded(image.convert("CMYK"), "JPEG"))
    assert cmyk.mode == "RGB" and cmyk.size == (31, 17)


def test_first_frame_of_a_gif() -> None:
    first, second = Image.new("RGB", (9, 7), RED), Image.new("RGB", (9, 7), GREEN)
    data = encoded(first, "GIF", save_all=True, append_images=[second])
    assert (pixels(decode_image(data)) == RED).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation(orientation: int) -> None:
    """A corner is where the camera saw it."""
    image = Image.new("RGB", (16, 8), RED)
    turns: dict[int, Image.Transpose | None] = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    image.paste(GREEN, (0, 0, 4, 4))
    exif = Image.Exif()
    exif[0x0112] = orientation
    turn = turns[orientation]
    expected = image if turn is None else image.transpose(turn)
    assert np.array_equal(pixels(decode_image(encoded(image, "PNG", exif=exif))), pixels(expected))


def test_modes() -> None:
    """Transparency lies over white, a palette is its colours, 16-bit grey keeps its upper bits."""
    half = Image.new("RGBA", (4, 4), (255, 0, 0, 128))
    assert tuple(pixels(decode_image(encoded(half)))[0, 0]) == (255, 127, 127)
    clear = Image.new("LA", (4, 4), (0, 0))
    assert (pixels(decode_image(encoded(clear))) == 255).all()
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([*RED, *GREEN])
    assert (pixels(decode_image(encoded(palette))) == GREEN).all()
    assert (pixels(decode_image(encoded(palette, transparency=1))) == 255).all()
    deep = Image.fromarray(np.full((4, 4), 0x8123, np.uint16))
    assert (pixels(decode_image(encoded(deep))) == 0x81).all()
    assert (pixels(decode_image(encoded(Image.new("1", (4, 4), 1)))) == 255).all()


def png_of(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG that says it has these sides."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes"),
        (b"hello", "an unknown format, not JPEG, PNG, WebP or GIF (5 bytes)"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG, not JPEG"),
        (b'<?xml version="1.0"?><svg/>', "SVG, not JPEG"),
        (encoded(picture(4, 4), "BMP"), "BMP, not JPEG"),
        (encoded(picture(4, 4), "TIFF"), "TIFF, not JPEG"),
        (b"\0\0\0\x18ftypmp42" + bytes(20), "video, not JPEG"),
        (b"\0\0\0\x18ftypavif" + bytes(20), "AVIF, not JPEG"),
        (b"RIFF\x24\0\0\0WAVEfmt ", "WAV audio, not JPEG"),
        (png_of(60_000, 60_000), "3600000000 pixels, over the limit of 67108864 pixels"),
        (png_of(9_000, 9_000), "9000 x 9000 pixels, over the limit of 67108864 in all"),
        (png_of(100_000, 2), "100000 x 2 pixels, over the limit of 65500 a side"),
        (png_of(1 << 30, 1 << 30), "pixels"),
        (png_of(0, 5), "image: "),
        (png_of(40, 40, zlib.compress(bytes(50))), "a damaged file of"),
        (encoded(picture(64, 64))[:300], "a damaged file of 300 bytes"),
        (encoded(picture(64, 64), "JPEG")[:300], "a damaged file of 300 bytes"),
        (encoded(picture(64, 64), "WEBP")[:300], "a damaged file of 300 bytes"),
        (encoded(picture(64, 64), "JPEG") + b"\xff\xda" * 100, "a JPEG of 101 scans, over the limit of 100"),
    ],
    ids=range(19),
)
def test_hostile_files(data: bytes, message: str) -> None:
    with pytest.raises(ImageError) as caught:
        decode_image(data)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_over_the_limit_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MAX_BYTES", 10)
    with pytest.raises(ImageError, match="11 bytes, over the limit of 10"):
        decode_image(bytes(11))


def test_nothing_is_decoded_before_the_size_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    with pytest.raises(ImageError, match="over the limit"):
        decode_image(png_of(9_000, 9_000, zlib.compress(bytes(1000))))


def test_random_damage_is_one_line() -> None:
    """Bytes changed at random in files of each kind: an image or an ImageError, nothing else."""
    random = np.random.default_rng(0)
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        whole = encoded(picture(24, 24), kind)
        for _ in range(60):
            data = bytearray(whole)
            for at in random.integers(0, len(data), 3):
                data[at] = random.integers(0, 256)
            try:
                assert decode_image(bytes(data)).mode == "RGB"
            except ImageError as error:
                assert str(error).startswith("image: ")
