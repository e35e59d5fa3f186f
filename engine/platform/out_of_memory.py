"""Which errors mean that memory, or room for threads and processes, has run out: each library has its own."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from quengine.errors import CannotRunError

_ADVICE = "lower -c or --parallel, choose a smaller model or quant type, or end what else uses memory"

# Messages of torch on the CPU, CUDA and its libraries, Triton, C++, the C library, and LLVM.
_SIGNS = re.compile(
    r"alloc_cpu|DefaultCPUAllocator|can't allocate memory|cannot allocate memory|out of memory|not enough memory"
    r"|ALLOC_FAILED|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|std::bad_alloc|failed to map segment"
    r"|unable to mmap|failed to allocate|unable to allocate",
    re.IGNORECASE,
)
_THREAD = re.compile(r"can't start new thread|Resource temporarily unavailable|pthread_create", re.IGNORECASE)


def out_of_memory(error: BaseException) -> CannotRunError | None:
    """The error for the user in place of `error`, with what to lower; None where it means something else."""
    text = str(error)
    if isinstance(error, CannotRunError):
        return None
    if isinstance(error, OSError) and error.errno == errno.EAGAIN and error.filename is None:
        return _no_threads()
    if isinstance(error, RuntimeError) and _THREAD.search(text):
        return _no_threads()
    if _is_memory(error, text):
        return CannotRunError(f"not enough memory{_what(text)}; {_ADVICE}")
    return None


@contextmanager
def memory_errors() -> Iterator[None]:
    """A block in which an error that means that memory has run out is raised as `out_of_memory` gives it."""
    try:
        yield
    except Exception as error:
        if (problem := out_of_memory(error)) is not None:
            raise problem from error
        raise


def killed_for_memory(code: int | None) -> str:
    """The end of a line about a process that ended with `code`, where the system may have killed it for its memory."""
    return f"; the system does so when memory has run out: {_ADVICE}" if code == -9 else ""


def _is_memory(error: BaseException, text: str) -> bool:
    if isinstance(error, MemoryError) or any(t.__name__ == "OutOfMemoryError" for t in type(error).__mro__):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM or (error.errno is None and bool(_SIGNS.search(text)))
    return isinstance(error, RuntimeError | ImportError) and bool(_SIGNS.search(text))


def _what(text: str) -> str:
    """The sizes that a library names; its own words are for its developers."""
    size = r"[\d.,]+ ?(?:bytes|[KMGT]i?B)\b"
    wanted = re.search(rf"(?:allocate|allocate memory: you tried to allocate) ({size})", text, re.IGNORECASE)
    free = re.search(rf"({size}) (?:is|are) free", text)
    found = [f"{wanted[1]} asked for" if wanted else "", f"{free[1]} free" if free else ""]
    said = ", ".join(each for each in found if each)
    return f" ({said})" if said else ""


def _no_threads() -> CannotRunError:
    return CannotRunError(
        "no more threads or processes can be started: lower -t, raise the limits on processes and memory "
        "(`ulimit -u`, `ulimit -v`), or end other programs"
    )
