"""Starting the process that leads those which compile kernels (compile_processes.py), and whether it was needed before.

Torch is not imported here: where nothing has been compiled yet the process is started while the program itself imports
torch, and takes as long for that.
"""

import os
import subprocess
import sys
from contextlib import suppress
from hashlib import sha256
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import triton

from quengine.kernels.cuda.launch.triton_cache import use_private_cache

Started = tuple["subprocess.Popen[bytes]", Connection]
"""A process, and an end of a pipe to it."""

_early: list[Started] = []


def start_early(prelude: str, module: str) -> None:
    """Where this version of the kernels has compiled for no model yet, start a process that the next `start_process`
    gives. `module`: what it imports while it waits for its order."""
    use_private_cache()
    if not compiled_before().is_file():
        _early.append(_start(prelude, module))


def start_process(prelude: str) -> Started:
    """The process that was started early, or else a new one. `prelude`: see `CompilePool`."""
    while _early:
        process, pipe = _early.pop()
        if process.poll() is None:
            return process, pipe
        pipe.close()
    return _start(prelude, "")


def _start(prelude: str, module: str) -> Started:
    """It knows of no GPU."""
    ours, theirs = Pipe()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TRITON_CACHE_DIR": str(triton.knobs.cache.dir),
        "CUDA_VISIBLE_DEVICES": "",
    }
    program = (
        f"{prelude}\nfrom quengine.kernels.cuda.launch.compile_processes import lead\n"
        f"lead({theirs.fileno()}, {module!r})"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", program], env=environment, pass_fds=[theirs.fileno()], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    theirs.close()
    return process, ours


def mark(*markers: Path) -> None:
    """Make these, and `compiled_before`."""
    with suppress(OSError):  # a cache that cannot be written: looked for again next time
        for path in (*markers, compiled_before()):
            path.touch(mode=0o600)


def compiled_before() -> Path:
    """The marker of any model on any GPU."""
    return marker()


def marker(*what: object) -> Path:
    """The file in Triton's cache that says: this version of the kernels was compiled for `what` (GPU, model, ...).

    It goes with the cache it speaks of. A wrong one does no harm: a kernel that is missing is compiled at its launch.
    """
    digest = sha256(repr((triton.__version__, *what)).encode())
    digest.update(source_stamp())
    return Path(triton.knobs.cache.dir) / f"quengine-{digest.hexdigest()[:32]}"


def source_stamp() -> bytes:
    """Names this version of the modules that kernels are in."""
    digest = sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()
