"""Bytes of an image file as RGB pixels, within limits that are checked before anything is decoded.

`limited_decoder` calls it in a process that a hostile file cannot leave.

Only the decoders of four formats are reachable. Orientation follows EXIF; transparency is laid over white, as the image
processors of `transformers` do; 16-bit grey keeps its upper eight bits.
"""

import io
import re
import warnings

from PIL import (
    GifImagePlugin,
    Image,
    ImageColor,
    ImageOps,
    ImagePalette,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from quengine.errors import EngineError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
IMPORTED = (
    *(GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin),
    *(MpoImagePlugin, TiffImagePlugin),  # JPEG files of several images, and EXIF
    *(ImageColor, ImagePalette),
)
"""Modules that Pillow imports for some files; imported ahead, as the process later has no files."""
MAX_BYTES = 64 << 20
MAX_PIXELS = 1 << 26
"""Most pixels of an image, 8192 x 8192: 192 MiB of RGB."""
MAX_SIDE = 65_500
"""Most pixels of a side: JPEG's own limit."""
MAX_SCANS = 100
"""Most scans of a progressive JPEG, each of which is a pass over all pixels; encoders write about ten."""

_OTHERS = (
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"%PDF", "PDF"),
    (b"\0\0\1\0", "ICO"),
    (b"8BPS", "PSD"),
    (b"\x1aE\xdf\xa3", "WebM video"),
    (b"ID3", "MP3 audio"),
    (b"OggS", "Ogg audio"),
)
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIF"}


class ImageError(EngineError):
    """An image that cannot be read: one line with what is wrong and the numbers."""


def decode_image(data: bytes) -> Image.Image:
    """The image in `data` (JPEG, PNG, WebP, or the first frame of a GIF) as Pillow's RGB, upright.

    Raises:
        ImageError: another format, a damaged file, or one beyond MAX_BYTES, MAX_PIXELS, MAX_SIDE or MAX_SCANS.
        MemoryError: there is no more.
    """
    check_bytes(data)
    if data[:2] == b"\xff\xd8" and (scans := data.count(b"\xff\xda")) > MAX_SCANS:
        raise ImageError(f"image: a JPEG of {scans} scans, over the limit of {MAX_SCANS}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                _check_size(image)
                image.load()
                return _upright_rgb(image)
    except (ImageError, MemoryError):
        raise
    except Image.DecompressionBombError as error:  # Pillow's own limit, twice ours and more
        found = re.search(r"\((\d+) pixels\)", str(error))
        size = f"{found[1]} pixels, " if found else ""
        raise ImageError(f"image: {size}over the limit of {MAX_PIXELS} pixels") from None
    except UnidentifiedImageError:
        raise ImageError(f"image: {_found(data)}, not JPEG, PNG, WebP or GIF ({len(data)} bytes)") from None
    except Exception as error:  # Pillow's decoders raise anything on damaged files
        what = str(error) or type(error).__name__
        raise ImageError(f"image: a damaged file of {len(data)} bytes: {what[:200]}") from None


def check_bytes(data: bytes) -> None:
    """Raises ImageError for a file of no bytes, or of too many."""
    if not data:
        raise ImageError("image: 0 bytes")
    if len(data) > MAX_BYTES:
        raise ImageError(f"image: {len(data)} bytes, over the limit of {MAX_BYTES}")


def _check_size(image: Image.Image) -> None:
    width, height = image.size
    if min(width, height) < 1:
        raise ImageError(f"image: {width} x {height} pixels, none at all")
    if max(width, height) > MAX_SIDE:
        raise ImageError(f"image: {width} x {height} pixels, over the limit of {MAX_SIDE} a side")
    if width * height > MAX_PIXELS:
        raise ImageError(f"image: {width} x {height} pixels, over the limit of {MAX_PIXELS} in all")


def _upright_rgb(image: Image.Image) -> Image.Image:
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I"):
        return image.convert("I").point(lambda grey: grey / 256).convert("L").convert("RGB")
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _found(data: bytes) -> str:
    """A description, for the user, of a file in none of the formats."""
    start = data[:512].lstrip().lower()
    if start.startswith((b"<svg", b"<?xml", b"<!doctype svg")):
        return "SVG"
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12], "video")
    if data[:4] == b"RIFF":
        return {b"WAVE": "WAV audio", b"AVI ": "video"}.get(data[8:12], "RIFF")
    return next((name for magic, name in _OTHERS if data.startswith(magic)), "an unknown format")
