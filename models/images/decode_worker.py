"""The process that decodes image files. Run as a script by `limited_decoder`; imports little but Pillow.

Its setup is {"descriptor", "size"} of memory that both sides have mapped. A request {"size"} says how many bytes of a
file are at its beginning. The answer is {"width", "height"}, and the RGB pixels then replace the file, row by row; or
{"error"}. It also has {"unsealed"} if the process can do more than compute.

Once all that Pillow may import is imported, the process gives up files, sockets and other processes (`seal`).
"""

import ctypes
import io
import json
import mmap
import platform
import resource
import signal
from contextlib import suppress
from typing import Any

from PIL import Image

from quengine.kernels.confine import landlock, privileges
from quengine.models.images.decode import FORMATS, ImageError, decode_image
from quengine.models.template.limited_worker import LimitedWorker

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""Parameters of mallopt (malloc.h)."""


def seal() -> str:
    """Gives up everything but memory, time and open descriptors. Returns "" if the kernel then refuses all other system
    calls, else the reason why it does not."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if landlock.version() > 0:
        with suppress(OSError):
            landlock.confine((), ())
    if not privileges.supported():
        return f"no filter of system calls is known for {platform.machine()}"
    with suppress(OSError):
        privileges.drop_capabilities()
    try:
        privileges.allow_computing_alone()
    except OSError as error:
        return f"seccomp: {error.strerror}"
    return ""


def keep_memory() -> None:
    """Makes glibc's malloc keep the memory that an image of a few megapixels needs: giving pages back and taking them
    again is most of the time of a small image."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 64 << 20)


def import_decoders() -> None:
    """Decode a turned image of each format, so that whatever is imported on the way is there."""
    exif = Image.Exif()
    exif[0x0112] = 6
    for kind in FORMATS:
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, kind, exif=exif)
        decode_image(file.getvalue())


def decode(memory: mmap.mmap, size: int) -> dict[str, Any]:
    """The answer to a request."""
    image = decode_image(memory[:size])
    pixels = image.tobytes()
    memory[: len(pixels)] = pixels
    return {"width": image.width, "height": image.height}


def main() -> None:
    worker = LimitedWorker()
    memory = mmap.mmap(worker.setup["descriptor"], worker.setup["size"])
    keep_memory()
    import_decoders()
    unsealed = {"unsealed": why} if (why := seal()) else {}
    for request in worker.requests():
        signal.setitimer(signal.ITIMER_VIRTUAL, worker.seconds)
        try:
            answer = decode(memory, json.loads(request)["size"])
        except ImageError as error:
            answer = {"error": str(error)}
        except MemoryError:
            answer = {"error": f"image: takes more than {worker.memory >> 20} MiB of memory to decode"}
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        worker.answer({**answer, **unsealed} if unsealed else answer)


if __name__ == "__main__":
    main()
