"""Object code in memory: its bytes become a function at an address. LLVM's linker does it, without numba."""

from __future__ import annotations

from functools import cache
from itertools import count
from typing import Any

ENTRY = "kernel"
"""The symbol of an object file that is its function."""

_numbers = count()


def link(code: bytes) -> int:
    """The address of ENTRY in an object file, valid until the process ends.

    Raises RuntimeError when it is no object file for this machine, or refers to something that this process lacks.
    """
    from llvmlite.binding.orcjit import JITLibraryBuilder

    library = JITLibraryBuilder().add_object_img(code).add_current_process().export_symbol(ENTRY)
    linked = library.link(_linker(), f"kernel {next(_numbers)}")
    address = int(linked[ENTRY])
    linked.detach()  # it is never unloaded: threads of the team may be in it to the very end
    return address


@cache
def _linker() -> Any:
    from llvmlite import binding
    from llvmlite.binding.orcjit import create_lljit_compiler

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return create_lljit_compiler(suppress_errors=True)  # they are raised as well
