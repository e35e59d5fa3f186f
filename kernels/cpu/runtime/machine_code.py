"""Links object code in memory: its bytes become a function at an address, by LLVM's linker, without numba."""

from __future__ import annotations

from functools import cache
from itertools import count
from typing import Any

ENTRY = "kernel"
"""The symbol of an object file's function."""

_numbers = count()


def link(code: bytes) -> int:
    """The address of ENTRY in an object file, which is linked. It stays valid until the process ends.

    Raises RuntimeError for an object file of another machine, a damaged one, or one with unresolved symbols.
    """
    from llvmlite.binding.orcjit import JITLibraryBuilder

    library = JITLibraryBuilder().add_object_img(code).add_current_process().export_symbol(ENTRY)
    linked = library.link(_linker(), f"kernel {next(_numbers)}")
    address = int(linked[ENTRY])
    linked.detach()  # never unloaded: the team's threads may run in it until the process ends
    return address


@cache
def _linker() -> Any:
    from llvmlite import binding
    from llvmlite.binding.orcjit import create_lljit_compiler

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return create_lljit_compiler(suppress_errors=True)  # errors are raised as well
