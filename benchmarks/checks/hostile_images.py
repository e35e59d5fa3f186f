"""Feeds damaged image files to the process that decodes them, and to a server in front of a tiny model.

    python -m benchmarks.checks.hostile_images [--count 4000] [--requests 500] [--seed 0] [--times]

Run from the repository root. Files of each format are changed at random: bytes, lengths, parts that are cut out,
doubled or of another file, sizes of PNG files with checksums that fit. Each must become an image or one line, the
server's answers 200 or 400. Prints a line a format; exits with 1 otherwise. --times instead: what an image takes in
that process and in this one, and the time and memory of the largest that are read.
"""

import argparse
import base64
import io
import statistics
import struct
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.random import Generator
from PIL import Image

from quengine.models.images.decode import FORMATS, MAX_PIXELS, ImageError, decode_image
from quengine.models.images.limited_decoder import LIMITS, LimitedDecoder, decode_limited

SIDE = 1 << 13
"""Side of the largest image that is read, in pixels."""


def picture(width: int, height: int) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(
        np.stack([x * 255 // width, y * 255 // height, (x ^ y) & 255], -1).astype(np.uint8)
    )


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def originals() -> dict[str, list[bytes]]:
    """Files of each format, in several of its kinds."""
    image, exif = picture(61, 43), Image.Exif()
    exif[0x0112] = 6
    return {
        "PNG": [
            saved(image, "PNG"),
            saved(image.convert("P"), "PNG", transparency=3),
            saved(image.convert("RGBA"), "PNG", exif=exif),
        ],
        "JPEG": [
            saved(image, "JPEG"),
            saved(image, "JPEG", progressive=True, exif=exif),
            saved(image.convert("CMYK"), "JPEG"),
            saved(image, "MPO", save_all=True, append_images=[image]),
        ],
        "WEBP": [
            saved(image, "WEBP"),
            saved(image, "WEBP", lossless=True),
            saved(image.convert("RGBA"), "WEBP", save_all=True, append_images=[image], exif=exif),
        ],
        "GIF": [saved(image, "GIF"), saved(image, "GIF", save_all=True, append_images=[image.rotate(90)])],
    }


def mutated(random: Generator, data: bytes, other: bytes) -> bytes:
    """A changed file."""
    changed = bytearray(data)
    for _ in range(random.integers(1, 4)):
        at = int(random.integers(0, max(1, len(changed) - 8)))
        size = int(random.integers(1, 64))
        match random.integers(0, 7):
            case 0:
                for place in random.integers(0, max(1, len(changed)), size // 8 + 1):
                    changed[place : place + 1] = random.bytes(1)
            case 1:  # what may be a length or a size, of either order
                value = int(random.choice([0, 1, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x10000]))
                changed[at : at + 4] = struct.pack(random.choice(["<I", ">I"]), value)
            case 2:
                del changed[at : at + size]
            case 3:
                changed[at:at] = changed[at : at + size] * int(random.integers(1, 40))
            case 4:
                changed[at : at + size] = other[at : at + size]
            case 5:
                del changed[at:]
            case 6:
                changed = with_png_header(random, changed)
    return bytes(changed)


def with_png_header(random: Generator, data: bytearray) -> bytearray:
    """With other sides, depth, colours and interlacing, and a checksum that fits; another format as it is."""
    if not data.startswith(b"\x89PNG") or len(data) < 33:
        return data
    sides = [int(random.choice([0, 1, 43, 61, 5000, 65_500, 1 << 20, 1 << 31])) for _ in range(2)]
    kinds = [int(random.choice(values)) for values in ([1, 2, 4, 8, 16], [0, 2, 3, 4, 6], [0], [0], [0, 1])]
    head = b"IHDR" + struct.pack(">IIBBBBB", *sides, *kinds)
    return data[:12] + head + struct.pack(">I", zlib.crc32(head)) + data[33:]


def files(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """`count` changed files of the four formats."""
    random, given = np.random.default_rng(seed), originals()
    every = [data for kind in FORMATS for data in given[kind]]
    for number in range(count):
        kind = FORMATS[number % len(FORMATS)]
        first, second = random.choice(len(given[kind])), random.choice(len(every))
        yield kind, mutated(random, given[kind][first], every[second])


def fuzz_process(seed: int, count: int) -> int:
    """How many files became neither an image nor one line."""
    decoder, outcomes, longest, wrong = LimitedDecoder(), Counter[tuple[str, str]](), dict[str, float](), 0
    for kind, data in files(seed, count):
        began = time.monotonic()
        try:
            decoder.decode(data)
            outcome = "images"
        except ImageError as error:
            outcome = "ended the process" if "cannot be decoded" in str(error) else "refused"
            wrong += "\n" in str(error)
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
            wrong += 1
        outcomes[kind, outcome] += 1
        longest[kind] = max(longest.get(kind, 0.0), time.monotonic() - began)
    decoder.close()
    for kind in FORMATS:
        found = ", ".join(f"{n} {what}" for (of, what), n in sorted(outcomes.items()) if of == kind)
        print(f"{kind}: {found}; at most {1e3 * longest.get(kind, 0.0):.0f} ms", flush=True)
    return wrong


def fuzz_server(seed: int, count: int) -> int:
    """How many requests with such an image had another status than 200 and 400."""
    from quengine.serve.processes.engine_llm import LLMEngine
    from tests.engine.fake_vision import FakeImage, seeing, write_model
    from tests.engine.serve.serving import serving

    def prepared(data: bytes) -> FakeImage:
        """An image of eight rows that its pixels name."""
        digest = sha256(decode_limited(data).tobytes()).digest()
        return FakeImage(tuple(32 + byte % 64 for byte in digest[:8]), digest)

    statuses, longest = Counter[int](), 0.0
    with (
        tempfile.TemporaryDirectory() as folder,
        seeing(write_model(Path(folder) / "m.gguf")) as (llm, vision),
        serving(lambda: LLMEngine(llm), settings={"model_names": ("tiny",)}) as served,
        served.http() as client,
    ):
        vision.prepare = prepared  # type: ignore[method-assign]
        for _, data in files(seed, count):
            url = f"data:;base64,{base64.b64encode(data).decode()}"
            content = [{"type": "image_url", "image_url": {"url": url}}]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            began = time.monotonic()
            statuses[client.post("/v1/chat/completions", json=body).status_code] += 1
            longest = max(longest, time.monotonic() - began)
    print(f"server: {dict(sorted(statuses.items()))}; at most {1e3 * longest:.0f} ms")
    return count - statuses[200] - statuses[400]


def print_times() -> None:
    """What decoding takes there and here, then the largest images."""
    decoder = LimitedDecoder()
    for side in (64, 512, 1024):
        for kind in FORMATS:
            data = saved(picture(side, side), kind)
            here, there = _median_ms(decode_image, data), _median_ms(decoder.decode, data)
            print(f"{kind} of {side} x {side}: {here:.2f} ms here, {there:.2f} ms in the process", flush=True)
    data = saved(picture(1024, 1024), "JPEG")
    for threads in (1, 4):
        here, there = _a_second(decode_image, data, threads), _a_second(decode_limited, data, threads)
        print(
            f"JPEG of 1024 x 1024 in {threads} threads: {here:.0f} a second here, {there:.0f} in processes",
            flush=True,
        )
    image = picture(SIDE, MAX_PIXELS // SIDE)
    kinds: dict[str, dict[str, object]] = {
        "PNG": {"compress_level": 1},
        "JPEG": {"progressive": True},
        "WEBP": {"method": 0},
        "GIF": {},
    }
    for kind, options in kinds.items():
        turned = image if kind == "GIF" else image.convert("RGBA" if kind in ("PNG", "WEBP") else "CMYK")
        exif = Image.Exif()
        exif[0x0112] = 6
        data = saved(turned, kind, exif=exif, **options)
        began = time.monotonic()
        try:
            decoder.decode(data)
            process = decoder.process._process
            peak = _peak_mib(process.pid) if process is not None else 0
            found = f"at most {peak} MiB of addresses of {LIMITS.memory_bytes >> 20}"
        except ImageError as error:
            found = str(error)
        print(f"{kind} of {MAX_PIXELS} pixels: {time.monotonic() - began:.1f} s, {found}", flush=True)
        decoder.process.close()
    decoder.close()


def _peak_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmPeak"))


def _a_second(decode: Callable[[bytes], Image.Image], data: bytes, threads: int, count: int = 60) -> float:
    """Images a second that `threads` threads decode."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(decode, [data] * threads))
        began = time.perf_counter()
        list(pool.map(decode, [data] * count))
        return count / (time.perf_counter() - began)


def _median_ms(decode: Callable[[bytes], Image.Image], data: bytes) -> float:
    times = []
    for _ in range(15):
        began = time.perf_counter()
        decode(data)
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=4000, help="files for the process")
    parser.add_argument("--requests", type=int, default=500, help="files for the server")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", action="store_true")
    given = parser.parse_args()
    if given.times:
        print_times()
        return 0
    wrong = fuzz_process(given.seed, given.count)
    if given.requests:
        wrong += fuzz_server(given.seed + 1, given.requests)
    print(f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
